"""Schedules of one stage on each device that differ in how many micro-batches a stage begins before one comes back.

Source: GPipe: Huang et al. (2019). 1F1B: Narayanan et al., "PipeDream-2BW" (2021), figure 4. Eager 1F1B: Zhuang et al.,
"On Optimizing the Communication of Model Parallelism" (2023), section 4.
"""

from cost.schedule_orders.base import Operation, alternating_order


def gpipe(device: int, num_devices: int, num_microbatches: int, stages_per_device: int) -> list[Operation]:
    """Returns all forward operations, then all backward ones."""
    return alternating_order(device, num_microbatches, num_microbatches)


def one_forward_one_backward(
    device: int, num_devices: int, num_microbatches: int, stages_per_device: int
) -> list[Operation]:
    """Returns forward and backward operations that alternate as soon as the first backward one can run."""
    return alternating_order(device, num_microbatches, min(num_microbatches, num_devices - device))


def eager(device: int, num_devices: int, num_microbatches: int, stages_per_device: int) -> list[Operation]:
    """Returns the order of 1F1B with up to twice the micro-batches, so that transfers run beside arithmetic."""
    return alternating_order(device, num_microbatches, min(num_microbatches, 2 * (num_devices - device) - 1))

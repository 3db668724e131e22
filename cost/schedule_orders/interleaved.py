"""Interleaved 1F1B: device d holds the stages d, d + D, d + 2D, ...; a micro-batch goes round all devices v times.

The first micro-batch reaches the last device after D - 1 stages of 1/v of a device's layers. So the pipeline fills and
drains in 1/v of the time, for v times the transfers and more micro-batches in flight.

Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (2021),
section 2.2 and figure 4; Megatron-LM's `forward_backward_pipelining_with_interleaving`.
"""

from cost.schedule_orders.base import BACKWARD, FORWARD, Operation, alternating


def order(device: int, num_devices: int, num_microbatches: int, stages_per_device: int) -> list[Operation]:
    """Returns the operations of a device.

    Groups of D micro-batches go through the first stage of each device, then through the second one of each, and so on;
    backward the stages come in the opposite order. M is a multiple of D: with a smaller last group some orders wait for
    each other for ever.
    """
    groups = [range(first, first + num_devices) for first in range(0, num_microbatches, num_devices)]
    forward = [
        Operation(FORWARD, chunk * num_devices + device, m)
        for group in groups
        for chunk in range(stages_per_device)
        for m in group
    ]
    backward = [
        Operation(BACKWARD, chunk * num_devices + device, m)
        for group in groups
        for chunk in reversed(range(stages_per_device))
        for m in group
    ]
    num_first = 2 * (num_devices - device - 1) + (stages_per_device - 1) * num_devices + 1
    return alternating(forward, backward, min(num_first, len(forward)))

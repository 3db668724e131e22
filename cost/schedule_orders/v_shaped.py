"""ZB-V: device d holds the stages d and 2D - 1 - d, so that a micro-batch goes down the devices and up again.

The first device has the first and the last stage. So the first backward operation runs where the forward one ended, and
all devices keep about as much. With equal times of forward, backward and weights' gradients no device waits.

Source: Qi et al., "Zero Bubble Pipeline Parallelism" (2023), section 6 and figure 8; the order is that of PyTorch's
`ScheduleZBVZeroBubble`.
"""

from collections import Counter

from cost.schedule_orders.base import BACKWARD, FORWARD, WEIGHTS, Operation


def order(device: int, num_devices: int, num_microbatches: int, stages_per_device: int) -> list[Operation]:
    """Returns the operations of a device: those of 2D - 1 micro-batches or more, without the ones too many."""
    down, up, left = device, 2 * num_devices - 1 - device, num_devices - device
    count = max(2 * num_devices - 1, num_microbatches)
    both = [(BACKWARD, down), (WEIGHTS, down), (FORWARD, up), (BACKWARD, up), (WEIGHTS, up)]
    num_last = left - 1  # rounds in which no micro-batch is left to begin
    sequence = [
        *[(FORWARD, down)] * (2 * left - 1),
        *[(FORWARD, up), (FORWARD, down)] * device,
        *[(FORWARD, up), (BACKWARD, up), (WEIGHTS, up)] * left,
        *[(FORWARD, down), *both] * (count - num_devices - num_last),
        *both * num_last,
        *[(BACKWARD, down), (BACKWARD, up)] * device,
        *[(BACKWARD, down), (WEIGHTS, down)] * left,
        *[(WEIGHTS, up)] * device,
        *[(WEIGHTS, down)] * device,
    ]
    done: Counter[tuple[int, int]] = Counter()
    found = []
    for kind, stage in sequence:
        found.append(Operation(kind, stage, done[kind, stage]))
        done[kind, stage] += 1
    return [operation for operation in found if operation.microbatch < num_microbatches]

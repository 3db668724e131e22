"""ZB-H1: the gradients of the weights, which no other stage waits for, fill the time in which a stage would wait.

Source: Qi et al., "Zero Bubble Pipeline Parallelism" (2023), section 2.3.
"""

from cost.schedule_orders.alternating import one_forward_one_backward
from cost.schedule_orders.base import BACKWARD, WEIGHTS, Operation


def order(device: int, num_devices: int, num_microbatches: int, stages_per_device: int) -> list[Operation]:
    """Returns the operations of 1F1B, with the gradients of weights `device` micro-batches later.

    So the last stage, where 1F1B keeps one micro-batch, keeps D, and has gradients of weights left to compute while the
    last gradient goes back through the other stages.
    """
    found: list[Operation] = []
    for operation in one_forward_one_backward(device, num_devices, num_microbatches, stages_per_device):
        found.append(operation)
        if operation.kind == BACKWARD and operation.microbatch >= device:
            found.append(operation._replace(kind=WEIGHTS, microbatch=operation.microbatch - device))
    left = range(max(num_microbatches - device, 0), num_microbatches)
    return found + [Operation(WEIGHTS, device, m) for m in left]

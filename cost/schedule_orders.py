"""The orders in which the devices of a pipeline run their operations, a function for each schedule.

A schedule is a function of a device, the number of devices, the number of micro-batches and the number of stages that a
device holds. It returns the operations of that device in the order in which they run. Everything else, such as which
stage is on which device, follows from these lists.

Letters for sizes: D devices (or groups of devices that work as one), v stages on each, S = D·v stages, M micro-batches.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

FORWARD, BACKWARD, WEIGHTS, SEND_FORWARD, SEND_BACKWARD = range(5)
STAGE_KINDS = (FORWARD, BACKWARD, WEIGHTS)


class Operation(NamedTuple):
    """An operation of a device.

    Attributes:
      kind: `FORWARD`, `BACKWARD`, or `WEIGHTS`: the gradients of weights, where a schedule computes them apart.
      stage: of the model, from 0.
      microbatch: from 0.
    """

    kind: int
    stage: int
    microbatch: int


DeviceOrder = Callable[[int, int, int, int], list[Operation]]
"""`order(device, num_devices, num_microbatches, stages_per_device)`: the operations of a device in order."""


def alternating(forward: Sequence[Operation], backward: Sequence[Operation], num_first: int) -> list[Operation]:
    """Returns operations of which some forward ones come first; then backward and forward ones alternate.

    Args:
      forward: in the order in which they run.
      backward: as many, in the order in which they run.
      num_first: how many forward operations come before the first backward one.
    """
    order = list(forward[:num_first])
    for number, operation in enumerate(backward):
        order.append(operation)
        order += forward[number + num_first : number + num_first + 1]
    return order


def alternating_order(stage: int, num_microbatches: int, kept: int) -> list[Operation]:
    """Returns the operations of a stage that starts `kept` micro-batches before its first backward operation."""
    forward, backward = ([Operation(kind, stage, m) for m in range(num_microbatches)] for kind in (FORWARD, BACKWARD))
    return alternating(forward, backward, kept)


def gpipe(device: int, num_devices: int, num_microbatches: int, stages_per_device: int) -> list[Operation]:
    """Returns all forward operations, then all backward ones. Source: GPipe, Huang et al. (2019)."""
    return alternating_order(device, num_microbatches, num_microbatches)


def one_forward_one_backward(
    device: int, num_devices: int, num_microbatches: int, stages_per_device: int
) -> list[Operation]:
    """Returns forward and backward operations that alternate as soon as the first backward one can run.

    Source: Narayanan et al., "PipeDream-2BW" (2021), figure 4.
    """
    return alternating_order(device, num_microbatches, min(num_microbatches, num_devices - device))


def eager(device: int, num_devices: int, num_microbatches: int, stages_per_device: int) -> list[Operation]:
    """Returns the order of 1F1B with up to twice the micro-batches, so that transfers overlap with arithmetic.

    Source: Zhuang et al., "On Optimizing the Communication of Model Parallelism" (2023), section 4.
    """
    return alternating_order(device, num_microbatches, min(num_microbatches, 2 * (num_devices - device) - 1))


def interleaved(device: int, num_devices: int, num_microbatches: int, stages_per_device: int) -> list[Operation]:
    """Returns the order in which a micro-batch goes round all devices v times: device d holds stages d, d + D, ...

    The first micro-batch reaches the last device after D - 1 stages of 1/v of a device's layers. So the pipeline fills
    and drains in 1/v of the time, for v times the transfers and more micro-batches in flight. Groups of D go through
    the first stage of each device, then through the second one of each, and so on; backward the stages come in the
    opposite order. M is a multiple of D: with a smaller last group some orders wait for each other for ever.

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (2021),
    section 2.2 and figure 4; Megatron-LM's `forward_backward_pipelining_with_interleaving`.
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


def zero_bubble(device: int, num_devices: int, num_microbatches: int, stages_per_device: int) -> list[Operation]:
    """Returns the order of ZB-H1: 1F1B with the gradients of weights, which no other stage awaits, `device` later.

    So the last stage, where 1F1B keeps one micro-batch, keeps D, and has gradients of weights left to compute while the
    last gradient goes back through the other stages. Source: Qi et al., "Zero Bubble Pipeline Parallelism" (2023),
    section 2.3.
    """
    found: list[Operation] = []
    for operation in one_forward_one_backward(device, num_devices, num_microbatches, stages_per_device):
        found.append(operation)
        if operation.kind == BACKWARD and operation.microbatch >= device:
            found.append(operation._replace(kind=WEIGHTS, microbatch=operation.microbatch - device))
    left = range(max(num_microbatches - device, 0), num_microbatches)
    return found + [Operation(WEIGHTS, device, m) for m in left]


def v_shaped(device: int, num_devices: int, num_microbatches: int, stages_per_device: int) -> list[Operation]:
    """Returns the order of ZB-V: device d holds the stages d and 2D - 1 - d, so that work goes down and up again.

    The first device has the first and the last stage, so the first backward operation runs where the forward one ended,
    and all devices keep about as much. With equal times of forward, backward and weights' gradients no device waits.
    The order is made for 2D - 1 micro-batches or more; those too many are left out.

    Source: Qi et al. (2023), section 6 and figure 8; the order is that of PyTorch's `ScheduleZBVZeroBubble`.
    """
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

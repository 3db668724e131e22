"""What an order of operations is made of.

A schedule is a function of a device, the number of devices, the number of micro-batches and the number of stages that a
device holds. It returns the operations of that device in the order in which they run. Everything else, such as which
stage is on which device, follows from these lists.

Letters for sizes: D devices (or groups of devices that work as one), v stages on each, S = D·v stages, M micro-batches.
"""

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

"""Which layer runs when: the operations of a plan as a sequence of passes through its layers."""

from typing import Literal, NamedTuple

from diffshard.plans.base import PlanData
from diffshard.plans.layers import layer_of_scope

Direction = Literal["forward", "backward", "update"]
_LEAST_SHARE = 0.004  # of all operations: a shorter pass belongs to the one before it, as it would be too narrow to see


class LayerPass(NamedTuple):
    """Operations of one layer and direction that run after each other.

    Attributes:
      layer: as `layers.layer_name` says.
      direction: "update" for what is outside the loss and its derivative.
      start, end: numbers of operations that ran before it and until its end.
    """

    layer: str
    direction: Direction
    start: int
    end: int


def operations_before(plan: PlanData) -> list[int]:
    """Returns for each entry of `PlanData.operations` how many that compute something have run when it is done."""
    counts, count = [], 0
    for operation in plan.operations:
        count += operation.kind == "operation"
        counts.append(count)
    return counts


def direction_of(plan: PlanData, index: int) -> Direction:
    """Returns in which pass an operation runs."""
    return pass_of_scope(plan.operations[index].scope)[1]


def pass_of_scope(scope: str) -> tuple[str, Direction]:
    """Returns the layer and the pass of what a name stack is of."""
    layer, is_backward = layer_of_scope(scope)
    return layer, "backward" if is_backward else "update" if layer == "update" else "forward"


def layer_passes(plan: PlanData) -> list[LayerPass]:
    """Returns the passes through the layers in program order."""
    result: list[LayerPass] = []
    count = 0
    for operation in plan.operations:
        if operation.kind != "operation":
            continue
        layer, direction = pass_of_scope(operation.scope)
        if result and (result[-1].layer, result[-1].direction) == (layer, direction):
            result[-1] = result[-1]._replace(end=count + 1)
        else:
            result.append(LayerPass(layer, direction, count, count + 1))
        count += 1
    return _without_short_ones(result, _LEAST_SHARE * count)


def _without_short_ones(found: list[LayerPass], least: float) -> list[LayerPass]:
    """Joins passes of fewer operations than `least` to the one before, and neighbours that are then alike."""
    result: list[LayerPass] = []
    for layer_pass in found:
        is_short = layer_pass.end - layer_pass.start < least
        if result and (is_short or result[-1][:2] == layer_pass[:2]):
            result[-1] = result[-1]._replace(end=layer_pass.end)
        else:
            result.append(layer_pass)
    return result

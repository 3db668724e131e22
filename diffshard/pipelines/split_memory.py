"""The memory of stages whose backward pass is split: what waits until the gradients of weights are computed.

A stage is searched as if each micro-batch kept all of its residuals until then. After its first backward program a
micro-batch keeps only what the second one reads, but also what the first one leaves for it.
"""

from collections.abc import Callable
from itertools import accumulate

from jax.sharding import NamedSharding

from cost.pipeline_schedules import BACKWARD, FORWARD, WEIGHTS, ScheduleGraph, in_flight
from diffshard.pipelines.copies import bytes_each
from search_spaces.pipelines.stage_labels import Key, Label
from search_spaces.pipelines.stage_programs import StagedStep


def split_bytes(
    staged: StagedStep, stage: int, graph: ScheduleGraph, sharding: Callable[[int, Key], NamedSharding]
) -> int:
    """Returns the bytes that a stage keeps more on each device than its residuals times the micro-batches in flight.

    Args:
      staged: a step with split backward programs.
      stage: which one.
      graph: the schedule.
      sharding: how a stage stores an array.
    """
    programs = [staged.programs.get(Label(kind, stage)) for kind in ("backward", "weights")]
    backward, weights = (set() if program is None else set(program.reads) for program in programs)

    def total(keys: set[Key], *kinds: str) -> int:
        of_kinds = (key for key in keys if key in staged.makers and staged.makers[key].kind in kinds)
        avals = ((key, staged.avals[key]) for key in of_kinds)
        return sum(bytes_each(aval.shape, aval.dtype, sharding(stage, key)) for key, aval in avals)

    before, after = total(backward | weights, "forward"), total(weights, "forward", "backward")
    change = {FORWARD: before, BACKWARD: after - before, WEIGHTS: -after}
    kinds = graph.kind[(graph.stage == stage)].tolist()
    most = max(accumulate(change.get(kind, 0) for kind in kinds))
    return most - int(in_flight(graph)[stage]) * before

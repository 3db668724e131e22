"""In what order the steps of a function run that runs in micro-batches, and how often."""

from collections.abc import Iterator
from dataclasses import dataclass

from search_spaces.pipelines.batch_states import BatchFlow, Split
from search_spaces.sharding.graph import Graph, Operand, Region, Value, Vertex

Step = Vertex | Region


@dataclass(frozen=True)
class StepOrder:
    """The steps of a function that runs in micro-batches."""

    before: tuple[Step, ...]
    each: tuple[Step, ...]
    after: tuple[Step, ...]


def step_order(graph: Graph, flow: BatchFlow) -> StepOrder:
    """Divides the steps of a function by how often they run.

    A step runs where what it reads is there: once where that is whole, in each micro-batch where it is split or made
    there, and after all of them where it needs their sums. What leads to early sums runs once and in each, too, and so
    does what makes estimates of sums.
    """
    before, each, after = [], [], []
    of_each: set[int] = set()  # the values that micro-batches make
    for step in graph.block.steps:
        operands = [o for o in operands_of(step) if isinstance(o, Value)]
        values = list(values_of(step))
        is_early = isinstance(step, Vertex) and step.index in flow.early
        if is_early:
            before.append(step)
        if any(isinstance(flow.states[o.id], Split) for o in operands) or any(
            flow.states[value.id] != "whole" for value in values
        ):
            if is_early and all(flow.states[value.id] == "whole" for value in values):
                continue
            is_of_each = True
        elif any(o.id in flow.later or flow.states[o.id] != "whole" for o in operands):
            after.append(step)
            if isinstance(step, Vertex) and step.index in flow.estimated:
                each.append(step)
            continue
        else:
            is_of_each = any(o.id in of_each for o in operands)
        (each if is_of_each else before).append(step)
        of_each.update(value.id for value in values if is_of_each)
    return StepOrder(tuple(before), tuple(each), tuple(after))


def operands_of(step: Step) -> Iterator[Operand]:
    """Returns what a step reads, and what is read inside of a region at any depth."""
    yield from step.operands
    if isinstance(step, Region):
        for inner in _steps_inside(step):
            yield from operands_of(inner)


def values_of(step: Step) -> Iterator[Value]:
    """Returns the values that a step makes, those inside of a region at any depth, too."""
    yield from step.results
    if isinstance(step, Region):
        for vertex in (*step.carries, *step.slices):
            yield from vertex.results
        for inner in _steps_inside(step):
            yield from values_of(inner)


def _steps_inside(region: Region) -> Iterator[Step]:
    for block in region.blocks:
        yield from block.steps

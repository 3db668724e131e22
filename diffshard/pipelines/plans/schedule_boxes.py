"""What each stage and each link of a planned pipeline does when, simulated again from the plan's numbers."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cost.pipeline_schedules import BACKWARD, FORWARD, SEND_BACKWARD, SEND_FORWARD
from diffshard.pipelines.plans.base import PipelinePlanData
from diffshard.pipelines.plans.timing import simulated, simulated_steps

KINDS: dict[int | None, str] = {
    FORWARD: "forward",
    BACKWARD: "backward",
    SEND_FORWARD: "sending on",
    SEND_BACKWARD: "sending back",
}


class Box(NamedTuple):
    """What a stage or a link does for some time.

    Attributes:
      kind: such as "forward".
      text: what is written on it: the number of the micro-batch.
      start_s, end_s: from the left end of the drawing.
      is_faded: whether it is of another step than the one that is drawn.
    """

    kind: str
    text: str
    start_s: float
    end_s: float
    is_faded: bool = False


class Exchange(NamedTuple):
    """What a replica besides the main one waits for.

    Attributes:
      weights_s: until it has the weights.
      sums_s: for bringing its sums to the main replica.
    """

    weights_s: float
    sums_s: float


class Drawing(NamedTuple):
    """What is drawn.

    Attributes:
      boxes: by kind of operation and stage; of the ends of steps by `None` and stage.
      busy: `[S]`, the share of its time in which a stage computes.
      seconds: of the whole width.
    """

    boxes: dict[tuple[int | None, int], list[Box]]
    busy: Sequence[float]
    seconds: float


def boxes_of_one_step(plan: PipelinePlanData, exchange: Exchange, seconds: float) -> Drawing:
    """Returns what the stages of a replica do in a step, and what they wait for.

    Args:
      plan: of the replica.
      exchange: what it waits for.
      seconds: of the whole width, if that is more than the replica takes.
    """
    simulation = simulated(plan).simulation
    first_s, last_s = exchange.weights_s, exchange.weights_s + simulation.step_s
    longest_end_s = max(stage.end_s for stage in plan.stages)
    drawn_s = max(last_s + exchange.sums_s + longest_end_s, seconds)
    until_s = drawn_s - longest_end_s
    boxes: dict[tuple[int | None, int], list[Box]] = {}
    for i, stage in enumerate(plan.stages):
        for kind in KINDS:
            of_kind = np.flatnonzero((simulation.graph.kind == kind) & (simulation.graph.stage == i))
            boxes[kind, i] = [
                Box(
                    KINDS[kind],
                    str(simulation.graph.microbatch[n]),
                    first_s + float(simulation.start_s[n]),
                    first_s + float(simulation.end_s[n]),
                )
                for n in of_kind
            ]
        others = [
            Box("weights arrive", "", 0.0, first_s),
            Box("sums are sent", "", last_s, last_s + exchange.sums_s),
            Box("end of step", "end", until_s, until_s + stage.end_s),
        ]
        boxes[None, i] = [box for box in others if box.end_s > box.start_s]
    busy = [float(s) / until_s if until_s else 1.0 for s in simulation.busy_s]
    return Drawing(boxes, busy, drawn_s)


def boxes_of_many_steps(plan: PipelinePlanData) -> Drawing:
    """Returns what stages do from the first operation of a step to its last one, also for the steps beside it."""
    steps, count = simulated_steps(plan), plan.num_microbatches
    graph, number = steps.graph, steps.graph.microbatch // count
    ends_s = np.array([stage.end_s for stage in plan.stages])
    end_s = np.where(steps.is_before_end, steps.end_s + ends_s[graph.stage], steps.end_s)
    ended = number - (1 if plan.overlap == "late_ends" else 0)  # the step that ends after an operation
    of_step = number == steps.step
    first_s = float(steps.start_s[of_step].min())
    last_s = float(np.append(steps.end_s[of_step], end_s[steps.is_before_end & (ended == steps.step)]).max())

    def box(kind: str, text: str, step: int, start_s: float, end_s: float) -> Box:
        return Box(kind, text, max(start_s, first_s) - first_s, min(end_s, last_s) - first_s, step != steps.step)

    boxes: dict[tuple[int | None, int], list[Box]] = {}
    is_seen = (steps.start_s < last_s) & (end_s > first_s)
    for i in range(len(plan.stages)):
        for kind, name in KINDS.items():
            of_kind = np.flatnonzero(is_seen & (graph.kind == kind) & (graph.stage == i))
            found = (
                box(name, str(graph.microbatch[n] % count), number[n], steps.start_s[n], steps.end_s[n])
                for n in of_kind
            )
            boxes[kind, i] = [one for one in found if one.end_s > one.start_s]
        of_end = np.flatnonzero(is_seen & steps.is_before_end & (graph.stage == i))
        found = (box("end of step", "end", ended[n], steps.end_s[n], end_s[n]) for n in of_end)
        boxes[None, i] = [one for one in found if one.end_s > one.start_s]
    busy = [
        (count * (s.forward_s + s.backward_s) + s.end_s) / steps.step_s if steps.step_s else 1.0 for s in plan.stages
    ]
    return Drawing(boxes, busy, last_s - first_s)

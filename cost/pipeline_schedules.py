"""Schedules of pipelines: which operation a stage runs when, as a graph of operations and transfers.

A stage runs its operations one after the other in a fixed order; a link between neighbouring stages sends one tensor
after the other in each direction. An operation starts when its resource is free and its inputs are there. So a schedule
is a graph in which every operation has at most two predecessors.

Letters for sizes: S stages, M micro-batches, N operations of a schedule (with transfers).

Source: GPipe: Huang et al. (2019). 1F1B: Narayanan et al., "PipeDream-2BW" (2021), figure 4. Eager 1F1B: Zhuang et al.,
"On Optimizing the Communication of Model Parallelism" (2023), section 4. ZB-H1: Qi et al., "Zero Bubble Pipeline
Parallelism" (2023), section 2.3.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import numpy as np

from cost.real_numbers import whole_number

Schedule = Literal["gpipe", "1f1b", "eager", "zb-h1", "2bw"]
"""When a stage runs its backward operations.

With "gpipe" all forward operations come first. With "1f1b" forward and backward operations alternate as soon as the
first backward one can run; stage i keeps at most S - i micro-batches. With "eager" it keeps up to 2(S - i) - 1, so that
transfers run beside arithmetic. "zb-h1" splits the backward operation into the gradient of the activations and that of
the weights, and delays the second where the stage would wait. It is simulated only: no program runs it. "2bw" is "1f1b"
whose next step begins before this one has ended, with gradients of the weights of one step ago: `cost.pipeline_steps`
has what a step then takes. Its graph is that of one step.
"""

OperationKind = Literal["forward", "backward", "weights", "send forward", "send backward"]


class ScheduleGraph(NamedTuple):
    """The operations of a schedule, each after all of its predecessors.

    Attributes:
      num_stages: S.
      num_microbatches: M.
      kind: `[N]`, an index into the names of `OperationKind`.
      stage: `[N]`, the stage that runs it; of a transfer the stage before the link, whichever way it sends.
      microbatch: `[N]`.
      predecessors: `[N, 2]`, the operation before it on its stage or link, and the one whose result it needs; N where
        there is none.
    """

    num_stages: int
    num_microbatches: int
    kind: np.ndarray
    stage: np.ndarray
    microbatch: np.ndarray
    predecessors: np.ndarray


FORWARD, BACKWARD, WEIGHTS, SEND_FORWARD, SEND_BACKWARD = range(5)
STAGE_KINDS = (FORWARD, BACKWARD, WEIGHTS)
Order = list[list[tuple[int, int]]]  # for each stage the kinds and micro-batches in the order in which they run


def graph_of(schedule: Schedule, num_stages: int, num_microbatches: int) -> ScheduleGraph:
    """Returns the operations of a schedule.

    Raises:
      ValueError: there is no such schedule, or a number is below 1.
    """
    if schedule not in get_args(Schedule):
        raise ValueError(f"`schedule` must be one of {get_args(Schedule)}, not {schedule!r}.")
    num_stages = checked_count("num_stages", num_stages)
    num_microbatches = checked_count("num_microbatches", num_microbatches)
    return schedule_graph(
        [_ORDERS[schedule](num_stages, s, num_microbatches) for s in range(num_stages)], num_microbatches
    )


def in_flight(graph: ScheduleGraph) -> np.ndarray:
    """Returns `[S]`: how many micro-batches each stage keeps residuals of, at most."""
    last = WEIGHTS if (graph.kind == WEIGHTS).any() else BACKWARD
    change = (graph.kind == FORWARD).astype(int) - (graph.kind == last)
    return np.array([int(np.cumsum(change[graph.stage == s]).max()) for s in range(graph.num_stages)])


# The order in which each stage runs its operations.


def kept_microbatches(schedule: Schedule, stages_left: int, num_microbatches: int) -> int:
    """Returns how many micro-batches a stage keeps at most.

    Args:
      schedule: its name.
      stages_left: the stages from this one to the last, itself included.
      num_microbatches: of the step.
    """
    kept = {"1f1b": stages_left, "2bw": stages_left, "eager": 2 * stages_left - 1}.get(schedule, num_microbatches)
    return min(kept, num_microbatches)


def alternating_order(num_microbatches: int, kept: int) -> list[tuple[int, int]]:
    """Returns the operations of a stage that starts `kept` micro-batches before its first backward operation."""
    order = [(FORWARD, m) for m in range(kept)]
    for m in range(num_microbatches):
        order.append((BACKWARD, m))
        if m + kept < num_microbatches:
            order.append((FORWARD, m + kept))
    return order


def _zero_bubble(num_stages: int, stage: int, num_microbatches: int) -> list[tuple[int, int]]:
    """Returns the operations of a stage with ZB-H1: those of 1F1B, and weights' gradients `stage` micro-batches later.

    So the last stage, where 1F1B keeps one micro-batch, keeps S, and has weights' gradients left to compute while the
    last gradient goes back through the other stages.
    """
    order: list[tuple[int, int]] = []
    for kind, m in alternating_order(num_microbatches, min(num_microbatches, num_stages - stage)):
        order.append((kind, m))
        if kind == BACKWARD and m >= stage:
            order.append((WEIGHTS, m - stage))
    return order + [(WEIGHTS, m) for m in range(max(num_microbatches - stage, 0), num_microbatches)]


_ORDERS: dict[str, Callable[[int, int, int], list[tuple[int, int]]]] = {
    "gpipe": lambda num_stages, stage, count: alternating_order(count, count),
    "1f1b": lambda num_stages, stage, count: alternating_order(count, min(count, num_stages - stage)),
    "eager": lambda num_stages, stage, count: alternating_order(count, min(count, 2 * (num_stages - stage) - 1)),
    "zb-h1": _zero_bubble,
    "2bw": lambda num_stages, stage, count: alternating_order(count, min(count, num_stages - stage)),
}
"""The operations of a stage in order, by schedule; called with S, the stage and M."""


def schedule_graph(order: Order, num_microbatches: int) -> ScheduleGraph:
    """Returns the graph of stages that run operations, kinds and micro-batches, in some order.

    Raises:
      ValueError: the stages wait for each other for ever.
    """
    num_stages = len(order)
    kinds, stages, microbatches, predecessors = [], [], [], []
    at: dict[tuple[int, int, int], int] = {}  # the number of an operation, by kind, stage and micro-batch
    last_on: dict[tuple[int, int], int] = {}  # the last operation of a resource, by kind of resource and stage

    def add(kind: int, stage: int, microbatch: int, needed: int | None) -> None:
        resource = (kind if kind in (SEND_FORWARD, SEND_BACKWARD) else FORWARD, stage)
        predecessors.append((last_on.get(resource), needed))
        at[kind, stage, microbatch] = last_on[resource] = len(kinds)
        kinds.append(kind)
        stages.append(stage)
        microbatches.append(microbatch)

    def needed_key(kind: int, stage: int, microbatch: int) -> tuple[int, int, int] | None:
        if kind == FORWARD:
            return None if stage == 0 else (SEND_FORWARD, stage - 1, microbatch)
        if kind == WEIGHTS:
            return BACKWARD, stage, microbatch
        return (FORWARD, stage, microbatch) if stage == num_stages - 1 else (SEND_BACKWARD, stage, microbatch)

    position, total = [0] * num_stages, sum(map(len, order))
    while sum(position) < total:
        before = sum(position)
        for stage in range(num_stages):
            while position[stage] < len(order[stage]):
                kind, m = order[stage][position[stage]]
                key = needed_key(kind, stage, m)
                if key is not None and key not in at:
                    break
                add(kind, stage, m, None if key is None else at[key])
                if kind == FORWARD and stage < num_stages - 1:
                    add(SEND_FORWARD, stage, m, at[FORWARD, stage, m])
                if kind == BACKWARD and stage > 0:
                    add(SEND_BACKWARD, stage - 1, m, at[BACKWARD, stage, m])
                position[stage] += 1
        if sum(position) == before:
            raise ValueError("The stages of this schedule wait for each other for ever.")
    none = len(kinds)
    pairs = [[none if number is None else number for number in pair] for pair in predecessors]
    return ScheduleGraph(
        num_stages, num_microbatches, np.array(kinds), np.array(stages), np.array(microbatches), np.array(pairs)
    )


def checked_count(name: str, count: int) -> int:
    """Returns a number of stages or micro-batches; raises `ValueError` if it is no whole number, 1 or more."""
    number = whole_number(count)
    if number is None or number < 1:
        raise ValueError(f"`{name}` must be a whole number, 1 or more, not {count!r}.")
    return number

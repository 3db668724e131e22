"""What a step of a pipeline takes, with its end: an optimiser's update, say; and what it takes where steps overlap.

With gradients of the weights of one step ago ("2bw") a stage may begin the next step before its last gradients of this
one are there: the pipeline never drains, and a step takes what the stages do in the steady state of many steps. A
device runs programs in the order in which they are started. So steps overlap only if those of the next step are started
between those of this one; `overlapped_operations` has that order. Steps that are started one after the other drain.

Letters for sizes: S stages, M micro-batches.

Source: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (PipeDream-2BW, 2021), section 3.1.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from cost.pipeline_schedules import (
    BACKWARD,
    FORWARD,
    SEND_BACKWARD,
    SEND_FORWARD,
    STAGE_KINDS,
    Order,
    Schedule,
    ScheduleGraph,
    alternating_order,
    graph_of,
    schedule_graph,
)
from cost.pipeline_times import Simulation, StageTimes, simulate, start_times_s
from cost.real_numbers import Count, checked_number

Overlap = Literal["own_ends", "late_ends", "none"]
"""How a step overlaps with the next one, with the schedule "2bw".

With "own_ends" each stage ends its step right after its own last micro-batch. With "late_ends" all stages end it after
the micro-batches of the next step, because they need sums of each other, such as a global norm. With "none" the
pipeline drains between steps.
"""

_WARM_UP_ROUNDS = 8
"""The stages begin with an empty pipeline. So a step is timed after micro-batches went through all stages so many
times, and over as many more. Chosen by hand: half of it missed 2% of a step that waits for its transfers."""


class PipelineStep(NamedTuple):
    """The seconds of a step.

    Attributes:
      simulation: of its micro-batches, from an empty pipeline.
      step_s: with the end of the step; where steps overlap, from the end of one to the end of the next.
      bubble: the share of the stages' time in which they wait.
      call_s: what a step takes that begins after the one before it, of many: `step_s` if steps do not overlap.
    """

    simulation: Simulation
    step_s: float
    bubble: float
    call_s: float


def pipeline_step(
    times: StageTimes,
    schedule: Schedule,
    num_microbatches: int,
    end_s: np.ndarray | Sequence[float],
    overlap: Overlap = "own_ends",
    stages_per_device: int | None = None,
) -> PipelineStep:
    """Returns the seconds of a step, with the simulation of its micro-batches.

    Args:
      schedule: with "2bw" steps may overlap; with all others each stage waits for the end of the step.
      num_microbatches: M.
      end_s: `[S]`, what each stage does at the end of a step; a device does that of its stages one after the other.
      overlap: how steps overlap with "2bw".

    Raises:
      ValueError: as `cost.pipeline_times.simulate`, or `end_s` is not S seconds.
    """
    simulation = simulate(times, graph_of(schedule, times.num_stages, num_microbatches, stages_per_device))
    ends = _checked_ends(end_s, times.num_stages)
    if schedule != "2bw":
        step_s = simulation.step_s + float(np.bincount(simulation.graph.device, ends).max())
        return PipelineStep(simulation, step_s, simulation.bubble, step_s)
    call_s = overlapped_step_s(times, num_microbatches, end_s, "none")
    step_s = min(call_s, overlapped_step_s(times, num_microbatches, end_s, overlap))
    busy_s = float(simulation.busy_s.sum() + ends.sum())
    return PipelineStep(simulation, step_s, 1.0 - busy_s / (step_s * len(ends)) if step_s else 0.0, call_s)


def overlapped_step_s(
    times: StageTimes,
    num_microbatches: int,
    end_s: np.ndarray | Sequence[float],
    overlap: Overlap = "own_ends",
) -> float:
    """Returns the seconds of a step in the steady state of "2bw": a simulation of many steps, one after the other.

    Stage i keeps min(M, S - i) micro-batches at most, so that only the last two versions of the weights are read. The
    first forward operations of a step alternate with the last backward ones of the step before, as 1F1B does within a
    step. With few micro-batches, M < S, steps that do not overlap can be faster.

    >>> times = StageTimes([1, 1, 1, 1], [2, 2, 2, 2], [0, 0, 0], [0, 0, 0])
    >>> simulate(times, graph_of("1f1b", 4, 8)).step_s, overlapped_step_s(times, 8, [0, 0, 0, 0])
    (33.0, 24.0)

    Args:
      times: of one micro-batch, without `weights_s`.
      num_microbatches: M.
      end_s: `[S]`, what each stage does after its last micro-batch of a step; it waits for no other stage.

    Raises:
      ValueError: as `cost.pipeline_times.simulate`, or `end_s` is not S seconds.
    """
    return steps_in_turn(times, num_microbatches, end_s, overlap).step_s


class StepsInTurn(NamedTuple):
    """Many steps of "2bw", one after the other.

    Attributes:
      graph: their operations; micro-batches are numbered through all steps.
      start_s: `[N]`.
      end_s: `[N]`.
      is_before_end: `[N]`, whether a stage ends a step after an operation.
      step: a step in the steady state, with steps before and after it.
      step_s: from the end of a step to the end of the next one, in the steady state.
    """

    graph: ScheduleGraph
    start_s: np.ndarray
    end_s: np.ndarray
    is_before_end: np.ndarray
    step: int
    step_s: float


def steps_in_turn(
    times: StageTimes, num_microbatches: int, end_s: np.ndarray | Sequence[float], overlap: Overlap
) -> StepsInTurn:
    """Simulates many steps of "2bw"; arguments and errors as of `overlapped_step_s`."""
    num_stages, count = times.num_stages, checked_number("num_microbatches", num_microbatches, Count)
    ends = _checked_ends(end_s, num_stages)
    rounds = 1 + -(-_WARM_UP_ROUNDS * num_stages // count)  # steps that are begun before the steady state, and in it
    kept = np.array(_kept(num_stages, count))
    num_steps = 2 * rounds + 1  # the last one ends sooner, because no other one begins meanwhile
    graph = schedule_graph(_orders_of_steps(num_stages, count, num_steps, overlap != "none"), num_steps * count)
    before_end = count - kept[graph.stage] if overlap == "late_ends" else count - 1
    is_last = (graph.kind == BACKWARD) & (graph.microbatch % count == before_end)
    durations = times.by_kind[graph.kind, graph.stage]
    start = start_times_s(graph, durations, np.where(is_last, ends[graph.stage], 0.0))
    of_stages = [start[is_last & (graph.stage == stage)] for stage in range(num_stages)]
    step_s = max(float(starts[-2] - starts[rounds - 1]) / rounds for starts in of_stages)
    return StepsInTurn(graph, start, start + durations, is_last, num_steps - 3, step_s)


class StepOperation(NamedTuple):
    """An operation of steps that overlap.

    Attributes:
      is_new: whether it is of the step that begins, or of the one before.
    """

    kind: int
    stage: int
    is_new: bool
    microbatch: int


def overlapped_operations(num_stages: int, num_microbatches: int) -> tuple[list[StepOperation], list[StepOperation]]:
    """Returns the operations of the first step until the second one begins, and those from each next step to the next.

    Each has its operations in an order in which they can be started one after the other. Those of the second list that
    are not new are what is left when no next step begins.
    """
    count = checked_number("num_microbatches", num_microbatches, Count)
    order = _orders_of_steps(checked_number("num_stages", num_stages, Count), count, 2, True)
    graph = schedule_graph(order, 2 * count)
    slices: tuple[list[StepOperation], list[StepOperation]] = [], []
    has_begun = [False] * num_stages
    for kind, stage, m in zip(graph.kind.tolist(), graph.stage.tolist(), graph.microbatch.tolist(), strict=True):
        has_begun[stage] |= kind == FORWARD and m == count
        is_tail = m >= count and kind == BACKWARD and m > 2 * count - _kept(num_stages, count)[stage]
        if kind in STAGE_KINDS and not is_tail:
            slices[has_begun[stage]].append(StepOperation(kind, stage, m >= count, m % count))
    return slices


def _kept(num_stages: int, num_microbatches: int) -> list[int]:
    return [min(num_microbatches, num_stages - i) for i in range(num_stages)]


def _orders_of_steps(num_stages: int, count: int, num_steps: int, is_overlapped: bool) -> Order:
    """Returns the operations of each stage in many steps; micro-batches are numbered through all steps."""
    kept = _kept(num_stages, count)
    if is_overlapped:
        return [alternating_order(stage, num_steps * count, k) for stage, k in enumerate(kept)]
    return [
        [
            operation._replace(microbatch=step * count + operation.microbatch)
            for step in range(num_steps)
            for operation in alternating_order(stage, count, k)
        ]
        for stage, k in enumerate(kept)
    ]


def overlapped_lower_bound_s(times: StageTimes, num_microbatches: int, end_s: np.ndarray | Sequence[float]) -> float:
    """Returns a lower bound on a step where steps overlap: max_j M·t_j + e_j, or M times the slowest transfer."""
    count = checked_number("num_microbatches", num_microbatches, Count)
    seconds = times.by_kind
    of_stages = count * (seconds.sum(axis=0) - seconds[[SEND_FORWARD, SEND_BACKWARD]].sum(axis=0))
    of_links = count * seconds[[SEND_FORWARD, SEND_BACKWARD]].max()
    return float(max((of_stages + _checked_ends(end_s, times.num_stages)).max(), of_links))


def _checked_ends(end_s: np.ndarray | Sequence[float], num_stages: int) -> np.ndarray:
    ends = np.asarray(end_s, float)
    if ends.shape != (num_stages,) or not (np.isfinite(ends) & (ends >= 0)).all():
        raise ValueError(
            f"`end_s` must be seconds, 0 or more and finite, for each of {num_stages} stages, not {end_s}."
        )
    return ends

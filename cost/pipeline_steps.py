"""What a step of a pipeline takes, with its end: an optimiser's update, say; and what it takes where steps overlap.

With gradients of the weights of one step ago ("2bw") a stage begins the next step as soon as it has ended its part of
this one. The pipeline never drains. A step then takes the time between the ends of two steps, once many have run.

Letters for sizes: S stages, M micro-batches.

Source: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (PipeDream-2BW, 2021), section 3.1.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cost.pipeline_schedules import (
    BACKWARD,
    SEND_BACKWARD,
    SEND_FORWARD,
    Order,
    Schedule,
    alternating_order,
    checked_count,
    graph_of,
    schedule_graph,
)
from cost.pipeline_times import Simulation, StageTimes, checked, durations_s, simulate, start_times_s

_WARM_UP_ROUNDS = 4
"""The stages begin with an empty pipeline. So a step is timed after micro-batches went through all stages so many
times, and over as many more. Chosen by hand."""


class PipelineStep(NamedTuple):
    """What a step takes.

    Attributes:
      simulation: of its micro-batches, from an empty pipeline.
      step_s: with the end of the step; where steps overlap, from the end of one to the end of the next.
      bubble: the share of the stages' time in which they wait.
    """

    simulation: Simulation
    step_s: float
    bubble: float


def pipeline_step(
    times: StageTimes, schedule: Schedule, num_microbatches: int, end_s: np.ndarray | Sequence[float]
) -> PipelineStep:
    """Returns what a step takes.

    Args:
      times: of one micro-batch.
      schedule: with "2bw" steps overlap; with all others each stage waits for the end of the step.
      num_microbatches: M.
      end_s: `[S]`, what each stage does at the end of a step.

    Raises:
      ValueError: as `cost.pipeline_times.simulate`, or `end_s` is not S seconds.
    """
    simulation = simulate(times, graph_of(schedule, len(times.forward_s), num_microbatches))
    ends = _checked_ends(end_s, len(times.forward_s))
    if schedule != "2bw":
        return PipelineStep(simulation, simulation.step_s + float(ends.max()), simulation.bubble)
    step_s = overlapped_step_s(times, num_microbatches, end_s)
    busy_s = float(simulation.busy_s.sum() + ends.sum())
    return PipelineStep(simulation, step_s, 1.0 - busy_s / (step_s * len(ends)) if step_s else 0.0)


def overlapped_step_s(times: StageTimes, num_microbatches: int, end_s: np.ndarray | Sequence[float]) -> float:
    """Returns the seconds between the ends of two steps of "2bw", whose pipeline never drains.

    It simulates many steps, one right after the other. Stage i keeps min(M, S - i) micro-batches at most, so that only
    the last two versions of the weights are read. Forward operations of a step alternate with the last backward ones of
    the step before, as 1F1B does within a step; or they come after these where that is faster: if M < S.

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
    num_stages, count = len(times.forward_s), checked_count("num_microbatches", num_microbatches)
    times = checked(times, checked_count("len(forward_s)", num_stages))
    ends = _checked_ends(end_s, num_stages)
    kept = [min(count, num_stages - i) for i in range(num_stages)]
    rounds = 1 + -(-_WARM_UP_ROUNDS * num_stages // count)  # steps that are begun before the steady state, and in it
    alternating = [alternating_order(2 * rounds * count, k) for k in kept]
    in_steps = [
        [(kind, step * count + m) for step in range(2 * rounds) for kind, m in alternating_order(count, k)]
        for k in kept
    ]

    def steady_s(order: Order) -> float:
        graph = schedule_graph(order, 2 * rounds * count)
        is_last = (graph.kind == BACKWARD) & (graph.microbatch % count == count - 1)
        durations = durations_s(times)[graph.kind, graph.stage]
        start = start_times_s(graph, durations, np.where(is_last, ends[graph.stage], 0.0))
        of_stages = [start[is_last & (graph.stage == stage)] for stage in range(num_stages)]
        return max(float(starts[-1] - starts[rounds - 1]) / rounds for starts in of_stages)

    return min(steady_s(alternating), steady_s(in_steps))


def overlapped_lower_bound_s(times: StageTimes, num_microbatches: int, end_s: np.ndarray | Sequence[float]) -> float:
    """Returns what a step takes at least where steps overlap: max_j M·t_j + e_j, or M times the slowest transfer.

    Raises:
      ValueError: as `overlapped_step_s`.
    """
    count = checked_count("num_microbatches", num_microbatches)
    times = checked(times, checked_count("len(forward_s)", len(times.forward_s)))
    seconds = durations_s(times)
    of_stages = count * (seconds.sum(axis=0) - seconds[[SEND_FORWARD, SEND_BACKWARD]].sum(axis=0))
    of_links = count * seconds[[SEND_FORWARD, SEND_BACKWARD]].max()
    return float(max((of_stages + _checked_ends(end_s, len(times.forward_s))).max(), of_links))


def _checked_ends(end_s: np.ndarray | Sequence[float], num_stages: int) -> np.ndarray:
    ends = np.asarray(end_s, float)
    if ends.shape != (num_stages,) or not (np.isfinite(ends) & (ends >= 0)).all():
        raise ValueError(
            f"`end_s` must be seconds, 0 or more and finite, for each of {num_stages} stages, not {end_s}."
        )
    return ends

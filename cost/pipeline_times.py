"""How long a step of a pipeline takes: a simulation of its schedule, and a bound on every schedule.

Replicas of a pipeline take different numbers of micro-batches; their schedule, and how to balance them, come last.

Letters for sizes: R replicas, S stages of each of them, M micro-batches of all together, N operations of a schedule.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from cost.pipeline_schedules import (
    BACKWARD,
    FORWARD,
    SEND_BACKWARD,
    SEND_FORWARD,
    STAGE_KINDS,
    WEIGHTS,
    ScheduleGraph,
    in_flight,
)
from cost.real_numbers import Count, checked_number


@dataclass(frozen=True, eq=False)
class StageTimes:
    """Seconds that one micro-batch takes, as arrays of floats; sequences are taken, too.

    Attributes:
      forward_s: `[S]`, the forward operations of each stage.
      backward_s: `[S]`, the backward operations, without `weights_s`.
      send_forward_s: `[S - 1]`, sending what stage i makes to stage i + 1.
      send_backward_s: `[S - 1]`, sending the gradient from stage i + 1 to stage i.
      weights_s: `[S]`, the gradients of the weights where a schedule computes them apart; None where all of the
        backward operation is in `backward_s`.

    Raises:
      ValueError: there is no stage, or an array has another length, or a number that is negative or not finite.
    """

    forward_s: Any
    backward_s: Any
    send_forward_s: Any
    send_backward_s: Any
    weights_s: Any = None

    def __post_init__(self):
        num_stages = checked_number("len(forward_s)", len(self.forward_s), Count)
        for name in (field.name for field in fields(self) if getattr(self, field.name) is not None):
            array, length = np.asarray(getattr(self, name), float), num_stages - name.startswith("send")
            if array.shape != (length,):
                raise ValueError(f"`{name}` must have one number for each of {length} places, not shape {array.shape}.")
            if not (np.isfinite(array) & (array >= 0)).all():
                raise ValueError(f"`{name}` must be seconds, 0 or more and finite, not {array}.")
            object.__setattr__(self, name, array)

    @property
    def num_stages(self) -> int:
        """S."""
        return len(self.forward_s)

    @property
    def by_kind(self) -> np.ndarray:
        """`[kinds, S]`: the seconds of each kind of operation on each stage; a link has the stage before it."""
        weights = np.zeros_like(self.forward_s) if self.weights_s is None else self.weights_s
        links = [np.append(x, 0.0) for x in (self.send_forward_s, self.send_backward_s)]
        return np.stack([self.forward_s, self.backward_s, weights, *links])

    def sends_after(self, stage: int) -> tuple[float, float]:
        """Returns the seconds of sending to the next stage and back from it; 0 after the last stage."""
        if stage == self.num_stages - 1:
            return 0.0, 0.0
        return float(self.send_forward_s[stage]), float(self.send_backward_s[stage])


class Simulation(NamedTuple):
    """When each operation of a schedule runs.

    Attributes:
      graph: the schedule.
      start_s: `[N]`.
      end_s: `[N]`.
      step_s: when the last one ends.
      busy_s: `[S]`, how long each stage computes.
      in_flight: `[S]`, how many micro-batches a stage has begun and not ended, at most: it keeps residuals of so many.
    """

    graph: ScheduleGraph
    start_s: np.ndarray
    end_s: np.ndarray
    step_s: float
    busy_s: np.ndarray
    in_flight: np.ndarray

    @property
    def bubble(self) -> float:
        """The share of the devices' time in which they wait."""
        return 1.0 - float(self.busy_s.sum()) / (self.step_s * self.graph.num_devices) if self.step_s else 0.0


def simulate(times: StageTimes, graph: ScheduleGraph) -> Simulation:
    """Simulates one step of a pipeline.

    >>> from cost.pipeline_schedules import graph_of
    >>> times = StageTimes([1, 1, 1, 1], [2, 2, 2, 2], [1, 1, 1], [1, 1, 1])
    >>> [simulate(times, graph_of(schedule, 4, 8)).step_s for schedule in ("1f1b", "eager")]
    [49.0, 39.0]

    Args:
      times: of one micro-batch; with `weights_s` for schedules that compute the gradients of weights apart.
      graph: the schedule.

    Raises:
      ValueError: the schedule has other stages, or `weights_s` is missing or not used.
    """
    if times.num_stages != graph.num_stages:
        raise ValueError(f"`times` must be of the {graph.num_stages} stages of `graph`, not of {times.num_stages}.")
    if (times.weights_s is not None) != bool((graph.kind == WEIGHTS).any()):
        raise ValueError(
            '`weights_s` must be given for schedules such as "zb-h1" that compute the gradients of weights apart, and '
            "only there; all others have them in `backward_s`."
        )
    durations = times.by_kind[graph.kind, graph.stage]
    start = start_times_s(graph, durations, np.zeros(len(durations)))
    end = start + durations
    of_stage = np.isin(graph.kind, STAGE_KINDS)
    busy = np.bincount(graph.stage[of_stage], durations[of_stage], graph.num_stages)
    return Simulation(graph, start, end, float(end.max()), busy, in_flight(graph))


def start_times_s(graph: ScheduleGraph, durations: np.ndarray, pauses: np.ndarray) -> np.ndarray:
    """Returns `[N]`: when each operation of a schedule starts.

    Args:
      graph: the schedule.
      durations: `[N]`, seconds of each operation.
      pauses: `[N]`, seconds after each operation in which its stage or link does something else. What waits for the
        result of the operation need not wait for that.
    """
    start = np.zeros(len(durations))
    end, free = np.zeros(len(durations) + 1), np.zeros(len(durations) + 1)  # the last entry is "no predecessor"
    rows = zip(graph.predecessors.tolist(), durations.tolist(), pauses.tolist(), strict=True)
    for i, ((before, needed), seconds, pause) in enumerate(rows):
        start[i] = max(free[before], end[needed])
        end[i] = start[i] + seconds
        free[i] = end[i] + pause
    return start


def lower_bound_s(times: StageTimes, num_microbatches: int) -> float:
    """Returns a bound on the step time of every synchronous schedule.

    The first micro-batch reaches stage j through all stages before it, and the gradient of the last one goes back
    through them: max_j Σ_{i<j} (t_i + c_i) + M·t_j, where t are forward and backward seconds of a stage and c those of
    both transfers of a link. Where the gradients of weights are computed
    apart, a stage may do that while the last gradient goes back, so that the ways there and those gradients count:
    max_j Σ_{i<j} (forward_i + send forward_i) + M·(t_j + weights_j). A link sends one tensor after the other, and the
    last of them has the rest of its way to go: Σ_i t_i + Σ_i c_i + (M - 1)·(the slowest transfer).

    Raises:
      ValueError: `num_microbatches` is below 1.
    """
    num_microbatches = checked_number("num_microbatches", num_microbatches, Count)
    durations = times.by_kind
    there = np.cumsum(durations[FORWARD] + durations[SEND_FORWARD])[:-1]
    back = np.cumsum(durations[BACKWARD] + durations[SEND_BACKWARD])[:-1]
    computing = durations[FORWARD] + durations[BACKWARD]
    links = durations[[SEND_FORWARD, SEND_BACKWARD]]
    bounds = [
        np.append(0.0, there + back) + num_microbatches * computing,
        np.append(0.0, there) + num_microbatches * (computing + durations[WEIGHTS]),
        computing.sum() + links.sum() + (num_microbatches - 1) * links.max(),
    ]
    return float(max(np.max(bound) for bound in bounds))


def joined_graph(graphs: Sequence[ScheduleGraph]) -> ScheduleGraph:
    """Returns the operations of pipelines that run side by side, as those of one pipeline.

    Stage s of the r-th one is stage r·S + s; its micro-batches are numbered after those of the ones before. Operations
    are in an order in which all pipelines proceed evenly.

    Args:
      graphs: of pipelines with S stages each.
    """
    sizes = [len(graph.kind) for graph in graphs]
    pipeline = np.repeat(np.arange(len(graphs)), sizes)
    own = np.concatenate([np.arange(size) for size in sizes])
    order = np.lexsort((pipeline, (own + 1) / np.asarray(sizes)[pipeline]))
    first = np.concatenate([[0], np.cumsum(sizes)])
    place = np.empty(first[-1] + 1, int)  # of each operation in the order
    place[order], place[-1] = np.arange(first[-1]), first[-1]
    first_stage = np.cumsum([0, *(graph.num_stages for graph in graphs)])
    first_microbatch = np.cumsum([0, *(graph.num_microbatches for graph in graphs)])
    first_device = np.cumsum([0, *(graph.num_devices for graph in graphs)])
    predecessors = np.concatenate(
        [
            place[np.where(graph.predecessors == size, first[-1], graph.predecessors + start)]
            for graph, size, start in zip(graphs, sizes, first, strict=False)
        ]
    )
    kind, stage, microbatch = (
        np.concatenate([getattr(graph, name) for graph in graphs]) for name in ("kind", "stage", "microbatch")
    )
    return ScheduleGraph(
        int(first_stage[-1]),
        int(first_microbatch[-1]),
        kind[order],
        (stage + first_stage[pipeline])[order],
        (microbatch + first_microbatch[pipeline])[order],
        predecessors[order],
        np.concatenate([graph.device + first for graph, first in zip(graphs, first_device, strict=False)]),
    )


def balanced_microbatches(seconds: Sequence[Sequence[float]] | np.ndarray, num_microbatches: int) -> list[int]:
    """Returns how many micro-batches each replica takes so that the slowest one is as fast as possible.

    >>> balanced_microbatches([[0, 1, 2, 3, 4], [0, 3, 6, 9, 12]], 4)
    [3, 1]

    Args:
      seconds: `[R, M + 1]`: what a replica takes for 0 to M micro-batches, not less for more of them; infinite for
        numbers that it cannot take.
      num_microbatches: M.

    Raises:
      ValueError: no numbers are possible.
    """
    table = np.asarray(seconds, float)
    numbers = np.arange(table.shape[1])
    least = [int(np.argmax(np.isfinite(row))) for row in table]
    for limit in np.unique(table[np.isfinite(table)]):
        most = [int(numbers[row <= limit].max(initial=-1)) for row in table]
        enough = all(n >= first for n, first in zip(most, least, strict=True))
        if enough and sum(most) >= num_microbatches >= sum(least):
            for r in reversed(range(len(most))):
                most[r] -= min(sum(most) - num_microbatches, most[r] - least[r])
            return most
    raise ValueError(f"`seconds` of {len(table)} replicas leave no numbers for {num_microbatches} micro-batches.")

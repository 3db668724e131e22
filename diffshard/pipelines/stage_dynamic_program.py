"""The best division of a chain of layers into stages on parts of a cluster, by dynamic programming.

Stages are consecutive layers, and each takes some devices of one kind. The dynamic program goes from the last stage to
the first, because what a pipeline takes from some stage on is a fold: the value of the later stages is joined with the
link before them, then combined with the stage. Any objective whose two functions do not decrease in the value of the
rest is minimised exactly. How many stages follow is part of the state, because it says how many micro-batches a stage
keeps.

The sum of all stages and links plus a weight times the slowest stage, which is what a pipeline takes with the formula
of Alpa and the weight M - 1, is no fold, but with a limit on each stage the sum alone is one. So the dynamic program
runs without a limit, then with one just below the slowest stage that it found, and so on. No division lies between two
of these: each has the least sum among those that are as fast as it.

Letters for sizes: L layers, P submeshes that a stage may have, K kinds of devices, D states of devices that are left, M
micro-batches.

Source: the state of Alpa, Zheng et al. (2022), equation 3, and section 5.2, which tries all limits in increasing order;
PipeDream, Narayanan et al. (2019), section 3.1, for folds with maxima.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from cost.clusters import Submesh
from cost.real_numbers import Amount, Count, checked_number


class Stage(NamedTuple):
    """A stage of a division.

    Attributes:
      start: its first layer.
      end: the layer after its last one.
      submesh: the index of its submesh.
    """

    start: int
    end: int
    submesh: int


class Objective(NamedTuple):
    """The seconds of a pipeline from a stage on, as a fold over the stages from the last to the first.

    Both functions work on arrays, entry by entry, and do not decrease in `rest`.

    Attributes:
      join: `join(link_s, rest)`: what the later stages take with the link that leads to them.
      fold: `fold(stage_s, rest)`: what they take with the stage before; of the last stage `rest` is 0.
      wait: `wait(num_stages, stage_s, later_s)`: what they take at least because the stage, from which `num_stages`
        follow, itself included, waits for a micro-batch that goes through all later stages and links in `later_s` and
        comes back. Each stage's value is at least that, with the least `later_s` of any division. None waits for none.
    """

    join: Callable[[Any, Any], Any]
    fold: Callable[[Any, Any], Any]
    wait: Callable[[int, Any, Any], Any] | None = None


class Division(NamedTuple):
    """A division of layers into stages.

    Attributes:
      stages: from the first to the last.
      value: of the objective.
    """

    stages: tuple[Stage, ...]
    value: float


def lower_bound_objective(num_microbatches: int) -> Objective:
    """Returns max_j Σ_{i<j} (t_i + c_i) + M·t_j: no synchronous schedule is faster (see `cost.pipeline_times`)."""
    return Objective(np.add, lambda stage_s, rest: np.maximum(num_microbatches * stage_s, stage_s + rest))


def step_objective(num_microbatches: int, kept: Callable[[int], int] | None = None) -> Objective:
    """Returns max_j Σ_{i<j} (t_i + c_i) + M·t_j + e_j, where stage j ends the step in e_j seconds.

    A stage's seconds are complex numbers: t_j + e_j / M, and t_j as the imaginary part.

    Where a stage keeps at most k micro-batches, it begins one only after the one k before has come back, which takes
    t_j + r_j, where r_j = Σ_{i>j} t_i + Σ_{i>=j} c_i. That gives two bounds more for each stage:

    - every k micro-batches take so long: Σ_{i<j} (t_i + c_i) + ⌈M / k⌉·(t_j + r_j) + e_j, more than the first number
      where the links are slow;
    - the first one comes back before the last one begins if k < M, and in between the stage computes M - k of them:
      Σ_{i<j} (t_i + c_i) + (M - k + 1)·t_j + 2·r_j + e_j, more where an early stage is the slowest.

    Of a stage that is bounded only M·t_j + e_j may be known well, and any part of it may belong to t_j. Both numbers
    are least where all of it does, because they count t_j at most M times. So they are taken with t_j + e_j / M for
    t_j, and without e_j.

    Args:
      num_microbatches: M.
      kept: for a number of stages that follow, itself included, k of a stage; None bounds every schedule.
    """

    def fold(stage_s: Any, rest: Any) -> np.ndarray:
        return np.maximum(num_microbatches * np.real(stage_s), np.imag(stage_s) + rest)

    def wait(num_stages: int, stage_s: Any, later_s: Any) -> np.ndarray:
        in_flight = num_microbatches if kept is None else kept(num_stages)
        each_s = np.real(stage_s)
        in_rounds = -(-num_microbatches // in_flight) * (each_s + later_s)
        if in_flight >= num_microbatches:
            return in_rounds
        return np.maximum(in_rounds, (num_microbatches - in_flight + 1) * each_s + 2 * later_s)

    return Objective(np.add, fold, None if kept is None else wait)


def overlapped_objective(num_microbatches: int, kept: Callable[[int], int]) -> Objective:
    """Returns an objective that bounds a step which overlaps with the next: the seconds of its slowest stage or link.

    That is max_j M·t_j + e_j, and M times a transfer; a link has two of them, of which the slower one is at least half.
    Where a stage keeps at most k micro-batches, every k of them take t_j + r_j, as in `step_objective`.

    Args:
      num_microbatches: M.
      kept: for a number of stages that follow, itself included, k of a stage.
    """

    def wait(num_stages: int, stage_s: Any, later_s: Any) -> np.ndarray:
        known_s = np.where(np.isfinite(stage_s), stage_s, 0.0)
        each_s = np.where(np.isfinite(stage_s), np.imag(known_s), np.inf)
        return num_microbatches / kept(num_stages) * (each_s + later_s)

    return Objective(
        lambda link_s, rest: np.maximum(num_microbatches * link_s / 2, rest),
        lambda stage_s, rest: np.maximum(num_microbatches * np.real(stage_s), rest),
        wait,
    )


def bottleneck_objective() -> Objective:
    """Returns the largest time of a stage or link: what each micro-batch takes in a pipeline that never drains."""
    return Objective(np.maximum, np.maximum)


def limited_sum_objective(stage_limit_s: float) -> Objective:
    """Returns Σ_i (t_i + c_i) over stages of at most `stage_limit_s` each, and infinity over others.

    The sum and (M - 1) times the limit is Alpa's objective for the slowest stage that the limit allows;
    `least_sum_and_slowest` minimises it over all limits.
    """
    return Objective(
        np.add, lambda stage_s, rest: np.where(stage_s <= stage_limit_s, np.asarray(stage_s) + rest, np.inf)
    )


def slowest_stage_objective() -> Objective:
    """Returns the largest time of a stage; links count only where they are infinite."""
    return Objective(lambda link_s, rest: np.where(np.isinf(link_s), np.inf, rest), np.maximum)


def best_division(
    num_layers: int,
    devices: Sequence[int],
    submeshes: Sequence[Submesh],
    stage_s: Callable[[int], np.ndarray],
    link_s: np.ndarray,
    objective: Objective,
    *,
    max_stages: int,
    use_all_devices: bool = True,
) -> Division | None:
    """Finds the division of a chain of layers into stages that minimises an objective.

    It looks at max_stages · P² · L² · D combinations, most of them at once.

    Args:
      num_layers: L.
      devices: `[K]`, how many devices there are of each kind.
      submeshes: P of them.
      stage_s: called with the number of stages from a stage to the last one (1 for the last); returns `[L, L + 1, P]`,
        the seconds of layers `start` to `end` (exclusive) on each submesh, infinite where they do not fit or may not be
        a stage; in the form that the objective takes. Entries with `end <= start` are not read.
      link_s: `[L, P, P]`, seconds of the link before a layer, from the submesh of the earlier to that of the later
        stage; the row of layer 0 is not read.
      objective: what to minimise.
      max_stages: the largest number of stages.
      use_all_devices: whether every device must be used.

    Returns:
      The best division; None where every one is infinite.

    Raises:
      ValueError: a number is below 1, an array has another shape, or a submesh has more devices than there are.
    """
    _check(num_layers, devices, submeshes, link_s, max_stages)
    left_shape = tuple(count + 1 for count in devices)
    # values[s - 1][start, left, p]: the best s stages from layer `start` on, the first on submesh p, where `left`
    # devices are left for them; choices has the end of the first stage and the submesh of the next one.
    values: list[np.ndarray] = []
    sums: list[np.ndarray] = []  # the least seconds of one micro-batch in these stages, where the objective asks for it
    choices: list[np.ndarray] = []
    for num_stages in range(1, min(max_stages, num_layers) + 1):
        times = np.asarray(stage_s(num_stages))
        if times.shape != (num_layers, num_layers + 1, len(submeshes)):
            raise ValueError(f"`stage_s` must return the shape {(num_layers, num_layers + 1, len(submeshes))}.")
        value = np.full((num_layers, *left_shape, len(submeshes)), np.inf)
        total = value.copy()
        choice = np.zeros((*value.shape, 2), np.int64)
        for p, submesh in enumerate(submeshes):
            rest, following = _rest(values, link_s[:, p], objective, submesh, left_shape, use_all_devices)
            later = None
            if objective.wait is not None:
                later, _ = _rest(sums, link_s[:, p], Objective(np.add, np.add), submesh, left_shape, use_all_devices)
            for start in range(num_layers):
                ends = np.array([num_layers]) if num_stages == 1 else np.arange(start + 1, num_layers)
                if not len(ends):
                    continue
                stage = times[start, ends, p].reshape(-1, *(1 for _ in left_shape))
                candidates = objective.fold(stage, rest[ends])
                if objective.wait is not None and later is not None:
                    candidates = np.maximum(candidates, objective.wait(num_stages, stage, later[ends]))
                    total[start, ..., p] = (np.imag(stage) + later[ends]).min(axis=0)
                best = candidates.argmin(axis=0)[None]
                value[start, ..., p] = np.take_along_axis(candidates, best, 0)[0]
                choice[start, ..., p, 0] = ends[best[0]]
                choice[start, ..., p, 1] = np.take_along_axis(following[ends], best, 0)[0]
        values.append(value)
        sums.append(total)
        choices.append(choice)
    first = np.array([value[(0, *devices)].min() for value in values])
    if not np.isfinite(first.min()):
        return None
    num_stages = int(first.argmin()) + 1
    submesh = int(values[num_stages - 1][(0, *devices)].argmin())
    return Division(_stages(choices[:num_stages], devices, submeshes, submesh), float(first.min()))


def _stages(
    choices: Sequence[np.ndarray], devices: Sequence[int], submeshes: Sequence[Submesh], submesh: int
) -> tuple[Stage, ...]:
    """Follows the choices from the first stage, which runs on `submesh`, to the last one."""
    start, left, stages = 0, list(devices), []
    for choice in reversed(choices):
        end, following = (int(x) for x in choice[(start, *left, submesh)])
        stages.append(Stage(start, end, submesh))
        left[submeshes[submesh].kind] -= submeshes[submesh].num_devices
        start, submesh = end, following
    return tuple(stages)


def _rest(
    values: Sequence[np.ndarray],
    link_s: np.ndarray,
    objective: Objective,
    submesh: Submesh,
    left_shape: tuple[int, ...],
    use_all_devices: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the seconds of the stages after one on a submesh, `[L + 1, left...]`, and the submesh of the first.

    `left` are the devices before the stage takes its own. Row L, where no stage follows, is 0 if that is allowed.
    """
    num_layers = len(link_s)
    rest = np.full((num_layers + 1, *left_shape), np.inf)
    following = np.zeros(rest.shape, np.int64)
    count = submesh.num_devices
    after = [slice(None)] * len(left_shape)
    before = list(after)
    before[submesh.kind], after[submesh.kind] = slice(count, None), slice(None, left_shape[submesh.kind] - count)
    if not values:  # the stage is the last one
        nothing_left = np.full(left_shape, np.inf if use_all_devices else 0.0)
        nothing_left[(0,) * len(left_shape)] = 0.0
        rest[(num_layers, *before)] = nothing_left[tuple(after)]
        return rest, following
    links = link_s.reshape(num_layers, *(1 for _ in left_shape), -1)
    joined = objective.join(links, values[-1])
    rest[(slice(num_layers), *before)] = joined.min(axis=-1)[(slice(None), *after)]
    following[(slice(num_layers), *before)] = joined.argmin(axis=-1)[(slice(None), *after)]
    return rest, following


def _check(
    num_layers: int, devices: Sequence[int], submeshes: Sequence[Submesh], link_s: np.ndarray, max_stages: int
) -> None:
    checked_number("num_layers", num_layers, Count)
    checked_number("max_stages", max_stages, Count)
    shape = (num_layers, len(submeshes), len(submeshes))
    if np.shape(link_s) != shape:
        raise ValueError(f"`link_s` must have the shape {shape}, one entry for each layer and pair of submeshes.")
    for submesh in submeshes:
        if not 0 <= submesh.kind < len(devices) or not 1 <= submesh.num_devices <= devices[submesh.kind]:
            raise ValueError(f"`submeshes` has {submesh}, but there are {tuple(devices)} devices of each kind.")


def least_sum_and_slowest(
    num_layers: int,
    devices: Sequence[int],
    submeshes: Sequence[Submesh],
    stage_s: Callable[[int], np.ndarray],
    link_s: np.ndarray,
    slowest_weight: float,
    *,
    max_stages: int,
) -> Division | None:
    """Finds the division with the least Σ_i (t_i + c_i) + w·max_i t_i.

    Args:
      num_layers: as in `best_division`, and so are all arguments without an entry here.
      slowest_weight: w, finite and not negative.

    Returns:
      The best division and its value; None where every one is infinite.

    Raises:
      ValueError: as `best_division`, and if the weight is negative or not finite.
    """
    checked_number("slowest_weight", slowest_weight, Amount)
    tables: dict[int, np.ndarray] = {}  # every run of the dynamic program reads the same times

    def table(number: int) -> np.ndarray:
        if number not in tables:
            tables[number] = np.asarray(stage_s(number), float)
        return tables[number]

    def divide(objective: Objective) -> Division | None:
        return best_division(num_layers, devices, submeshes, table, link_s, objective, max_stages=max_stages)

    fastest = divide(slowest_stage_objective())
    if fastest is None:
        return None
    best, limit_s = None, np.inf
    while (division := divide(limited_sum_objective(limit_s))) is not None:
        if best is not None and division.value + slowest_weight * fastest.value >= best.value:
            break  # the sums only grow from here on
        slowest_s = slowest_of(division, table)
        value = division.value + slowest_weight * slowest_s
        if best is None or value < best.value:
            best = Division(division.stages, value)
        limit_s = float(np.nextafter(slowest_s, -np.inf))
    return best


def slowest_of(division: Division, stage_s: Callable[[int], np.ndarray]) -> float:
    """Returns the seconds of the slowest stage of a division; `stage_s` is that of `best_division`."""
    later = range(len(division.stages), 0, -1)
    return max(float(stage_s(n)[stage]) for n, stage in zip(later, division.stages, strict=True))

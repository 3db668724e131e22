"""`assign_experts`: which worker of a group holds which expert, so that all of them have computed early.

Letters for sizes: X experts, W workers.
"""

import functools
import time
from collections.abc import Sequence
from typing import Any, Unpack

import numpy as np
import scipy.sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from cost.expert_groups import ExpertStep, ExpertWorkers
from cost.real_numbers import Amount, Count, checked_number, real_number
from diffshard.base import OPTIMAL_GAP, InfeasibleError
from diffshard.experts.plans import ExpertAssignment, status_of
from diffshard.plans.plan_record import relative_gap
from diffshard.solving.phases.improving import Balancing
from diffshard.solving.solve import SolveOptions, checked_solve_options, solve
from diffshard.solving.solvers import gradient
from search_spaces.expert_assignment import ExpertAssignmentSpace

LEVELLING = functools.partial(gradient.solve, phases=lambda problem: (Balancing(),))
"""The default solver: "gradient" for the bound, and descents that level the workers."""
_MOST_EXACT_VARIABLES = 400
"""Whole numbers, one for each kind of expert and worker, up to which HiGHS is asked for an optimum; chosen by hand so
that it answers within seconds."""
_MOST_RELAXED_VARIABLES = 50_000
"""As above, up to which the linear relaxation is solved for the bound; chosen by hand."""
_MOST_NODES = 2000
"""Branchings of HiGHS, after which it gives up; a count and not a time, so that equal calls give equal results."""


def assign_experts(
    expert_flops: Sequence[float] | np.ndarray,
    flops_per_s: Sequence[float] | np.ndarray,
    capacity: int | Sequence[int] | np.ndarray,
    **options: Unpack[SolveOptions],
) -> ExpertAssignment:
    """Assigns experts to the workers of a group, so that the worker that computes longest ends as early as it can.

    >>> plan = assign_experts([3, 3, 3, 2, 2, 3, 2, 3], [42, 56, 68, 22], [1, 5, 1, 3])
    >>> round(plan.step_s, 4)
    0.1964

    Args:
      expert_flops: the work of each expert, `[X]`.
      flops_per_s: the speed of each worker, `[W]`.
      capacity: experts that a worker has room for: one whole number, or `[W]`.
      **options: of the solver; without one "gradient" levels the workers, and HiGHS proves where that is cheap.

    Returns:
      The assignment, which is never slower than that of `greedy_assignment`, and a lower bound.

    Raises:
      InfeasibleError: the workers have less room than there are experts; says by how many.
      ValueError: an argument breaks its rule; the error names it and its value.
    """
    start_s = time.perf_counter()
    works, speeds = checked_works(expert_flops), checked_speeds(flops_per_s)
    check_scale(works, speeds)
    room = checked_capacity(capacity, len(speeds))
    check_room(len(works), room)
    solver = (options := checked_solve_options(options, assign_experts)).get("solver")
    space = ExpertAssignmentSpace(works.tolist(), speeds.tolist(), room.tolist())
    bound_s = assignment_bound_s(works, speeds, room)
    greedy = greedy_assignment(works, speeds, room)
    best = min(greedy, _largest_first(works, speeds, room), key=lambda choice: _makespan(space, choice))
    if len(np.unique(works)) == 1:
        # Equal experts: τ suffices if Σ_j min(room_j, ⌊τ F_j / f⌋) ≥ X, and greedy ends at the least such τ.
        bound_s = _makespan(space, best)
    ended, history = "finished", ()
    if solver is not None or relative_gap(_makespan(space, best), bound_s) > OPTIMAL_GAP:
        solution = solve(space.problem, **{**options, "solver": LEVELLING if solver is None else solver}, start=best)
        ended, history = solution.status, solution.history
        if solution.feasible:
            best = min(best, np.asarray(solution.choice), key=lambda choice: _makespan(space, choice))
            bound_s = max(bound_s, float(solution.lower_bound))
    if solver is None and relative_gap(_makespan(space, best), bound_s) > OPTIMAL_GAP:
        worker, proven_s = _by_highs(works, speeds, room)
        bound_s = max(bound_s, proven_s)
        if worker is not None:
            best = min(best, worker, key=lambda choice: _makespan(space, choice))
    step_s = _makespan(space, best)
    return ExpertAssignment(
        worker=tuple(map(int, best)),
        busy_s=tuple(space.decode(best.tolist()).busy_s.tolist()),
        greedy_s=_makespan(space, greedy),
        lower_bound_s=min(bound_s, step_s),
        status=status_of(step_s, bound_s, ended),
        search_s=time.perf_counter() - start_s,
        history=history,
    )


def greedy_assignment(expert_flops: np.ndarray, flops_per_s: np.ndarray, capacity: np.ndarray) -> np.ndarray:
    """Gives each expert to the worker with room that would have the fewest experts for its speed.

    This is the published baseline. It counts experts and does not weigh them, so that it is for experts of equal work.

    Args:
      expert_flops: `[X]`.
      flops_per_s: `[W]`.
      capacity: `[W]`, together at least X.

    Returns:
      The worker of each expert, `[X]`.
    """
    return _in_turn(np.ones(len(expert_flops)), np.asarray(flops_per_s, float), capacity)


def _in_turn(sizes: np.ndarray, speeds: np.ndarray, capacity: np.ndarray) -> np.ndarray:
    """Gives each expert, in order, to the worker with room that would end first, by sizes `[X]`."""
    load, room = np.zeros(len(speeds)), np.array(capacity)
    worker = np.empty(len(sizes), np.int64)
    for x, size in enumerate(sizes):
        worker[x] = np.where(room > 0, (load + size) / speeds, np.inf).argmin()
        load[worker[x]] += size
        room[worker[x]] -= 1
    return worker


def _largest_first(works: np.ndarray, speeds: np.ndarray, capacity: np.ndarray) -> np.ndarray:
    """Gives each expert, the largest first, to the worker with room that would end first."""
    order = np.argsort(-works, kind="stable")
    worker = np.empty(len(works), np.int64)
    worker[order] = _in_turn(works[order], speeds, capacity)
    return worker


def assignment_bound_s(expert_flops: np.ndarray, flops_per_s: np.ndarray, capacity: np.ndarray) -> float:
    """Returns seconds that no assignment is faster than.

    It is the largest of three: all work at the speed of all workers with room, the largest expert on the fastest worker
    with room, and the linear relaxation, in which an expert may be on several workers in parts.
    """
    speeds = flops_per_s[capacity > 0]
    bound = max(expert_flops.sum() / speeds.sum(), expert_flops.max() / speeds.max())
    if _num_variables(expert_flops, flops_per_s) <= _MOST_RELAXED_VARIABLES:
        bound = max(bound, _integer_program(expert_flops, flops_per_s, capacity, integral=False)[1])
    return float(bound)


def _by_highs(works: np.ndarray, speeds: np.ndarray, room: np.ndarray) -> tuple[np.ndarray | None, float]:
    """Returns an assignment by HiGHS and its bound in seconds; None and 0 where that would take long."""
    if _num_variables(works, speeds) > _MOST_EXACT_VARIABLES:
        return None, 0.0
    counts, bound_s = _integer_program(works, speeds, room, integral=True)
    if counts is None:
        return None, bound_s
    worker = np.empty(len(works), np.int64)
    for kind, work in enumerate(np.unique(works)):
        worker[works == work] = np.repeat(np.arange(len(speeds)), counts[kind])
    return worker, bound_s


def _num_variables(works: np.ndarray, speeds: np.ndarray) -> int:
    return len(np.unique(works)) * len(speeds)


def _integer_program(
    works: np.ndarray, speeds: np.ndarray, room: np.ndarray, *, integral: bool
) -> tuple[np.ndarray | None, float]:
    """Minimises the makespan over how many experts of each kind are on each worker; equal experts are of one kind.

    Returns:
      Counts `[kinds, W]`, None if there are none or they are not whole; and the bound in seconds, lowered by the
      tolerance of HiGHS.
    """
    kinds, copies = np.unique(works, return_counts=True)
    unit_s = works.sum() / speeds.sum()  # so that numbers are near 1
    expert = kinds[:, None] / speeds / unit_s
    num_kinds, num_workers = expert.shape
    # Columns: the counts of the first kind on each worker, of the second kind, ..., the makespan.
    each_kind = scipy.sparse.kron(scipy.sparse.eye(num_kinds), np.ones((1, num_workers)))
    each_worker = scipy.sparse.kron(np.ones((1, num_kinds)), scipy.sparse.eye(num_workers))
    busy = scipy.sparse.hstack([scipy.sparse.diags(row) for row in expert])
    padded = [scipy.sparse.hstack([rows, np.zeros((rows.shape[0], 1))]) for rows in (each_kind, each_worker)]  # pyright: ignore[reportOptionalSubscript]
    busy = scipy.sparse.hstack([busy, -np.ones((num_workers, 1))])
    result = milp(
        np.append(np.zeros(num_kinds * num_workers), 1.0),
        integrality=np.append(np.full(num_kinds * num_workers, int(integral)), 0),
        bounds=Bounds(0, np.append(np.repeat(copies, num_workers), np.inf)),  # pyright: ignore[reportArgumentType]
        constraints=[
            LinearConstraint(padded[0].tocsc(), copies, copies),  # pyright: ignore[reportArgumentType]
            LinearConstraint(padded[1].tocsc(), 0, room),  # pyright: ignore[reportArgumentType]
            LinearConstraint(busy.tocsc(), -np.inf, 0),
        ],
        options={"mip_rel_gap": 1e-9, "node_limit": _MOST_NODES},
    )
    bound = result.mip_dual_bound if integral else result.fun
    bound_s = max(float(bound) - 1e-6, 0.0) * unit_s if bound is not None and np.isfinite(bound) else 0.0
    if result.x is None or not integral:
        return None, bound_s
    counts = np.rint(result.x[:-1]).astype(np.int64).reshape(expert.shape)
    whole = (counts.sum(axis=1) == copies).all() and (counts.sum(axis=0) <= room).all()
    return (counts if whole else None), bound_s


def _makespan(space: ExpertAssignmentSpace, choice: np.ndarray) -> float:
    return float(space.decode(choice.tolist()).busy_s.max())


_LONGEST_S = 1e100
"""More than any real plan takes, and little enough that squares and sums of times do not overflow."""


def checked_workers(flops_per_s: Any, capacity: Any, latency_s: Any, s_per_byte: Any) -> ExpertWorkers:
    """Returns the workers."""
    speeds = checked_speeds(flops_per_s)
    links = []
    for name, numbers in (("latency_s", latency_s), ("s_per_byte", s_per_byte)):
        matrix = _numbers(name, numbers).copy()
        if matrix.shape != (len(speeds), len(speeds)):
            raise ValueError(
                f"`{name}` must be `[{len(speeds)}, {len(speeds)}]`, a row and a column for each worker; got shape "
                f"{matrix.shape}."
            )
        np.fill_diagonal(matrix, 0.0)
        _check_all(name, matrix, matrix >= 0, "at least 0 and finite; leave slow links in with their numbers")
        links.append(matrix)
    return ExpertWorkers(speeds, checked_capacity(capacity, len(speeds)), *links)


def checked_step(
    expert_flops: Any,
    *,
    layer_spacing: Any,
    recomputation: Any,
    **numbers: Any,
) -> ExpertStep:
    """Returns the step."""
    works = checked_works(expert_flops)
    for name in ("exchange_bytes", "num_exchanges", "all_reduce_bytes"):
        numbers[name] = checked_number(name, numbers[name], Amount)
    numbers["layer_spacing"] = layer_spacing
    for name in ("num_layers", "layer_spacing", "global_batch", "mini_batch"):
        numbers[name] = checked_number(name, numbers[name], Count)
    if numbers["layer_spacing"] > numbers["num_layers"]:
        raise ValueError(
            f"`layer_spacing` must be at most `num_layers`, {numbers['num_layers']}, so that a layer has experts; got "
            f"{numbers['layer_spacing']}."
        )
    again = real_number(float(recomputation) if isinstance(recomputation, bool) else recomputation)
    if again is None or not 0 <= again < float("inf"):
        raise ValueError(
            f"`recomputation` must be how many forward passes are made again, such as 0 or 1, not {recomputation!r}."
        )
    return ExpertStep(tuple(works.tolist()), recomputation=again, **numbers)


def checked_works(expert_flops: Any) -> np.ndarray:
    """Returns the work of each expert, `[X]`; raises `ValueError` if it breaks a rule."""
    works = _vector("expert_flops", expert_flops, "expert")
    _check_all("expert_flops", works, works > 0, "positive and finite; leave out experts that compute nothing")
    return works


def checked_speeds(flops_per_s: Any) -> np.ndarray:
    """Returns the speed of each worker, `[W]`; raises `ValueError` if it breaks a rule."""
    speeds = _vector("flops_per_s", flops_per_s, "worker")
    _check_all("flops_per_s", speeds, speeds > 0, "positive and finite; leave out workers that cannot compute")
    return speeds


def checked_capacity(capacity: Any, num_workers: int) -> np.ndarray:
    """Returns the experts that each worker has room for, `[W]` integers.

    Args:
      capacity: one whole number for all workers, or W of them.
      num_workers: W.
    """
    numbers = _numbers("capacity", capacity)
    if numbers.shape not in ((), (num_workers,)):
        raise ValueError(
            f"`capacity` must be a whole number or one for each of {num_workers} workers, got shape {numbers.shape}."
        )
    whole = (numbers >= 0) & (numbers == np.floor(numbers)) & (numbers < 2**31)
    _check_all("capacity", numbers, whole, "a whole number of experts, at least 0")
    return np.broadcast_to(numbers.astype(np.int64), (num_workers,))


def check_room(num_experts: int, capacity: np.ndarray) -> None:
    """Raises `InfeasibleError` where workers have less room than there are experts; says how many are missing."""
    room = int(capacity.sum())
    if room < num_experts:
        whose = "the only worker" if len(capacity) == 1 else f"all {len(capacity)} workers together"
        raise InfeasibleError(
            f"`capacity` of {whose} is {room}, {num_experts - room} less than the "
            f"{num_experts} experts of `expert_flops`. Give more workers, more capacity, or fewer experts."
        )


def check_scale(works: np.ndarray, speeds: np.ndarray) -> None:
    """Raises `ValueError` where experts take longer than numbers can say, on the slowest worker or all together."""
    with np.errstate(over="ignore"):
        longest_s = works.sum() / speeds.min()
    if not longest_s < _LONGEST_S:
        raise ValueError(
            f"`expert_flops` are too many for `flops_per_s`: all experts, of {works.max()} FLOPs at most, would take "
            f"{longest_s:.3g} s on the slowest worker, of {speeds.min()} in a second. Check the units."
        )


def _vector(name: str, numbers: Any, thing: str) -> np.ndarray:
    vector = _numbers(name, numbers)
    if vector.ndim != 1 or not len(vector):
        raise ValueError(f"`{name}` must have one number for each {thing} and at least one, got shape {vector.shape}.")
    return vector


def _numbers(name: str, numbers: float | Sequence[float] | np.ndarray) -> np.ndarray:
    try:
        return np.asarray(numbers, float)
    except (TypeError, ValueError):
        raise ValueError(f"`{name}` must be numbers in equally long rows, not {numbers!r}.") from None


def _check_all(name: str, numbers: np.ndarray, valid: np.ndarray, rule: str) -> None:
    wrong = np.argwhere(~(valid & np.isfinite(numbers)))
    if len(wrong):
        where = tuple(map(int, wrong[0]))
        raise ValueError(f"`{name}{list(where) if where else ''}` must be {rule}; got {numbers[where]}.")

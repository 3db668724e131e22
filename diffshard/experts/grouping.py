"""`group_experts`: which workers form expert-parallel groups, and which worker of a group holds which expert.

Letters for sizes: W workers, X experts, G groups.
"""

import dataclasses
import time
from collections.abc import Sequence
from typing import Unpack

import numpy as np

from cost.expert_groups import (
    ExpertStep,
    ExpertWorkers,
    Group,
    all_reduce_s,
    computing_s,
    exchanging_s,
)
from diffshard.base import OPTIMAL_GAP, Deadline
from diffshard.experts.assignment import (
    LEVELLING,
    assign_experts,
    check_room,
    check_scale,
    checked_capacity,
    checked_speeds,
    checked_step,
    checked_workers,
    checked_works,
)
from diffshard.experts.divisions import (
    MOST_WORKERS,
    Division,
    best_division,
    candidate_groups,
    divisions_by_merging,
    equal_runs,
    lower_bounds_s,
    nearest_order,
)
from diffshard.experts.plans import GroupPlan, status_of
from diffshard.outer_search import Candidate, Outcome, OuterSearch
from diffshard.solving.solve import SolveOptions, checked_solve_options, solve
from search_spaces.expert_groups import ExpertGroupSpace

_SOLVED_COUNTS = 3
"""Numbers of groups, the most promising ones, for which the solver is asked; chosen by hand."""
_MOST_ASCENT_WORKERS = 32
"""Workers up to which the whole "gradient" is the default. Its ascent takes ten times as long as descents alone for
more workers, and found nothing better on those of `experiments.expert_groups`."""


def group_experts(
    expert_flops: Sequence[float] | np.ndarray,
    flops_per_s: Sequence[float] | np.ndarray,
    capacity: int | Sequence[int] | np.ndarray,
    latency_s: Sequence[Sequence[float]] | np.ndarray,
    s_per_byte: Sequence[Sequence[float]] | np.ndarray,
    *,
    exchange_bytes: float,
    all_reduce_bytes: float,
    num_layers: int,
    global_batch: int,
    mini_batch: int,
    layer_spacing: int = 1,
    num_exchanges: float = 4,
    recomputation: float = 0,
    **options: Unpack[SolveOptions],
) -> GroupPlan:
    """Divides workers into groups that hold all experts each, so that a step of the slowest group takes least.

    Large groups compute each expert with more workers and exchange tokens over more and slower links; many groups
    reduce more gradients. `cost/expert_groups.py` has the formula.

    Args:
      expert_flops: the work of each expert for a mini-batch of one layer, `[X]`.
      flops_per_s: the speed of each worker, `[W]`.
      capacity: experts that a worker has room for: one whole number, or `[W]`.
      latency_s: `[W, W]`, of the link from one worker to another; the diagonal is not read.
      s_per_byte: `[W, W]`, as `latency_s`.
      exchange_bytes: the buffer that a worker exchanges with its group.
      all_reduce_bytes: the gradients that groups reduce in a step.
      num_layers: of the model.
      global_batch: examples in a step.
      mini_batch: examples that a worker computes at once.
      layer_spacing: every how many layers one has experts.
      num_exchanges: of the buffer, in one layer and pass.
      recomputation: forward passes that the backward pass makes again.
      **options: of the solver, which chooses among candidate groups, for at most three numbers of groups together.
        Without one the best of all divisions of up to 12 workers is found, and for more it is "gradient", with fewer
        phases for more than 32 workers.

    Returns:
      The groups, never slower than those of the published heuristic, which merges pairs of groups; an assignment of all
      experts in each group; and a lower bound.

    Raises:
      InfeasibleError: all workers together have less room than there are experts; says by how many.
      ValueError: an argument breaks its rule; the error names it and its value.
    """
    start_s = time.perf_counter()
    workers = checked_workers(flops_per_s, capacity, latency_s, s_per_byte)
    step = checked_step(
        expert_flops,
        exchange_bytes=exchange_bytes,
        num_exchanges=num_exchanges,
        all_reduce_bytes=all_reduce_bytes,
        num_layers=num_layers,
        layer_spacing=layer_spacing,
        recomputation=recomputation,
        global_batch=global_batch,
        mini_batch=mini_batch,
    )
    check_scale(np.array(step.expert_flops), workers.flops_per_s)
    check_room(step.num_experts, workers.capacity)
    solver = (options := checked_solve_options(options, group_experts)).get("solver")
    merged = list(divisions_by_merging(workers, step))
    fastest_merged = min(merged, key=lambda division: division.step_s)
    if solver is None and workers.num_workers <= MOST_WORKERS:
        best, ended = best_division(workers, step, fastest_merged), "optimal"
        bound_s = best.step_s
    else:
        bounds_s = lower_bounds_s(workers, step)
        bound_s = float(bounds_s.min())
        if solver is None:
            solver = "gradient" if workers.num_workers <= _MOST_ASCENT_WORKERS else LEVELLING
        best, ended = _best_by_solver(workers, step, merged, bounds_s, **{**options, "solver": solver})
    groups = tuple(_fastest_first(workers, group) for group in sorted(best.groups))
    return GroupPlan(
        groups=groups,
        expert_workers=_holders(step.expert_flops, workers.flops_per_s, workers.capacity, groups),
        computing_s=tuple(float(computing_s(workers, step, group)) for group in groups),
        exchanging_s=tuple(float(exchanging_s(workers, step, group)) for group in groups),
        all_reduce_s=all_reduce_s(workers, step, groups),
        merging_s=fastest_merged.step_s,
        lower_bound_s=min(bound_s, best.step_s),
        status=status_of(best.step_s, bound_s, ended),
        search_s=time.perf_counter() - start_s,
    )


def reassign_experts(
    plan: GroupPlan,
    expert_flops: Sequence[float] | np.ndarray,
    flops_per_s: Sequence[float] | np.ndarray,
    capacity: int | Sequence[int] | np.ndarray,
) -> GroupPlan:
    """Assigns experts of other work to the workers of a plan's groups, which stay as they are.

    Args:
      plan: from `group_experts`.
      expert_flops: the work of each expert now, `[X]`, in any unit; `ExpertLoads.work` has it.
      flops_per_s: as for `group_experts`.
      capacity: as for `group_experts`.

    Returns:
      The plan with other `expert_workers`; on the same devices it has the same mesh if the groups were and are alike.

    Raises:
      InfeasibleError: a group has less room than there are experts; says by how many.
      ValueError: an argument breaks its rule, or is not of the plan's experts or workers.
    """
    works, speeds = checked_works(expert_flops), checked_speeds(flops_per_s)
    num_experts, num_workers = len(plan.expert_workers[0]), sum(map(len, plan.groups))
    for name, numbers, needed in (("expert_flops", works, num_experts), ("flops_per_s", speeds, num_workers)):
        if len(numbers) != needed:
            raise ValueError(f"`{name}` must have the {needed} numbers of the plan, not {len(numbers)}.")
    room = checked_capacity(capacity, num_workers)
    return dataclasses.replace(plan, expert_workers=_holders(works.tolist(), speeds, room, plan.groups))


def _best_by_solver(
    workers: ExpertWorkers,
    step: ExpertStep,
    merged: list[Division],
    bounds_s: np.ndarray,
    time_limit_s: float | None,
    **options,
) -> tuple[Division, str]:
    """Returns the best division that merging, equal runs or the solver finds, and how the search ended.

    The solver is asked for the numbers of groups whose known divisions are fastest, unless their bounds say that
    nothing is to be gained there.
    """
    order = nearest_order(workers, step)
    known: dict[int, list[Division]] = {len(division.groups): [division] for division in merged}
    for num_groups in range(1, workers.num_workers + 1):
        if np.isfinite(bounds_s[num_groups - 1]):
            for runs_order in (order, np.arange(workers.num_workers)):
                runs = equal_runs(workers, step, runs_order, num_groups)
                known.setdefault(num_groups, []).extend(d for d in runs if np.isfinite(d.step_s))
    fastest = {count: min(divisions, key=lambda d: d.step_s) for count, divisions in known.items() if divisions}
    best = min(fastest.values(), key=lambda division: division.step_s)
    search = OuterSearch(Deadline.from_now(time_limit_s), OPTIMAL_GAP, best=Outcome(best, best.step_s))

    def candidate(count: int) -> Candidate[Division]:
        def solve_count(deadline: Deadline, cut_off_s: float) -> Outcome[Division]:
            del cut_off_s  # the solver's bound is one for candidate groups only
            limit_s = deadline.remaining_s()
            division, status = _solved(workers, step, order, fastest[count], time_limit_s=limit_s, **options)
            return Outcome(division, division.step_s, status=status)

        return Candidate(count, float(bounds_s[count - 1]), solve_count)

    in_order = sorted(fastest, key=lambda count: fastest[count].step_s)[:_SOLVED_COUNTS]
    search.run([candidate(count) for count in in_order])
    assert search.best is not None
    statuses = {tried.status for tried in search.tried}
    ended = "time limit" if statuses & {"time limit", "not tried"} else "finished"
    return search.best.result, "interrupted" if search.is_interrupted else ended


def _solved(
    workers: ExpertWorkers, step: ExpertStep, order: np.ndarray, start: Division, **options
) -> tuple[Division, str]:
    """Returns the division that the solver makes of candidate groups, as many as `start` has, and how it ended.

    Workers are numbered in their order, so that runs of workers agree by the edges of a chain.
    """
    place = np.argsort(order)
    renumbered = ExpertWorkers(
        workers.flops_per_s[order],
        workers.capacity[order],
        workers.latency_s[np.ix_(order, order)],
        workers.s_per_byte[np.ix_(order, order)],
    )
    candidates = candidate_groups(order, len(start.groups), start)
    space = ExpertGroupSpace(renumbered, step, len(start.groups), [place[list(group)].tolist() for group in candidates])
    begin = space.choice_of([place[list(group)].tolist() for group in start.groups])
    solution = solve(space.problem, start=begin, **options)
    decoded = space.decode(solution.choice)
    groups = tuple(tuple(sorted(map(int, order[list(g)]))) for g in decoded.groups)
    return Division(groups, decoded.step_s), solution.status


def _fastest_first(workers: ExpertWorkers, group: Group) -> Group:
    """Returns the workers of a group in an order in which groups of workers of the same kinds are assigned alike."""
    return tuple(sorted(group, key=lambda w: (-workers.flops_per_s[w], -workers.capacity[w], w)))


def _holders(
    works: Sequence[float], speeds: np.ndarray, room: np.ndarray, groups: Sequence[Group]
) -> tuple[tuple[int, ...], ...]:
    """Returns for each group the worker that holds each expert; groups of equal workers are assigned once."""
    assigned: dict[tuple[bytes, bytes], tuple[int, ...]] = {}
    holders = []
    for group in groups:
        members = np.array(group)
        own_speeds, own_room = speeds[members], room[members]
        alike = (own_speeds.tobytes(), own_room.tobytes())
        if alike not in assigned:
            assigned[alike] = assign_experts(works, own_speeds, own_room).worker
        holders.append(tuple(int(members[worker]) for worker in assigned[alike]))
    return tuple(holders)

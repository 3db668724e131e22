"""Solving a space of embedding tables by the default search or any other solver, within the memory of whole arrays.

An array is as long on every device as on the fullest one. The default search knows that. Other solvers get a `Problem`,
which has limits for each device only: first those of the memory. If the placement does not fit with whole arrays, the
default search finds one that does, and the solver looks for a better one with a limit for each array. The bound is that
of the first, looser problem.

The default search has chains that draw one strategy after the other, while temperature falls and norms sharpen. A step
takes one table and prices all its strategies in all chains in a few array operations. At first the norm of the loads is
smooth, so that a step also helps that changes no largest load, and later nearly the largest load itself. Now and then
the worse half of the chains is replaced by the better one.

Letters for sizes: C chains, T tables, S_t strategies of table t, D devices, A arrays of a device, O those of one table,
M memories of a device.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import replace

import jax

from cost.base import Problem, num_strategies
from cost.real_numbers import is_positive
from diffshard.base import OPTIMAL_GAP, Deadline, Progress, Proposal, Solution, Solver
from diffshard.solving.csr import numpy_generator
from diffshard.solving.form import identity
from diffshard.solving.phases.improving import Balancing
from diffshard.solving.phases.starts import Clock
from diffshard.solving.solve import solve
from diffshard.solving.solvers import gradient
from diffshard.tables.bound import enumerated, lower_bound_s, strategy_arrays
from diffshard.tables.chains import SCHEDULE, Closest, Schedule, SummedChains, scaled
from search_spaces.embedding_tables.space import EmbeddingTableSpace

_MOST_MEMORY_PRICE = 1000.0
"""Price of memory, in steps' seconds, up to which chains that do not fit are cooled again at ten times the price."""
_CLOSE_LIMITS = (1.005, 1.25)
"""`Schedule.alone_limits` of a second cooling where so many strategies leave few chains: the usual limits of 8 chains
are 10% apart, and the largest table's best strategy may be between two. Chosen by hand."""


def anneal(
    space: EmbeddingTableSpace,
    problem: Problem,
    *,
    time_limit_s: float | None,
    key: jax.Array,
    schedule: Schedule = SCHEDULE,
) -> Iterator[Proposal]:
    """Yields the bound and better and better placements; with a time limit, of slower and slower cooling."""
    if math.prod(num_strategies(problem).tolist()) <= gradient.MOST_ENUMERATED:
        yield from enumerated(problem, space.arrays)
        return
    clock, rng, arrays = Clock(time_limit_s), numpy_generator(key), strategy_arrays(space)
    bound_s = lower_bound_s(arrays, devices_are_alike=len(set(space.devices.hardware)) == 1)
    yield Proposal(lower_bound=bound_s)
    if math.isinf(bound_s):
        return
    best_s, closest = math.inf, Closest()
    scale_s = bound_s or float(arrays.forward_s.sum(1).max()) or 1.0
    total = int(arrays.sizes.sum())
    num_sweeps = schedule.sweeps_of(len(arrays.sizes), total)
    num_sweeps = num_sweeps if time_limit_s is None else max(num_sweeps // 4, 2)  # a first placement should come early
    while bound_s < best_s * (1 - OPTIMAL_GAP):
        limits = [schedule.alone_limits]
        num_chains = schedule.chains_of(total)
        if num_chains <= schedule.least_chains and limits[0] == SCHEDULE.alone_limits:
            limits.append(_CLOSE_LIMITS)
        for alone_limits in limits:
            own = replace(schedule, alone_limits=alone_limits)
            chains = SummedChains(scaled(arrays, scale_s), space.arrays, num_chains, own, rng)
            for choice, scaled_step_s in chains.cooled(num_sweeps, closest):
                best_s = min(best_s, scaled_step_s * scale_s)
                yield Proposal(choice)
        if math.isinf(best_s):
            if schedule.memory_prices[1] > _MOST_MEMORY_PRICE:
                yield from _balanced(space, problem, closest, time_limit_s, key)
                return
            # Memory is so scarce that it counts more than seconds.
            low, high = schedule.memory_prices
            schedule = replace(schedule, memory_prices=(10 * low, 10 * high), alone_limits=(1e9, 1e9))
            continue
        if time_limit_s is None or clock.elapsed_share() >= 1:
            return
        num_sweeps *= 2


def _balanced(
    space: EmbeddingTableSpace, problem: Problem, closest: Closest, time_limit_s: float | None, key: jax.Array
) -> Iterator[Proposal]:
    """Yields placements that prices of memory lead to, with a limit for each array in the shares of the closest one.

    If none of them fits, yields the closest one.
    """
    if closest.choice is None:
        return
    limited = space.arrays.with_limits(problem, space.arrays.limits_as(closest.choice.tolist()))
    fits = False
    for proposal in gradient.solve(limited, time_limit_s=time_limit_s, key=key, phases=lambda _: (Balancing(),)):
        is_better = proposal.choice is not None and not space.arrays.excess(proposal.choice.tolist())
        fits |= is_better
        yield Proposal(proposal.choice if is_better else None)  # its bounds are those of the limits of single arrays
    if not fits:
        yield Proposal(closest.choice)


def solve_space(
    space: EmbeddingTableSpace,
    solver: str | Solver | None = None,
    *,
    time_limit_s: float | None = None,
    key: jax.Array | int | None = None,
    progress: Progress | None = None,
) -> Solution:
    """Finds strategies of a space's tables; arguments are those of `shard_tables`.

    Returns:
      A solution whose arrays fit the memory if it is `feasible`; `excess` is what they exceed it by.
    """
    if solver is None:
        run = functools.partial(anneal, space)
        found = solve(space.problem, solver=run, time_limit_s=time_limit_s, key=key, progress=progress, reduce=identity)
        return _with_whole_arrays(space, found, found.lower_bound)
    always_fits = (space.arrays.most() <= space.arrays.limit_bytes).all()
    has_limit = not always_fits and is_positive(time_limit_s)
    limit_s = time_limit_s / 2 if has_limit and time_limit_s is not None else time_limit_s
    deadline = Deadline.from_now(time_limit_s)
    found = solve(space.problem, solver=solver, time_limit_s=limit_s, key=key, progress=progress)
    if not found.feasible or not space.arrays.excess(found.choice):
        return found

    annealed = solve_space(space, time_limit_s=deadline.remaining_s(0.5), key=key)
    bound = max(found.lower_bound, annealed.lower_bound)
    if not annealed.feasible:
        return _with_whole_arrays(space, annealed, bound)
    limited = space.arrays.with_limits(space.problem, space.arrays.limits_as(annealed.choice))
    better = solve(
        limited, solver=solver, time_limit_s=deadline.remaining_s(), key=key, progress=progress, start=annealed.choice
    )
    return _with_whole_arrays(space, better, bound)


def _with_whole_arrays(space: EmbeddingTableSpace, solution: Solution, bound: float) -> Solution:
    """Returns a solution with this bound, feasible if its arrays fit as long as they are on the fullest device."""
    excess = space.arrays.excess(solution.choice)
    if excess or not solution.feasible:
        bound = max(bound, solution.history[-1][2])  # that of a solution is no more than its cost
        status = "infeasible" if bound == math.inf else "finished" if solution.status == "optimal" else solution.status
        excess = max(excess, solution.excess)
        return solution._replace(feasible=False, excess=excess, lower_bound=bound, gap=math.inf, status=status)
    bound = min(bound, float(solution.cost))
    gap = (solution.cost - bound) / solution.cost if solution.cost else 0.0
    status = "finished" if solution.status == "optimal" else solution.status
    if gap <= OPTIMAL_GAP:
        status = "optimal"
    return solution._replace(lower_bound=bound, gap=gap, status=status)

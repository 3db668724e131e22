"""Solving a space of embedding tables by the default search or any other solver, within the memory of whole arrays.

An array is as long on every device as on the fullest one. The default search knows that. Other solvers get a `Problem`,
which has limits for each device only: first those of the memory. If the placement does not fit with whole arrays, the
default search finds one that does, and the solver looks for a better one with a limit for each array. The bound is that
of the first, looser problem.
"""

import functools
import math

import jax

from cost.real_numbers import is_positive
from diffshard.base import OPTIMAL_GAP, Deadline, Progress, Solution, Solver
from diffshard.solving.presolve.base import identity
from diffshard.solving.solve import solve
from diffshard.tables import annealing
from search_spaces.embedding_tables.space import EmbeddingTableSpace


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
        run = functools.partial(annealing.solve, space)
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

"""The largest loads of a problem as an objective: where edges add to loads, presolve still shrinks its tangents."""

import functools

import jax
import jax.numpy as jnp

from cost.base import Problem, load_groups
from cost.quantities import Quantity
from diffshard.solving.objectives.objective import CostFunction, Objective

_LOADS = "loads of the problem"


def split_loads(problem: Problem, objective: Objective | None = None) -> tuple[Problem, Objective]:
    """Returns a problem without its loads, and the sum of their groups' largest ones as an objective."""
    groups = tuple(tuple(group.tolist()) for group in load_groups(problem))
    loads = Quantity(problem.load, problem.edge_load)
    rest = problem._replace(load=(), edge_load=(), load_group=())
    if objective is None:
        return rest, Objective(_largest(groups), {_LOADS: loads}, name="loads")
    below = None if objective.convex_below is None else _largest(groups, objective.convex_below)
    function = _largest(groups, objective.function)
    return rest, Objective(function, {**objective.quantities, _LOADS: loads}, below, objective.name)


@functools.lru_cache(maxsize=64)
def _largest(groups: tuple[tuple[int, ...], ...], more: CostFunction | None = None) -> CostFunction:
    """Returns the sum of the groups' largest loads, and of another function; equal ones are compiled once."""

    def cost(amounts: dict[str, jax.Array]) -> jax.Array:
        loads = amounts[_LOADS]
        largest = sum((jnp.max(loads[jnp.array(group)]) for group in groups), start=jnp.zeros((), loads.dtype))
        if more is None:
            return largest
        return largest + more({name: amount for name, amount in amounts.items() if name != _LOADS})

    return cost

"""What a search makes small: the seconds of a step, or a user's own function of what a step does.

A space prices collectives that can overlap with arithmetic at a share of their time, whatever runs beside them. That is
too little once they take longer than all arithmetic: then the step waits at least for the difference. With C seconds of
arithmetic, H of collectives that hold the step, B on the links of those that can overlap with arithmetic and W of
waiting for them at the hardware's share, a step takes

    T = C + H + max(W, B - C)

seconds. That is no sum: W and B - C are loads of which the larger counts (`ShardingSpace.step_problem`). A user's
objective may be any function of what is linear in the choice. `diffshard.solving` finds choices for both, with bounds.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diffshard.base import Solution
from diffshard.public_names import did_you_mean
from diffshard.solving.form import has_few_pairs
from diffshard.solving.objectives.minimise import SolveLinear, minimise
from diffshard.solving.objectives.objective import Affine, Objective, PricedObjective, split_loads
from search_spaces.sharding.explaining import StepPrediction, Transfer
from search_spaces.sharding.space import ShardingSpace
from search_spaces.sharding.step_quantities import BLOCKING, COMPUTE, EXPOSED, MEMORY, OVERLAPPED

STEP_GAP = 1e-3
"""The relative gap at which a search for the fastest step ends where links bound it; predictions are off by more."""
STEP_QUANTITIES = (COMPUTE, BLOCKING, OVERLAPPED, EXPOSED)
"""The quantities on which the seconds of a step depend."""


class RelaxedStep(NamedTuple):
    """The amounts of a step, as float64 arrays of JAX: of one plan, or of a mixture of plans with relaxed weights.

    All fields are linear in the plan, so that an objective of them can be differentiated and bounded.

    Attributes:
      compute_s: seconds of arithmetic and memory traffic on each device.
      blocking_s: by mesh axis, seconds on its links of collectives that arithmetic waits for.
      overlapped_s: by mesh axis, seconds on its links of collectives that can overlap with arithmetic.
      exposed_s: by mesh axis, what the step waits for those at the hardware's exposed share.
      memory_bytes: `[T]` in use on each device over the step.
    """

    compute_s: jax.Array
    blocking_s: dict[str, jax.Array]
    overlapped_s: dict[str, jax.Array]
    exposed_s: dict[str, jax.Array]
    memory_bytes: jax.Array

    def __getattr__(self, name: str) -> Any:
        names = (*self._fields, "seconds", "link_s", "peak_bytes")
        raise AttributeError(
            f"`objective` reads {name!r} of a step, which has {', '.join(names)}{did_you_mean(name, names)}"
        )

    @property
    def seconds(self) -> jax.Array:
        """The predicted seconds of the step, convex in the fields."""
        blocking, overlapped, exposed = (
            sum(s.values(), start=jnp.zeros(())) for s in (self.blocking_s, self.overlapped_s, self.exposed_s)
        )
        return self.compute_s + blocking + jnp.maximum(exposed, overlapped - self.compute_s)

    @property
    def link_s(self) -> dict[str, jax.Array]:
        """By mesh axis, seconds on its links of all collectives."""
        return {axis: seconds + self.overlapped_s[axis] for axis, seconds in self.blocking_s.items()}

    @property
    def peak_bytes(self) -> jax.Array:
        """The most memory in use on each device at any time, convex in the fields."""
        return jnp.max(self.memory_bytes, initial=0.0)


StepCost = Callable[[RelaxedStep], jax.Array]
"""A user's objective: a differentiable function of a relaxed step, a scalar."""


def waiting_transfers(prediction: StepPrediction) -> tuple[Transfer, ...]:
    """Returns the collectives of a prediction with the seconds that a step waits for them, the links' limit included.

    Of collectives that can overlap with arithmetic, with B seconds on their links and W seconds of waiting in the
    prediction, a step with C seconds of arithmetic waits max(W, B - C) seconds; each has its part of that.
    """
    overlapped = _overlapped(prediction)
    link_s, exposed_s = sum(t.link_s for t in overlapped), sum(t.seconds for t in overlapped)
    least_s = link_s - float(prediction.compute_s.sum())
    if least_s <= exposed_s:
        return prediction.transfers
    factor = least_s / link_s
    return tuple(t._replace(seconds=factor * t.link_s) if _is_overlapped(t) else t for t in prediction.transfers)


def step_s(prediction: StepPrediction) -> float:
    """Returns the seconds of a step, the links' limit included."""
    return float(prediction.compute_s.sum()) + sum(t.seconds for t in waiting_transfers(prediction))


def is_bound_by_links(prediction: StepPrediction) -> bool:
    """Returns whether a step waits for its links longer than the prediction says."""
    return waiting_transfers(prediction) is not prediction.transfers


def best_step(
    space: ShardingSpace,
    solve: SolveLinear,
    memory_limit_bytes: float,
    stop_gap: float,
    cost: StepCost | None = None,
    is_over: Callable[[], bool] = lambda: False,
    tell: Callable[[float, float], None] = lambda cost, bound: None,
) -> Solution:
    """Returns the choice with the fastest step, or the least cost of a user's, that is found.

    Its cost and bound have preferences for small arguments in them, as the space's problem has.

    Args:
      space: its problem is solved first; unless links are busier than arithmetic, that is the fastest step.
      solve: solves a problem from a start; raises `InfeasibleError` where it finds nothing within the memory limit.
      stop_gap: the relative gap at which the first problem ends.
      cost: a user's objective; None for the seconds of a step.
      is_over: tells whether there is no time for another problem.
      tell: is told the cost of the best step so far and its bound, unless the first problem has them.

    Raises:
      InfeasibleError: as `solve` for the first problem.
      TypeError, ValueError: the user's objective is no scalar, is not finite, or has no gradient.
    """
    first = solve(space.problem, None, stop_gap)
    prediction = space.predict(first.choice)
    if cost is None and not is_bound_by_links(prediction):
        return first
    is_stopped = first.status == "interrupted"
    if cost is None and has_few_pairs(space.step_problem) and not is_stopped:
        return solve(space.step_problem, np.asarray(first.choice, np.int64), STEP_GAP)
    if cost is None:
        problem, objective = split_loads(space.step_problem)
        bound, history = first.lower_bound, first.history
        bounded = Affine(0.0, np.array([1.0, 0.0]))  # seconds as priced count the first load alone
    else:
        objective = user_objective(space, cost)
        seconds = step_s(prediction)  # a second of preference counts as much as one of this step
        unit = abs(_price(objective, space, first.choice)) / seconds if seconds else 0.0
        problem = space.preference_problem
        problem = problem._replace(node_cost=[unit * c for c in problem.node_cost])
        bound, bounded, history = -math.inf, None, ()
    found = minimise(
        problem._replace(memory_limit=memory_limit_bytes),
        objective,
        solve,
        np.asarray(first.choice, np.int64),
        is_over=lambda: is_stopped or is_over(),
        tell=tell,
        stop_gap=STEP_GAP,
        lower_bound=bound,
        bounded=bounded,
        history=history,
    )
    return found._replace(status="interrupted") if is_stopped else found


def objective_of(space: ShardingSpace, cost: StepCost, choice: Sequence[int]) -> float:
    """Returns a user's objective of a choice."""
    return _price(user_objective(space, cost), space, choice)


def user_objective(space: ShardingSpace, cost: StepCost) -> Objective:
    """Returns a user's function of a relaxed step as an objective of the quantities of a space."""

    def of_amounts(amounts: dict[str, Any]) -> jax.Array:
        try:
            return cost(_relaxed_step(amounts, space.axis_names))
        except KeyError as error:
            key, axes = str(error.args[0]), ", ".join(map(repr, space.axis_names))
            raise ValueError(
                f"`objective` reads {key!r}; seconds on links are by the axes of the mesh, {axes}"
                f"{did_you_mean(key, space.axis_names) or '.'}"
            ) from None

    return Objective(of_amounts, space.quantities)


def _price(objective: Objective, space: ShardingSpace, choice: Sequence[int]) -> float:
    priced = PricedObjective(objective, space.problem)
    return priced.price(priced.amounts(np.asarray(choice)))


def seconds_of(amounts: dict[str, jax.Array]) -> jax.Array:
    """Returns the seconds of a step from amounts of `STEP_QUANTITIES`."""
    compute_s, overlapped_s = amounts[COMPUTE], jnp.sum(amounts[OVERLAPPED])
    return compute_s + jnp.sum(amounts[BLOCKING]) + jnp.maximum(jnp.sum(amounts[EXPOSED]), overlapped_s - compute_s)


def _relaxed_step(amounts: dict[str, Any], axis_names: Sequence[str]) -> RelaxedStep:
    def by_axis(name: str) -> dict[str, jax.Array]:
        each = jnp.broadcast_to(amounts[name], len(axis_names))  # a step without operations has one sum of nothing
        return dict(zip(axis_names, each, strict=True))

    blocking_s, overlapped_s, exposed_s = map(by_axis, (BLOCKING, OVERLAPPED, EXPOSED))
    return RelaxedStep(amounts[COMPUTE], blocking_s, overlapped_s, exposed_s, amounts[MEMORY])


def _is_overlapped(transfer: Transfer) -> bool:
    return transfer.seconds < transfer.link_s


def _overlapped(prediction: StepPrediction) -> list[Transfer]:
    return [transfer for transfer in prediction.transfers if _is_overlapped(transfer)]

"""How loss and cost are weighed: by a weight of the cost, or by the least cost under a bound on the loss."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from cost.base import Problem
from diffshard.bilevel_search.base import LossPrediction, Objective, ObjectiveScales
from diffshard.bilevel_search.inputs import as_real
from diffshard.bilevel_search.relaxation import cheapest_at_price, cheapest_within
from search_spaces.base import Choice

_BOUND_SHARES = (1.0, 0.7, 0.4)
"""Shares of the bound for which refinements are proposed. Noise may let the one at the full bound exceed it."""
_BOUND_PER_NOISE = 4
"""The bound as a multiple of a measurement's noise, assumed: a bound is chosen such that training can resolve it."""
_LOSS_PER_NOISE = 1000
"""The loss as a multiple of a measurement's noise: by about this share repeated trainings of small models differ."""
_LEAST_NOISE = 1e-12  # in units of the loss; it must be positive


@dataclass(frozen=True)
class CostWeight:
    """Minimises loss + weight · cost ratio.

    A schedule must give finite numbers from 0 on at every step of the choice: where it gives another, the weight is
    NaN, so that the search refuses the update (`BilevelMetrics.refused`) and stays at that step. Only step 0 can be
    checked beforehand, because it is not known where a search ends.

    Attributes:
      weight: units of loss that the whole cost of the exact choice is worth: a number or an optax schedule of the step.

    Raises:
      ValueError: the number, or the schedule at step 0, is negative or not finite.
    """

    weight: float | Callable[[jax.Array], jax.Array]

    def __post_init__(self):
        if callable(self.weight):
            if not 0 <= (first := float(self.weight(jnp.zeros((), jnp.int32)))) < float("inf"):
                raise ValueError(
                    f"`cost_weight` must be a schedule of finite numbers from 0 on; at step 0 it is {first}."
                )
            return
        weight = as_real(self.weight)
        if weight is None or not 0 <= weight < float("inf"):
            raise ValueError(f"`cost_weight` must be a finite number from 0 on, or a schedule; got {self.weight!r}.")
        object.__setattr__(self, "weight", weight)

    def scales(self, multiplier: jax.Array, increase: jax.Array, step: jax.Array) -> ObjectiveScales:
        """See `Objective`."""
        del multiplier, increase
        cost = jnp.asarray(self.weight(step) if callable(self.weight) else self.weight, jnp.float32)
        return ObjectiveScales(jnp.ones(()), jnp.where((cost >= 0) & jnp.isfinite(cost), cost, jnp.nan))

    def next_multiplier(self, multiplier: jax.Array, increase: jax.Array) -> jax.Array:
        """Returns the multiplier as it is: a weight of the cost needs none."""
        del increase
        return multiplier

    @property
    def limit(self) -> None:
        """None: any increase is allowed at its price."""

    def frozen_at(self, step: jax.Array) -> "CostWeight":
        """Returns the weight that a schedule has at a step."""
        return CostWeight(self._at(step))

    def score(self, increase: float, seconds: float, exact_seconds: float) -> float:
        """Returns increase + weight · cost ratio, with a schedule's weight at step 0."""
        return increase + self._at(jnp.int32(0)) * seconds / exact_seconds

    def noise(self, loss: float) -> float:
        """Returns a share of the loss, or the least number that a loss of 0 is measured to."""
        return max(loss / _LOSS_PER_NOISE, _LEAST_NOISE)

    def choices(self, problem: Problem, prediction: LossPrediction, exact_seconds: float) -> list[Choice]:
        """Returns the choice of least loss and cost; none where the cost has no weight."""
        weight = self._at(jnp.int32(0))
        return [cheapest_at_price(problem, prediction, exact_seconds / weight)] if weight else []

    def _at(self, step: jax.Array) -> float:
        return float(self.scales(jnp.zeros(()), jnp.zeros(()), step).cost)


@dataclass(frozen=True)
class MaxLossIncrease:
    """Minimises the cost ratio c subject to increase <= limit, by an augmented Lagrangian.

    With r = increase / limit - 1 the objective is c + (max(0, μ + ρ r)² - μ²) / 2ρ, whose slope in the increase is
    max(0, μ + ρ r) / limit; after each step μ becomes max(0, μ + η r). Far from the bound r counts as 1, so that the
    multiplier does not run away while the relaxed choice is still uniform.

    Source: Nocedal and Wright, "Numerical Optimization" (2006), section 17.4, one gradient step for each multiplier's.

    Attributes:
      limit: the allowed increase over the exact choice, in units of the loss.
      rate: η.
      penalty: ρ, which damps the oscillation of the relaxed choice and the multiplier.

    Raises:
      ValueError: one of them is not a positive finite number.
    """

    limit: float
    rate: float = 0.02
    penalty: float = 0.5

    def __post_init__(self):
        for name, number, default in (
            ("limit", self.limit, None),
            ("rate", self.rate, MaxLossIncrease.rate),
            ("penalty", self.penalty, MaxLossIncrease.penalty),
        ):
            real = as_real(number)
            if real is not None and 0 < real < float("inf"):
                object.__setattr__(self, name, real)
            elif name == "limit":
                why = "; no lossy strategy fits an increase of 0" if real == 0 else ""
                raise ValueError(
                    f"`max_loss_increase` must be a positive finite number in units of the loss, got {number!r}{why}."
                )
            else:
                raise ValueError(
                    f"`{name}` of `MaxLossIncrease` must be a positive finite number, got {number!r}; "
                    f"leave it out for {default}."
                )

    def scales(self, multiplier: jax.Array, increase: jax.Array, step: jax.Array) -> ObjectiveScales:
        """See `Objective`."""
        del step
        pressure = jnp.maximum(multiplier + self.penalty * self._excess(increase), 0.0)
        return ObjectiveScales(pressure / self.limit, jnp.ones(()))

    def next_multiplier(self, multiplier: jax.Array, increase: jax.Array) -> jax.Array:
        """See `Objective`."""
        return jnp.maximum(multiplier + self.rate * self._excess(increase), 0.0)

    def frozen_at(self, step: jax.Array) -> "MaxLossIncrease":
        """Returns the same: the bound has no schedule."""
        del step
        return self

    def score(self, increase: float, seconds: float, exact_seconds: float) -> tuple[float, float]:
        """Returns (increase beyond the bound, seconds), which are compared in this order."""
        del exact_seconds
        return max(increase - self.limit, 0.0), seconds

    def noise(self, loss: float) -> float:
        """Returns a share of the bound."""
        del loss
        return self.limit / _BOUND_PER_NOISE

    def choices(self, problem: Problem, prediction: LossPrediction, exact_seconds: float) -> list[Choice]:
        """Returns the cheapest choices within the bound and within shares of it."""
        del exact_seconds
        return [cheapest_within(problem, prediction, share * self.limit) for share in _BOUND_SHARES]

    def _excess(self, increase: jax.Array) -> jax.Array:
        return jnp.minimum(increase / self.limit - 1.0, 1.0)


def objective_of(
    max_loss_increase: float | None, cost_weight: float | Callable[[jax.Array], jax.Array] | None
) -> Objective | None:
    """Returns the objective that a user asks for, if any.

    Raises:
      ValueError: both are given, or the one that is given is out of range.
    """
    if max_loss_increase is not None and cost_weight is not None:
        raise ValueError("give `max_loss_increase` or `cost_weight`, not both: a bound finds its own weight.")
    if max_loss_increase is not None:
        return MaxLossIncrease(max_loss_increase)
    return None if cost_weight is None else CostWeight(cost_weight)

"""How loss and cost are weighed: by a weight of the cost, or by the least cost under a bound on the loss."""

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp


class Weights(NamedTuple):
    """What the slopes of the loss (in its own unit) and of the cost ratio are multiplied by; scalars."""

    loss: jax.Array
    cost: jax.Array


class Objective(Protocol):
    """Weighs a loss increase against a cost ratio; the multiplier `[]` is kept in the search's state."""

    def weights(self, multiplier: jax.Array, increase: jax.Array, step: jax.Array) -> Weights:
        """The weights of one step."""
        ...

    def next_multiplier(self, multiplier: jax.Array, increase: jax.Array) -> jax.Array:
        """The multiplier of the next step."""
        ...


@dataclass(frozen=True)
class CostWeight:
    """Minimises loss + weight · cost ratio.

    A schedule is held to finite numbers from 0 on at every step of the choice: where it gives another, its weight is
    NaN, so that the search refuses the update (`BilevelMetrics.refused`) and stays at that step. Only step 0 is known
    beforehand, since where a search ends is not.

    Attributes:
      weight: units of loss that the whole cost of the exact choice is worth: a number or an optax schedule of the step.

    Raises:
      ValueError: the number, or the schedule at step 0, is negative or not finite.
    """

    weight: float | Callable[[jax.Array], jax.Array]

    def __post_init__(self):
        is_number = isinstance(self.weight, Real)
        if not callable(self.weight) and not (is_number and 0 <= self.weight < float("inf")):
            raise ValueError(f"`cost_weight` must be a finite number from 0 on, or a schedule; got {self.weight!r}.")
        if callable(self.weight) and not 0 <= (first := float(self.weight(jnp.zeros((), jnp.int32)))) < float("inf"):
            raise ValueError(f"`cost_weight` must be a schedule of finite numbers from 0 on; at step 0 it is {first}.")

    def weights(self, multiplier: jax.Array, increase: jax.Array, step: jax.Array) -> Weights:
        """As `Objective`."""
        del multiplier, increase
        cost = jnp.asarray(self.weight(step) if callable(self.weight) else self.weight, jnp.float32)
        return Weights(jnp.ones(()), jnp.where((cost >= 0) & jnp.isfinite(cost), cost, jnp.nan))

    def next_multiplier(self, multiplier: jax.Array, increase: jax.Array) -> jax.Array:
        """As `Objective`: there is none."""
        del increase
        return multiplier


@dataclass(frozen=True)
class MaxLossIncrease:
    """Minimises the cost ratio c subject to increase <= most, by an augmented Lagrangian.

    With r = increase / most - 1 the objective is c + (max(0, μ + ρ r)² - μ²) / 2ρ, whose slope in the increase is
    max(0, μ + ρ r) / most; after each step μ becomes max(0, μ + η r). Far from the bound r counts as 1, so that the
    multiplier does not run away while the rows are still uniform.

    Source: Nocedal and Wright, "Numerical Optimization" (2006), section 17.4, one gradient step for each multiplier's.

    Attributes:
      most: the allowed increase over the exact choice, in units of the loss.
      rate: η.
      penalty: ρ, which damps the oscillation of rows and multiplier.

    Raises:
      ValueError: one of them is not a positive finite number.
    """

    most: float
    rate: float = 0.02
    penalty: float = 0.5

    def __post_init__(self):
        if not _is_positive(self.most):
            raise ValueError(
                f"`max_loss_increase` must be a positive finite number in units of the loss, got {self.most!r}; "
                f"nothing lossy fits an increase of 0."
            )
        for name in ("rate", "penalty"):
            if not _is_positive(getattr(self, name)):
                raise ValueError(
                    f"`{name}` of `MaxLossIncrease` must be a positive finite number, got {getattr(self, name)!r}; "
                    f"leave it out for {getattr(MaxLossIncrease, name)}."
                )

    def weights(self, multiplier: jax.Array, increase: jax.Array, step: jax.Array) -> Weights:
        """As `Objective`."""
        del step
        pressure = jnp.maximum(multiplier + self.penalty * self._excess(increase), 0.0)
        return Weights(pressure / self.most, jnp.ones(()))

    def next_multiplier(self, multiplier: jax.Array, increase: jax.Array) -> jax.Array:
        """As `Objective`."""
        return jnp.maximum(multiplier + self.rate * self._excess(increase), 0.0)

    def _excess(self, increase: jax.Array) -> jax.Array:
        return jnp.minimum(increase / self.most - 1.0, 1.0)


def _is_positive(number: object) -> bool:
    return isinstance(number, Real) and 0 < float(number) < float("inf")

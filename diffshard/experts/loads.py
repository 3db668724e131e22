"""Loads of experts from the routing of a training, which feed their assignment to workers again."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_LEAST_SHARE = 0.01
"""Of the mean load, for experts that hardly any token chooses: each expert must have some work. Chosen by hand."""


class ExpertLoads(NamedTuple):
    """An exponential average of how many tokens choose each expert; a part of a training's state.

    >>> loads = ExpertLoads.init(2).update(jnp.array([30, 10]), decay=0.5).update(jnp.array([10, 10]), decay=0.5)
    >>> loads.work().round(3)
    array([1.25, 0.75])

    Attributes:
      average: of tokens, `[X]`, not yet divided by `weight`.
      weight: of all updates together, less than 1.
    """

    average: jax.Array
    weight: jax.Array

    @classmethod
    def init(cls, num_experts: int) -> "ExpertLoads":
        """Returns loads before the first step."""
        return cls(jnp.zeros(num_experts), jnp.zeros(()))

    def update(self, num_chosen: jax.Array, *, decay: float = 0.9) -> "ExpertLoads":
        """Returns the loads after a step; runs inside `jax.jit` as well.

        Args:
          num_chosen: tokens that chose each expert, `[X]`, as `RoutedTokens` has them.
          decay: how much earlier steps count, from 0 to less than 1.

        Raises:
          ValueError: the shape is another, or `decay` breaks its rule.
        """
        if jnp.shape(num_chosen) != self.average.shape:
            raise ValueError(f"`num_chosen` must be {list(self.average.shape)}, got {list(jnp.shape(num_chosen))}.")
        if not 0 <= decay < 1:
            raise ValueError(f"`decay` must be from 0 to less than 1, not {decay!r}.")
        return ExpertLoads(
            decay * self.average + (1 - decay) * num_chosen, decay * self.weight + (1 - decay)
        )  # fmt: skip

    def work(self) -> np.ndarray:
        """Returns the load of each expert relative to the mean one, `[X]`, for `assign_experts`; all are positive.

        Before the first step all are 1.
        """
        average = np.asarray(self.average, float)
        if not average.sum() > 0:
            return np.ones(len(average))
        return np.maximum(average / average.mean(), _LEAST_SHARE)

"""Spaces that each break one rule, by which the conformance tests show that they see it."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from search_spaces.numbered import NumberedSpace
from tests.diffshard.bilevel_search.perturbed import Perturbed


class ForbidsEverything(Perturbed):
    """A space of which no choice is feasible."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments, load=[np.full((n, 1), np.inf) for n in (3, 2)])


class PredictsNothing(Perturbed):
    """A space that predicts no increase for any strategy."""

    def loss_increases(self, *arguments: Any, **options: Any) -> Any:
        """Returns zeros."""
        return [0.0 * row for row in super().loss_increases(*arguments, **options)]


class PredictsForTheExactChoice(Perturbed):
    """A space that predicts an increase for exact strategies, too."""

    def loss_increases(self, *arguments: Any, **options: Any) -> Any:
        """Returns the increases plus one."""
        return [row + 1.0 for row in super().loss_increases(*arguments, **options)]


class PredictsInReverse(Perturbed):
    """A space that predicts the smallest increase for the strategy with the largest one."""

    def loss_increases(self, *arguments: Any, **options: Any) -> Any:
        """Returns the increases of lossy strategies in reverse."""
        rows = super().loss_increases(*arguments, **options)
        return [jnp.concatenate([row[:1], row[1:][::-1]]) for row in rows]


class DecodesTheExactChoice(Perturbed):
    """A space that runs the exact choice, whatever is chosen."""

    def decode(self, choice: Any) -> Any:
        """Decodes the exact choice."""
        return super().decode([0 for _ in choice])


class LosesResiduals(Perturbed):
    """A space whose steps return residuals of another shape than they take."""

    def decode(self, choice: Any) -> Any:
        """Decodes a choice, and exchanges the residuals of its steps."""
        run = super().decode(choice)
        return lambda *arguments: run(*arguments)._replace(residuals=(jnp.zeros(2),))


class HasOneMore(NumberedSpace):
    """A space without a loss that has one member of a lossy space."""

    loss = Perturbed.loss

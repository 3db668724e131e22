"""The best mixture of known choices for a convex objective, and the tangent that decides there.

With the choices x_1, ..., x_K, their linear costs l_k and amounts a_k, and tangents c_j + <g_j, a> of the objective F,
the linear program

    min_(w, η) Σ_k w_k l_k + η    subject to    η ≥ c_j + <g_j, Σ_k w_k a_k> for all j,  Σ_k w_k = 1,  w ≥ 0

gives weights at which another tangent is taken, until F itself is no higher than η there (Kelley's cutting planes). Its
multipliers λ_j ≥ 0 of the tangents sum to one. So the mean tangent Σ_j λ_j (c_j + <g_j, a>) is nowhere above F, and at
the optimum no known choice is cheaper under it than the mixture: the next choice to look for is the cheapest under
this tangent, and its bound is a bound on F. Where F has a kink, one gradient alone would say neither.

Source: J. E. Kelley, "The Cutting-Plane Method for Solving Convex Programs" (1960); G. B. Dantzig and P. Wolfe,
"Decomposition Principle for Linear Programs" (1960).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from scipy.optimize import linprog

from diffshard.solving.objectives.objective import Affine, Tangent

_TOLERANCE = 1e-6
"""The relative distance of the tangents from the objective at which a mixture counts as optimal."""
_MOST_TANGENTS = 60
"""Tangents that are added for one mixture at most; a few suffice for maxima of few sums."""


class Mixture(NamedTuple):
    """Weights of known choices, and the mean tangent there.

    Attributes:
      weights: `[K]`.
      cost: the linear cost and the objective of the mixture.
      tangent: the mean tangent, an affine function that is nowhere above the objective.
    """

    weights: np.ndarray
    cost: float
    tangent: Affine


@dataclass
class Tangents:
    """Tangents of a convex function, shared by all mixtures; mutable.

    Attributes:
      tangent: gives the one at amounts `[N]`.
      known: all so far.
      is_convex: False once a price was found below a tangent, which no convex function has.
    """

    tangent: Callable[[np.ndarray], Tangent]
    known: list[Affine] = field(default_factory=list)
    is_convex: bool = True

    def add(self, amounts: np.ndarray) -> Affine:
        """Adds the tangent at amounts `[N]`."""
        self.known.append(self.tangent(amounts).affine)
        return self.known[-1]

    def check(self, amounts: np.ndarray, price: float) -> None:
        """Drops tangents that are above a price of the function: it is not convex then."""
        slack = _TOLERANCE * (1 + abs(price))
        kept = [t for t in self.known if t.at(amounts) <= price + max(slack, 1e-6 * abs(price))]
        self.is_convex &= len(kept) == len(self.known)
        self.known = kept


def best_mixture(linear_costs: np.ndarray, amounts: np.ndarray, tangents: Tangents) -> Mixture:
    """Returns the mixture of choices that is the cheapest, to a relative tolerance.

    Args:
      linear_costs: `[K]` of the choices.
      amounts: `[K, N]` of the choices.
      tangents: at least one; others are added.
    """
    weights, multipliers, level = _solve(linear_costs, amounts, tangents.known)
    here = tangents.tangent(weights @ amounts)
    for _ in range(_MOST_TANGENTS):
        if here.value <= level + _TOLERANCE * abs(here.value):
            break
        tangents.known.append(here.affine)
        weights, multipliers, level = _solve(linear_costs, amounts, tangents.known)
        here = tangents.tangent(weights @ amounts)
    constant = float(multipliers @ [tangent.constant for tangent in tangents.known])
    gradient = multipliers @ np.array([tangent.gradient for tangent in tangents.known])
    return Mixture(weights, float(weights @ linear_costs) + here.value, Affine(constant, gradient))


def _solve(
    linear_costs: np.ndarray, amounts: np.ndarray, tangents: list[Affine]
) -> tuple[np.ndarray, np.ndarray, float]:
    """Returns the weights `[K]`, the multipliers of the tangents `[J]`, and the level η of the linear program."""
    number = len(linear_costs)
    rows = np.array([t.at(amounts) for t in tangents])  # each tangent at each choice
    unit = max(np.abs(rows).max(), np.abs(linear_costs).max()) or 1.0
    result = linprog(
        np.append(linear_costs / unit, 1.0),
        A_ub=np.hstack([rows / unit, -np.ones((len(rows), 1))]),
        b_ub=np.zeros(len(rows)),
        A_eq=np.append(np.ones(number), 0.0)[None],
        b_eq=[1.0],
        bounds=[(0, None)] * number + [(None, None)],
        method="highs",
    )
    if result.status != 0:
        raise RuntimeError(f"The linear program of a mixture was not solved: {result.message}")
    weights = np.maximum(result.x[:-1], 0.0)
    multipliers = np.maximum(-result.ineqlin.marginals, 0.0)
    return weights / weights.sum(), multipliers / multipliers.sum(), float(result.x[-1] * unit)

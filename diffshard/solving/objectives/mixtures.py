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

Whole choices are improved by descent on the objective itself.
Tangents see an objective's slope, not its kinks: under the tangent of the busiest of two devices everything belongs on
the other one. Between whole choices single changes count, which this finds by their exact prices, many at a time.
Changes of nodes that no edge joins add up, so that pairs of the most promising changes are priced as sums.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from scipy.optimize import linprog

from cost.base import Problem, edge_ends
from cost.evaluation import Evaluator
from diffshard.solving.objectives.objective import Affine, PricedObjective, Tangent

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


_MOST_NODES = 256
"""Nodes that may change; to price the changes of so many takes some hundredths of a second."""
_MOST_AMOUNTS = 1_000_000
"""Amounts that changes of single nodes have together, which limits the nodes as well: 8 MB."""
_MOST_PAIRED = 48
"""Changes of which all pairs are priced, those that are best by themselves."""
_MOST_CHANGES = 100
"""Changes that one descent makes at most."""
_LEAST_GAIN = 1e-9
"""The relative gain for which a node changes; below it prices differ by rounding."""


class _Moves(NamedTuple):
    """Changes of single nodes.

    Attributes:
      changes: `[K, 2]`, the node and the strategy that it takes.
      costs: `[K]`, what each adds to the linear cost.
      amounts: `[K, N]`, what each adds to the amounts.
    """

    changes: np.ndarray
    costs: np.ndarray
    amounts: np.ndarray


class Descent:
    """Descends from choices of one problem.

    Args:
      problem: the linear part of the cost, and the memory limit.
      priced: the objective.
      evaluate: prices the linear part.
    """

    def __init__(self, problem: Problem, priced: PricedObjective, evaluate: Evaluator):
        self._problem, self._priced, self._evaluate = problem, priced, evaluate
        self._edges = edge_ends(problem)
        self._edges_of: dict[int, list[int]] = defaultdict(list)
        for e, (u, v) in enumerate(self._edges.tolist()):
            self._edges_of[u].append(e)
            self._edges_of[v].append(e)
        ends = {v: {u for e in edges for u in self._edges[e].tolist()} - {v} for v, edges in self._edges_of.items()}
        self._neighbours = [ends.get(v, set()) for v in range(len(problem.node_cost))]

    def __call__(self, choice: np.ndarray, nodes: np.ndarray) -> np.ndarray:
        """Returns a choice that is no more expensive, in which some of the nodes take other strategies.

        Args:
          choice: `[V]`, feasible.
          nodes: which may change, the most promising first.
        """
        sizes = np.cumsum([len(self._problem.node_cost[v]) for v in nodes.tolist()])
        nodes = nodes[: min(_MOST_NODES, np.searchsorted(sizes, _MOST_AMOUNTS // max(self._priced.size, 1)) + 1)]
        moves: dict[tuple, _Moves] = {}
        for _ in range(_MOST_CHANGES):
            better = self._changed(choice, nodes, moves)
            if better is None:
                break
            choice = better
        return choice

    def _changed(self, choice: np.ndarray, nodes: np.ndarray, known: dict[tuple, _Moves]) -> np.ndarray | None:
        """Returns the best choice with one or two nodes changed, None if none is cheaper; adds to the known moves."""
        if not len(nodes):
            return None
        keys = [(v, choice[v], tuple(choice[list(self._neighbours[v])])) for v in nodes.tolist()]
        for key in keys:
            if key not in known:
                known[key] = self._moves(choice, key[0])
        moves, costs, amounts = (np.concatenate(parts) for parts in zip(*(known[key] for key in keys), strict=True))
        if not len(moves):
            return None
        here = self._priced.amounts(choice)
        now = self._priced.price(here)
        singles = costs + self._priced.prices(here + amounts) - now
        best = np.argsort(singles)[:_MOST_PAIRED]
        one, two = np.triu_indices(len(best), 1)
        ends = zip(moves[best[one], 0].tolist(), moves[best[two], 0].tolist(), strict=True)
        apart = np.array([u != v and v not in self._neighbours[u] for u, v in ends], bool)
        one, two = best[one[apart]], best[two[apart]]
        pairs = costs[one] + costs[two] + self._priced.prices(here + amounts[one] + amounts[two]) - now
        candidates: list[tuple[float, tuple[int, ...]]] = [(gain, (k,)) for k, gain in enumerate(singles.tolist())]
        candidates += [(gain, (i, j)) for gain, i, j in zip(pairs.tolist(), one.tolist(), two.tolist(), strict=True)]
        least_gain = _LEAST_GAIN * (abs(now) + abs(float(self._evaluate(choice).cost)))
        for gain, changed in sorted(candidates):
            if gain >= -least_gain:
                return None
            better = choice.copy()
            for k in changed:
                better[moves[k, 0]] = moves[k, 1]
            if self._evaluate(better).feasible:
                return better
        return None

    def _moves(self, choice: np.ndarray, v: int) -> _Moves:
        """Returns the moves of a node, which depend on nothing but its strategy and those of its neighbours."""
        own, edges = choice[v], self._edges_of[v]
        added = np.asarray(self._problem.node_cost[v], float) - self._problem.node_cost[v][own]
        for e in edges:
            u, w = self._edges[e].tolist()
            matrix = self._problem.edge_cost[e]
            row = np.asarray(matrix[:, choice[w]] if u == v else matrix[choice[u]], float)
            added = added + row - row[own]
        quantities = self._priced.objective.quantities.items()
        amounts = {name: quantity.changes(self._problem, choice, v, edges) for name, quantity in quantities}
        others = np.flatnonzero((np.arange(len(added)) != own) & (added < np.inf))
        moves = np.stack([np.full_like(others, v), others], axis=1)
        return _Moves(moves, added[others], self._priced.flat(amounts)[others])

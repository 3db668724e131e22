"""Descent on the objective itself: single nodes and pairs of nodes take other strategies while its exact price falls.

Tangents see an objective's slope, not its kinks: under the tangent of the busiest of two devices everything belongs on
the other one. Between whole choices single changes count, which this finds by their exact prices, many at a time.
Changes of nodes that no edge joins add up, so that pairs of the most promising changes are priced as sums.
"""

from collections import defaultdict

import numpy as np

from cost.base import Problem
from cost.evaluation import Evaluator
from diffshard.solving.objectives.objective import PricedObjective

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


class Descent:
    """Descends from choices of one problem.

    Args:
      problem: the linear part of the cost, and the memory limit.
      priced: the objective.
      evaluate: prices the linear part.
    """

    def __init__(self, problem: Problem, priced: PricedObjective, evaluate: Evaluator):
        self._problem, self._priced, self._evaluate = problem, priced, evaluate
        self._edges = np.asarray(problem.edge_nodes, np.int64).reshape(-1, 2)
        self._edges_of: dict[int, list[int]] = defaultdict(list)
        for e, (u, v) in enumerate(self._edges.tolist()):
            self._edges_of[u].append(e)
            self._edges_of[v].append(e)

    def __call__(self, choice: np.ndarray, nodes: np.ndarray) -> np.ndarray:
        """Returns a choice that is no more expensive, in which some of the nodes take other strategies.

        Args:
          choice: `[V]`, feasible.
          nodes: which may change, the most promising first.
        """
        sizes = np.cumsum([len(self._problem.node_cost[v]) for v in nodes.tolist()])
        nodes = nodes[: min(_MOST_NODES, np.searchsorted(sizes, _MOST_AMOUNTS // max(self._priced.size, 1)) + 1)]
        for _ in range(_MOST_CHANGES):
            better = self._changed(choice, nodes)
            if better is None:
                break
            choice = better
        return choice

    def _changed(self, choice: np.ndarray, nodes: np.ndarray) -> np.ndarray | None:
        """Returns the best choice with one or two nodes changed; None where none is cheaper."""
        moves, costs, amounts = self._moves(choice, nodes)
        if not moves:
            return None
        here = self._priced.amounts(choice)
        now = self._priced.price(here)
        singles = costs + self._priced.prices(here + amounts) - now
        best = np.argsort(singles)[:_MOST_PAIRED]
        one, two = np.triu_indices(len(best), 1)
        apart = np.array([self._are_apart(moves[best[i]][0], moves[best[j]][0]) for i, j in zip(one, two, strict=True)])
        one, two = (best[i[apart.astype(bool)]] for i in (one, two))
        pairs = costs[one] + costs[two] + self._priced.prices(here + amounts[one] + amounts[two]) - now
        candidates: list[tuple[float, tuple[int, ...]]] = [(gain, (k,)) for k, gain in enumerate(singles.tolist())]
        candidates += [(gain, (i, j)) for gain, i, j in zip(pairs.tolist(), one.tolist(), two.tolist(), strict=True)]
        least_gain = _LEAST_GAIN * (abs(now) + abs(float(self._evaluate(choice).cost)))
        for gain, changed in sorted(candidates):
            if gain >= -least_gain:
                return None
            better = choice.copy()
            for k in changed:
                better[moves[k][0]] = moves[k][1]
            if self._evaluate(better).feasible:
                return better
        return None

    def _moves(self, choice: np.ndarray, nodes: np.ndarray) -> tuple[list[tuple[int, int]], np.ndarray, np.ndarray]:
        """Returns changes (node, strategy), what each adds to the linear cost, and to the amounts `[changes, N]`."""
        moves, costs, amounts = [], [], []
        quantities = self._priced.objective.quantities
        for v in nodes.tolist():
            own = choice[v]
            added = np.asarray(self._problem.node_cost[v], float) - self._problem.node_cost[v][own]
            edges = self._edges_of[v]
            for e in edges:
                u, w = self._edges[e].tolist()
                matrix = self._problem.edge_cost[e]
                row = np.asarray(matrix[:, choice[w]] if u == v else matrix[choice[u]], float)
                added = added + row - row[own]
            parts = {name: quantity.changes(self._problem, choice, v, edges) for name, quantity in quantities.items()}
            others = [s for s in range(len(added)) if s != own and added[s] < np.inf]
            moves += [(v, s) for s in others]
            costs += added[others].tolist()
            amounts += [self._priced.flat({name: part[s] for name, part in parts.items()}) for s in others]
        return moves, np.array(costs), np.array(amounts)

    def _are_apart(self, u: int, v: int) -> bool:
        """Tells whether two nodes are different ones, and no edge joins them."""
        return u != v and not any(v in self._edges[e] for e in self._edges_of[u])

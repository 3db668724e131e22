"""Quantities of a choice that an objective combines; they are linear in the choice, and so are mixtures of choices.

A `Problem` prices a choice by a sum. An objective that is not a sum, such as the slower of two resources or a price of
energy and time, is a function of a few such sums. Each of them is a *quantity*: numbers for the strategies of nodes and
for the pairs of strategies on edges, summed over groups of nodes and edges. If x_1, x_2, ... are choices with the
amounts a_1, a_2, ..., a mixture of them with the weights w has the amounts Σ w_k a_k. And the gradient of an objective
with respect to the amounts makes each quantity a part of a `Problem`'s costs again: that of the objective's tangent,
which every solver takes.

Letters for sizes: V nodes, S_v strategies of node v, E edges, G groups, T times.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from cost.base import Problem, edge_ends
from cost.memory import memory_profile, numbered_times


class Quantity(NamedTuple):
    """A linear function of choices, with one amount or an array of amounts.

    Attributes:
      node: V arrays `[S_v, ...]` of what the strategies of each node add; `()` where nodes add nothing.
      edge: E arrays `[S_u, S_v, ...]` of what pairs of strategies add; `()` where edges add nothing. Further dimensions
        are the same everywhere, such as the devices among which amounts are counted apart. Equal arrays may be one.
      node_group: `[V]` the group that each node adds to; None where everything is summed to one amount.
      edge_group: `[E]` the same of edges.
      num_groups: G.
    """

    node: Sequence[np.ndarray] = ()
    edge: Sequence[np.ndarray] = ()
    node_group: np.ndarray | None = None
    edge_group: np.ndarray | None = None
    num_groups: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the amounts: `[G, ...]`, without the groups where there are none."""
        arrays, rank = (self.node, 1) if len(self.node) else (self.edge, 2)
        rest = np.shape(arrays[0])[rank:] if len(arrays) else ()
        return rest if self._is_total else (self.num_groups, *rest)

    @property
    def _is_total(self) -> bool:
        return self.node_group is None and self.edge_group is None

    def amounts(self, problem: Problem, choice: np.ndarray) -> np.ndarray:
        """Returns the amounts of a choice `[V]`, of `shape`.

        Args:
          problem: has the ends of edges.
          choice: a strategy index for each node.
        """
        rest = self.shape if self._is_total else self.shape[1:]
        total = np.zeros((self.num_groups, *rest))
        if len(self.node):
            rows = np.array([array[s] for array, s in zip(self.node, choice.tolist(), strict=True)])
            np.add.at(total, self._groups(self.node_group, len(rows)), rows)
        if len(self.edge):
            ends = choice[edge_ends(problem)].tolist()
            rows = np.array([array[s, t] for array, (s, t) in zip(self.edge, ends, strict=True)])
            np.add.at(total, self._groups(self.edge_group, len(rows)), rows)
        return total[0] if self._is_total else total

    def changes(self, problem: Problem, choice: np.ndarray, node: int, edges: Sequence[int]) -> np.ndarray:
        """Returns the amounts that each strategy of a node would add to a choice, `[S_v, ...]` with `shape` behind.

        Args:
          problem: has the ends of edges.
          choice: `[V]` a strategy index for each node.
          node: v.
          edges: all that it is an end of.
        """
        own, (size, rest) = choice[node], (len(problem.node_cost[node]), self.shape[not self._is_total :])
        added = np.zeros((size, self.num_groups, *rest))
        if len(self.node):
            group = 0 if self.node_group is None else self.node_group[node]
            added[:, group] += self.node[node] - self.node[node][own]
        for e in edges if len(self.edge) else ():
            u, v = problem.edge_nodes[e]
            rows = self.edge[e][:, choice[v]] if u == node else self.edge[e][choice[u]]
            added[:, 0 if self.edge_group is None else self.edge_group[e]] += rows - rows[own]
        return added[:, 0] if self._is_total else added

    def add_costs(self, of_nodes: "WeightedSums", of_edges: "WeightedSums", weights: np.ndarray) -> None:
        """Adds the weighted amounts of nodes to their costs, those of edges to their matrices; `weights` as `shape`."""
        by_group = weights[None] if self._is_total else weights
        _add(of_nodes, self.node, self._groups(self.node_group, len(self.node)), by_group, 1)
        _add(of_edges, self.edge, self._groups(self.edge_group, len(self.edge)), by_group, 2)

    @staticmethod
    def _groups(groups: np.ndarray | None, number: int) -> np.ndarray:
        return np.zeros(number, np.int64) if groups is None else np.asarray(groups)


class LiveMemory(NamedTuple):
    """The memory in use over time `[T]`, a quantity like others: a problem's usages, summed over their intervals.

    Attributes:
      problem: has the usages, the same on all devices.
    """

    problem: Problem

    @property
    def shape(self) -> tuple[int, ...]:
        """`[T]`, the times at which the memory in use changes."""
        return (len(numbered_times(self.problem.usage_interval)[0]),)

    def amounts(self, problem: Problem, choice: np.ndarray) -> np.ndarray:
        """Returns the bytes in use at each time, `[T]`."""
        usages = zip(problem.usage, choice[np.asarray(problem.usage_node, int)].tolist(), strict=True)
        used = np.array([float(np.ravel(usage[s])[0]) for usage, s in usages]).reshape(-1, 1)
        times, interval = numbered_times(problem.usage_interval)
        return memory_profile(interval, used, len(times))[:, 0]

    def changes(self, problem: Problem, choice: np.ndarray, node: int, edges: Sequence[int]) -> np.ndarray:
        """Returns the bytes that each strategy of a node would add to a choice, `[S_v, T]`."""
        times, interval = numbered_times(problem.usage_interval)
        added = np.zeros((len(problem.node_cost[node]), len(times)))
        for k in np.flatnonzero(np.asarray(problem.usage_node) == node).tolist():
            usage = np.reshape(problem.usage[k], (len(added), -1))[:, :1].astype(float)
            added[:, interval[k, 0] : interval[k, 1]] += usage - usage[choice[node]]
        return added

    def add_costs(self, of_nodes: "WeightedSums", of_edges: "WeightedSums", weights: np.ndarray) -> None:
        """Adds the weighted bytes of each node to its costs, and nothing to edges; `weights` are `[T]`."""
        del of_edges
        _, interval = numbered_times(self.problem.usage_interval)
        before = np.concatenate([[0.0], np.cumsum(weights)])
        lived = before[interval[:, 1]] - before[interval[:, 0]]
        for node, usage, weight in zip(self.problem.usage_node, self.problem.usage, lived.tolist(), strict=True):
            if weight:
                of_nodes.add(int(node), np.reshape(usage, (len(usage), -1))[:, 0], weight)


Quantities = Mapping[str, Quantity | LiveMemory]
"""Quantities by the names under which an objective reads their amounts."""


class WeightedSums:
    """Costs to which weighted arrays are added; places that add up the same arrays with the same weights share one sum.

    Equal layers have the same arrays, and solvers treat places that share an array together.

    Args:
      first: the costs to begin with.
    """

    def __init__(self, first: Sequence[np.ndarray]):
        self._terms: list[list[tuple[np.ndarray, float]]] = [[(array, 1.0)] for array in first]

    def add(self, place: int, array: np.ndarray, weight: float) -> None:
        """Adds an array times a weight at a place."""
        self._terms[place].append((array, weight))

    def arrays(self) -> list[np.ndarray]:
        """Returns the sums."""
        sums: dict[tuple[tuple[int, float], ...], np.ndarray] = {}
        result = []
        for terms in self._terms:
            key = tuple((id(array), weight) for array, weight in terms)
            if key not in sums:
                (first, _), *others = terms
                sums[key] = sum((weight * np.asarray(array, float) for array, weight in others), start=first)
            result.append(sums[key])
        return result


def amounts_of(quantities: Quantities, problem: Problem, choice: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
    """Returns the amounts of a choice, by the names of the quantities."""
    choice = np.asarray(choice)
    return {name: quantity.amounts(problem, choice) for name, quantity in quantities.items()}


def with_weights(problem: Problem, quantities: Quantities, weights: Mapping[str, np.ndarray]) -> Problem:
    """Returns the problem whose cost also has the weighted amounts of quantities.

    Args:
      problem: the linear part of the cost.
      quantities: what is added.
      weights: for each quantity an array of its shape, such as the gradient of an objective.
    """
    node_cost, edge_cost = WeightedSums(problem.node_cost), WeightedSums(problem.edge_cost)
    for name, quantity in quantities.items():
        if np.any(weights[name]):
            quantity.add_costs(node_cost, edge_cost, np.asarray(weights[name], float))
    return problem._replace(node_cost=node_cost.arrays(), edge_cost=edge_cost.arrays())


def _add(costs: WeightedSums, arrays: Sequence[np.ndarray], group: np.ndarray, weights: np.ndarray, rank: int) -> None:
    """Adds arrays at their places, each times the weights of its group."""
    if not len(arrays):
        return
    weights = weights.reshape(len(weights), -1)
    parts: dict[tuple[int, int], np.ndarray] = {}  # one array for each column, whichever weights it has
    for place, (array, g) in enumerate(zip(arrays, group.tolist(), strict=True)):
        for column in np.flatnonzero(weights[g]).tolist():
            key = id(array), column
            if key not in parts:
                parts[key] = np.reshape(array, (*np.shape(array)[:rank], -1))[..., column]
            costs.add(place, parts[key], float(weights[g, column]))

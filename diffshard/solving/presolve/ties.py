"""Tie merging: forbidden entries say which strategies cannot be chosen, and which nodes determine each other.

A node that a neighbour determines (each of the neighbour's strategies allows exactly one of its own) is merged into
that neighbour. On the contest's instances this removes every forbidden entry and five nodes of six.
"""

from collections import deque

import numpy as np

from cost.base import Problem, distinct_arrays, is_forbidden, num_strategies
from diffshard.base import InfeasibleError
from diffshard.solving.presolve.reduction import Reduction


def merge_ties(problem: Problem) -> Reduction:
    """Drops strategies that forbidden entries rule out and merges determined nodes into what determines them.

    Raises:
      InfeasibleError: some node has no strategy left.
    """
    ties = _Ties(problem)
    ties.propagate()
    return ties.reduction()


class _Ties:
    """Union-find over nodes; the maps from a root's strategies to a member's are composed on path compression."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self.edges = np.asarray(problem.edge_nodes).reshape(-1, 2).tolist()
        self.parent = list(range(len(problem.node_cost)))
        self.map = [np.arange(size) for size in num_strategies(problem).tolist()]
        self.alive = [~is_forbidden(cost) for cost in problem.node_cost]
        matrices, matrix_of = distinct_arrays(problem.edge_cost)
        allowed = [~is_forbidden(matrix) for matrix in matrices]
        restricts = np.array([not mask.all() for mask in allowed], bool)
        self.allowed = {e: allowed[matrix_of[e]] for e in np.flatnonzero(restricts[matrix_of]).tolist()}
        self.restricting: list[list[int]] = [[] for _ in problem.node_cost]
        for e in self.allowed:
            for v in self.edges[e]:
                self.restricting[v].append(e)

    def find(self, v: int) -> tuple[int, np.ndarray]:
        """The root of v and, for each strategy of the root, that of v."""
        path = []
        while self.parent[v] != v:
            path.append(v)
            v = self.parent[v]
        for node in reversed(path):  # from the root down, so that each parent's map already starts at the root
            if self.parent[node] != v:
                self.map[node] = self.map[node][self.map[self.parent[node]]]
                self.parent[node] = v
        return v, (self.map[path[0]] if path else self.map[v])

    def propagate(self) -> None:
        self.queue = deque(self.allowed)
        self.queued = set(self.allowed)
        for v, alive in enumerate(self.alive):
            if not alive.any():
                self._fail(v)
        while self.queue:
            e = self.queue.popleft()
            self.queued.discard(e)
            self._restrict(e)

    def _restrict(self, e: int) -> None:
        (u, map_u), (v, map_v) = (self.find(node) for node in self.edges[e])
        mask = self.allowed[e][np.ix_(map_u, map_v)]
        if u == v:
            self._drop(u, np.diagonal(mask))
            return
        mask = mask & self.alive[u][:, None] & self.alive[v][None, :]
        self._drop(u, np.asarray(mask.any(axis=1)))
        self._drop(v, np.asarray(mask.any(axis=0)))
        if (mask.sum(axis=1)[self.alive[u]] == 1).all():
            self._merge(v, u, mask.argmax(axis=1))
        elif (mask.sum(axis=0)[self.alive[v]] == 1).all():
            self._merge(u, v, mask.argmax(axis=0))

    def _drop(self, v: int, keep: np.ndarray) -> None:
        alive = self.alive[v] & keep
        if (alive == self.alive[v]).all():
            return
        self.alive[v] = alive
        if not alive.any():
            self._fail(v)
        self._requeue(v)

    def _merge(self, child: int, root: int, partner: np.ndarray) -> None:
        self.parent[child], self.map[child] = root, partner
        self._requeue(child)
        self.restricting[root] += self.restricting[child]
        self.restricting[child] = []

    def _requeue(self, v: int) -> None:
        for e in self.restricting[v]:
            if e not in self.queued:
                self.queued.add(e)
                self.queue.append(e)

    def _fail(self, v: int) -> None:
        raise InfeasibleError(
            f"`problem` has no allowed choice: every strategy of node {v}, or of a node tied to it, is forbidden "
            f"by its own cost or by the transfer matrices of its edges."
        )

    def reduction(self) -> Reduction:
        problem, roots = self.problem, [self.find(v) for v in range(len(self.parent))]
        kept = [v for v, (root, _) in enumerate(roots) if root == v]
        number = {root: i for i, root in enumerate(kept)}
        live = [np.flatnonzero(self.alive[root]) for root in kept]
        # From each node's root to the root's number, and from the root's live strategies to the node's own.
        root_of = np.array([number[root] for root, _ in roots], np.int64)
        maps = [to_own[live[number[root]]] for root, to_own in roots]
        node_cost = [np.zeros(len(strategies)) for strategies in live]
        for v, cost in enumerate(problem.node_cost):
            node_cost[root_of[v]] += np.asarray(cost, float)[maps[v]]
        edge_nodes, edge_cost = self._joined_edges(root_of, maps, node_cost)
        reduced = problem._replace(
            node_cost=node_cost,
            edge_nodes=edge_nodes,
            edge_cost=edge_cost,
            usage_node=root_of[np.asarray(problem.usage_node, np.int64)],
            usage=[np.asarray(u)[maps[v]] for u, v in zip(problem.usage, problem.usage_node, strict=True)],
            load=_joined_loads(problem, root_of, maps, len(kept)),
        )
        to_own = np.concatenate(maps)
        start = np.cumsum([len(own) for own in maps]) - [len(own) for own in maps]
        return Reduction(reduced, 0.0, lambda choice: to_own[start + choice[root_of]])

    def _joined_edges(
        self, root_of: np.ndarray, maps: list[np.ndarray], node_cost: list[np.ndarray]
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """Matrices are moved only here, summed once for each pair of roots; equal ones stay one array."""
        taken: dict[tuple, np.ndarray] = {}
        pairs: dict[tuple[int, int], np.ndarray] = {}
        for (u, v), cost in zip(self.edges, self.problem.edge_cost, strict=True):
            a, b = int(root_of[u]), int(root_of[v])
            if a == b:
                node_cost[a] += _finite_or_inf(cost[maps[u], maps[v]])
                continue
            if a > b:
                a, b, u, v, cost = b, a, v, u, cost.T
            form = (cost.ctypes.data, cost.strides, maps[u].tobytes(), maps[v].tobytes())
            if form not in taken:
                taken[form] = _finite_or_inf(cost[np.ix_(maps[u], maps[v])])
            pairs[a, b] = pairs[a, b] + taken[form] if (a, b) in pairs else taken[form]
        return np.array(list(pairs), np.int64).reshape(-1, 2), list(pairs.values())


def _finite_or_inf(cost: np.ndarray) -> np.ndarray:
    return np.where(is_forbidden(cost), np.inf, np.asarray(cost, float))


def _joined_loads(problem: Problem, root_of: np.ndarray, maps: list[np.ndarray], count: int) -> list[np.ndarray]:
    if not len(problem.load):
        return []
    joined: list = [0.0] * count
    for v, load in enumerate(problem.load):
        joined[root_of[v]] = joined[root_of[v]] + np.asarray(load, float)[maps[v]]
    return joined

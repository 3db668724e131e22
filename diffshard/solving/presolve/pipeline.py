"""All reductions in the order that leaves the least: ties, memory, then elimination, again while nodes lose memory.

Tie merging comes first: forbidden entries say which strategies cannot be chosen, and which nodes determine each other.
"""

import functools
import math
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from cost.base import Problem, edge_ends, is_forbidden, num_strategies, with_infinities
from cost.edges import distinct_arrays, map_distinct, merge_edges
from diffshard.base import InfeasibleError
from diffshard.solving.form import Reduction, identity
from diffshard.solving.presolve.elimination import eliminate
from diffshard.solving.presolve.memory import compress_memory

_MOST_ROUNDS = 5
"""Rounds of memory and elimination after the first one; further ones hardly ever find anything."""


def presolve(problem: Problem, deadline: float = math.inf) -> Reduction:
    """Applies all reductions, in the order that leaves the least, and returns them as one.

    Args:
      problem: valid.
      deadline: by `time.perf_counter`; no reduction begins after it, and what the ones before it found is returned. One
        reduction takes up to four seconds for forty thousand nodes.

    Raises:
      InfeasibleError: some node has no allowed strategy.
    """
    reduction = identity(problem)
    if not len(problem.node_cost):
        return reduction
    for step in (merge_ties, compress_memory, eliminate):
        if time.perf_counter() > deadline:
            return reduction
        reduction = _followed_by(reduction, step)
    for _ in range(_MOST_ROUNDS):
        if time.perf_counter() > deadline:
            break
        nodes_with_memory = set(reduction.problem.usage_node.tolist())
        reduction = _followed_by(reduction, compress_memory)
        # Strategies that cannot fit leave less room for others, and nodes whose memory is free now can be eliminated.
        freed_nodes = nodes_with_memory - set(reduction.problem.usage_node.tolist())
        freed_nodes |= {v for v, cost in enumerate(reduction.problem.node_cost) if np.isinf(cost).any()}
        if not freed_nodes:
            break
        reduction = _followed_by(reduction, functools.partial(eliminate, changed_nodes=freed_nodes))
    return reduction


def _followed_by(first: Reduction, step: Callable[[Problem], Reduction]) -> Reduction:
    """Applies one more reduction and returns both as one."""
    problem, constant, expand = step(first.problem)
    return Reduction(problem, first.constant + constant, lambda choice: first.expand(expand(choice)))


def merge_ties(problem: Problem) -> Reduction:
    """Drops strategies that forbidden entries rule out and merges determined nodes into what determines them.

    Raises:
      InfeasibleError: some node has no strategy left.
    """
    costs, num_nodes = [*problem.node_cost, *problem.edge_cost], len(problem.node_cost)
    if not any(map_distinct(lambda cost: is_forbidden(cost).any(), costs)):
        costs = map_distinct(lambda cost: np.asarray(cost, float), costs)  # what is shared stays shared
        return identity(problem._replace(node_cost=costs[:num_nodes], edge_cost=costs[num_nodes:]))
    ties = _Ties(problem)
    ties.propagate()
    return ties.reduction()


class _Ties:
    """Union-find over nodes; the maps from a root's strategies to a member's are composed on path compression.

    Attributes:
      matrices: the distinct arrays among the edges' matrices.
      matrix_of: `[E]` which of them each edge has.
      parent: of each node; a root is its own.
      own_strategy: for each node which of its strategies goes with each strategy of its parent.
      alive: for each root which strategies are not ruled out.
      allowed: by edge, which pairs of strategies its matrix allows, where it forbids any.
      restricting: for each root the edges that forbid something in its group.
    """

    def __init__(self, problem: Problem):
        self.problem = problem
        self.edges = edge_ends(problem).tolist()
        self.parent = list(range(len(problem.node_cost)))
        self.own_strategy = [np.arange(size) for size in num_strategies(problem).tolist()]
        self.alive = [~is_forbidden(cost) for cost in problem.node_cost]
        self.matrices, self.matrix_of = distinct_arrays(problem.edge_cost)
        masks = [~is_forbidden(matrix) for matrix in self.matrices]
        restricts = np.array([not mask.all() for mask in masks], bool)
        self.allowed = {e: masks[self.matrix_of[e]] for e in np.flatnonzero(restricts[self.matrix_of]).tolist()}
        self.restricting: list[list[int]] = [[] for _ in problem.node_cost]
        for e in self.allowed:
            for v in self.edges[e]:
                self.restricting[v].append(e)

    def root_of(self, v: int) -> tuple[int, np.ndarray]:
        """Returns the root of v and, for each strategy of the root, that of v."""
        path = []
        while self.parent[v] != v:
            path.append(v)
            v = self.parent[v]
        for node in reversed(path):  # from the root down, so that each parent's map already starts at the root
            if self.parent[node] != v:
                self.own_strategy[node] = self.own_strategy[node][self.own_strategy[self.parent[node]]]
                self.parent[node] = v
        return v, self.own_strategy[path[0] if path else v]

    def propagate(self) -> None:
        """Drops strategies and merges nodes until no edge rules anything out any more."""
        self.queue = deque(self.allowed)
        self.in_queue = set(self.allowed)
        for v, alive in enumerate(self.alive):
            if not alive.any():
                self._fail(v)
        while self.queue:
            e = self.queue.popleft()
            self.in_queue.discard(e)
            self._restrict(e)

    def _restrict(self, e: int) -> None:
        (u, map_u), (v, map_v) = (self.root_of(node) for node in self.edges[e])
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
        self.parent[child], self.own_strategy[child] = root, partner
        self._requeue(child)
        self.restricting[root] += self.restricting[child]
        self.restricting[child] = []

    def _requeue(self, v: int) -> None:
        for e in self.restricting[v]:
            if e not in self.in_queue:
                self.in_queue.add(e)
                self.queue.append(e)

    def _fail(self, v: int) -> None:
        raise InfeasibleError(
            f"`problem` has no allowed choice: every strategy of node {v}, or of a node tied to it, is forbidden "
            f"by its own cost or by the transfer matrices of its edges."
        )

    def reduction(self) -> Reduction:
        """Returns the problem of the roots, and the way back."""
        problem, roots = self.problem, [self.root_of(v) for v in range(len(self.parent))]
        remaining = [v for v, (root, _) in enumerate(roots) if root == v]
        number = {root: i for i, root in enumerate(remaining)}
        alive = [np.flatnonzero(self.alive[root]) for root in remaining]
        group = np.array([number[root] for root, _ in roots], np.int64)
        maps = [own_strategy[alive[number[root]]] for root, own_strategy in roots]
        node_cost = [np.zeros(len(strategies)) for strategies in alive]
        for v, cost in enumerate(problem.node_cost):
            node_cost[group[v]] += np.asarray(cost, float)[maps[v]]
        edge_nodes, edge_cost = self._merged_edges(group, maps, node_cost)
        smaller = problem._replace(
            node_cost=node_cost,
            edge_nodes=edge_nodes,
            edge_cost=edge_cost,
            usage_node=group[np.asarray(problem.usage_node, np.int64)],
            usage=[np.asarray(u)[maps[v]] for u, v in zip(problem.usage, problem.usage_node, strict=True)],
            load=_summed_loads(problem, group, maps, len(remaining)),
        )
        own_strategy = np.concatenate(maps)
        lengths = np.array([len(strategies) for strategies in maps])
        start = np.cumsum(lengths) - lengths
        return Reduction(smaller, 0.0, lambda choice: own_strategy[start + choice[group]])

    def _merged_edges(
        self, group: np.ndarray, maps: list[np.ndarray], node_cost: list[np.ndarray]
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """Sums the matrices between each pair of groups; those inside a group go into its node cost.

        Matrices are moved only here, once. Edges that share an array, point the same way and are restricted alike share
        the result.

        Args:
          group: `[V]` the number of each node's root.
          maps: for each node which of its strategies goes with each live strategy of its root.
          node_cost: of the groups; it is added to.
        """
        restrictions: dict[tuple, np.ndarray] = {}
        between: list[tuple[int, int, np.ndarray]] = []
        for (u, v), m in zip(self.edges, self.matrix_of.tolist(), strict=True):
            a, b, cost = int(group[u]), int(group[v]), self.matrices[m]
            if a == b:
                node_cost[a] += with_infinities(cost[maps[u], maps[v]])
                continue
            is_flipped = a > b
            if is_flipped:
                a, b, u, v, cost = b, a, v, u, cost.T
            form = (m, is_flipped, maps[u].tobytes(), maps[v].tobytes())
            if form not in restrictions:
                restrictions[form] = with_infinities(cost[np.ix_(maps[u], maps[v])])
            between.append((a, b, restrictions[form]))
        matrices = merge_edges(between)
        return np.array(list(matrices), np.int64).reshape(-1, 2), list(matrices.values())


def _summed_loads(problem: Problem, group: np.ndarray, maps: list[np.ndarray], count: int) -> list[np.ndarray]:
    if not len(problem.load):
        return []
    loads: list = [0.0] * count
    for v, load in enumerate(problem.load):
        loads[group[v]] = loads[group[v]] + np.asarray(load, float)[maps[v]]
    return loads

"""Exact reductions on the graph: separable edges, nodes of degree 0, 1 and 2, dominated strategies.

A node is eliminated by the min-plus product of its matrices, which is exact; its strategy is read off on the way back.
Nodes whose memory or load depends on the choice are not eliminated, only their dominated strategies are.
"""

import functools
from collections.abc import Callable, Iterable

import numpy as np

from cost.base import FORBIDDEN, Problem
from diffshard.base import InfeasibleError
from diffshard.solving.presolve.reduction import Reduction

LARGEST_PRODUCT = 1 << 16
"""Entries of a new transfer matrix beyond which a node of degree two stays: it would cost more than the node."""

_BLOCK = 1 << 20  # numbers in a temporary
_NUM_MIXTURES = 16


def eliminate(problem: Problem, changed: Iterable[int] | None = None) -> Reduction:
    """Folds separable edges, eliminates nodes of degree up to two, drops dominated strategies, until nothing changes.

    Args:
      problem: any.
      changed: where to look first, if the rest is known to hold nothing to reduce; None looks everywhere.

    Raises:
      InfeasibleError: some node has no allowed strategy.
    """
    graph = _Graph(problem)
    graph.reduce(set(range(len(problem.node_cost)) if changed is None else changed))
    return graph.reduction()


class _Graph:
    """The problem while it shrinks.

    `near[u][v]` is the transfer matrix with u's strategies as rows; `near[v][u]` its transpose. Matrices that are one
    array stay one array through every step: each distinct operation is done once, by the identity of its operands.
    """

    def __init__(self, problem: Problem):
        self.problem = problem
        self.cost: list = [np.array(cost, float) for cost in problem.node_cost]
        self.near: list[dict[int, np.ndarray]] = [{} for _ in problem.node_cost]
        self.strategies = [np.arange(len(cost)) for cost in problem.node_cost]
        self.done: dict[tuple, tuple] = {}  # results by operation and operands; keeps the operands alive with them
        self.undo: list[Callable[[np.ndarray], None]] = []
        self.constant = 0.0
        self.tables: list[list[np.ndarray]] = [[] for _ in problem.node_cost]  # what depends on the choice besides cost
        for v, usage in zip(problem.usage_node, problem.usage, strict=True):
            table = np.asarray(usage, float).reshape(len(usage), -1)
            if (table != table[0]).any():
                self.tables[v].append(table)
        for v, load in enumerate(problem.load):
            if np.any(load):
                self.tables[v].append(np.asarray(load, float))
        for (u, v), cost in zip(np.asarray(problem.edge_nodes).reshape(-1, 2).tolist(), problem.edge_cost, strict=True):
            self._join(u, v, cost)

    def once(self, name: str, compute: Callable, *operands: np.ndarray):
        key = (name, *(id(operand) for operand in operands))
        if key not in self.done:
            self.done[key] = (compute(*operands), operands)
        return self.done[key][0]

    def _transposed(self, matrix: np.ndarray) -> np.ndarray:
        if ("transposed", id(matrix)) not in self.done:
            turned = np.ascontiguousarray(matrix.T)
            self.done["transposed", id(matrix)] = (turned, (matrix,))
            self.done["transposed", id(turned)] = (matrix, (turned,))
        return self.done["transposed", id(matrix)][0]

    def _join(self, u: int, v: int, matrix: np.ndarray) -> None:
        """Adds a matrix between u and v, to the one that is there if there is one."""
        if v in self.near[u]:
            matrix = self.once("sum", np.add, self.near[u][v], matrix)
        split = self.once("split", _split, matrix)
        if split is not None:
            self.near[u].pop(v, None)
            self.near[v].pop(u, None)
            self.cost[u] = self.cost[u] + split[0]
            self.cost[v] = self.cost[v] + split[1]
        else:
            self.near[u][v] = matrix
            self.near[v][u] = self._transposed(matrix)

    def reduce(self, dirty: set[int]) -> None:
        while dirty:
            touched = self._eliminate_all(dirty)
            dirty = set()
            for v in sorted(touched):
                if self.cost[v] is not None and self._drop_dominated(v):
                    dirty |= {v, *self.near[v]}

    def _eliminate_all(self, dirty: set[int]) -> set[int]:
        """Eliminates what it can among the dirty nodes and what becomes so; returns all nodes that changed."""
        queue, touched = sorted(dirty), set(dirty)
        waiting = set(queue)
        while queue:
            v = queue.pop()
            waiting.discard(v)
            if self.cost[v] is None or self.tables[v] or len(self.near[v]) > 2:
                continue
            ends = list(self.near[v])
            if len(ends) == 2 and self.near[ends[0]][v].shape[0] * self.near[ends[1]][v].shape[0] > LARGEST_PRODUCT:
                continue
            (self._eliminate_alone, self._eliminate_leaf, self._eliminate_between)[len(ends)](v, *ends)
            self.cost[v] = None
            touched.update(ends)
            for u in ends:
                if u not in waiting:
                    waiting.add(u)
                    queue.append(u)
        return touched

    def _eliminate_alone(self, v: int) -> None:
        best = int(self.cost[v].argmin())
        if np.isinf(self.cost[v][best]):
            self._fail(v)
        self.constant += self.cost[v][best]
        self.undo.append(lambda choice: choice.__setitem__(v, best))

    def _eliminate_leaf(self, v: int, u: int) -> None:
        through = self.near[u][v] + self.cost[v]
        best = through.argmin(axis=1)
        self.cost[u] = self.cost[u] + through.min(axis=1)
        self._forget(v)
        self.undo.append(lambda choice: choice.__setitem__(v, best[choice[u]]))

    def _eliminate_between(self, v: int, u: int, w: int) -> None:
        first, second, cost = self.near[u][v], self.near[v][w], self.cost[v]
        key = ("product", id(first), id(second), cost.tobytes())
        if key not in self.done:
            self.done[key] = (_min_plus(first + cost, second), (first, second))
        self._forget(v)
        self._join(u, w, self.done[key][0])

        def undo(choice: np.ndarray) -> None:
            choice[v] = (first[choice[u]] + cost + second[:, choice[w]]).argmin()

        self.undo.append(undo)

    def _forget(self, v: int) -> None:
        for u in self.near[v]:
            del self.near[u][v]
        self.near[v] = {}

    def _drop_dominated(self, v: int) -> bool:
        """Whether any strategy of v went. One stays that is no worse, whatever the neighbours choose."""
        keep = np.isfinite(self.cost[v])
        if not keep.any():
            self._fail(v)
        better, worse = self._dominations(v, *self._candidates(v, np.flatnonzero(keep)))
        for t in np.unique(worse)[::-1]:  # of two that are equal, the first stays
            keep[t] = not keep[better[worse == t]].any()
        if keep.all():
            return False
        self._slice(v, np.flatnonzero(keep))
        return True

    def _candidates(self, v: int, live: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Pairs (s, t) of live strategies of v of which s is no worse than t on a few mixtures of the neighbours'.

        This is necessary for domination and costs a hundredth of comparing all pairs on everything.
        """
        marks = self.cost[v][live, None] * np.ones(_NUM_MIXTURES)
        for matrix in self.near[v].values():
            marks = marks + self.once("mixtures", _mixtures, matrix)[live]
        marks = np.concatenate([marks, *(table[live] for table in self.tables[v])], axis=1)
        marks_and_slack = marks + 1e-9 * np.abs(marks).max(axis=0)
        no_worse = np.empty((len(live), len(live)), bool)
        block = max(_BLOCK // marks.size, 1)
        for start in range(0, len(live), block):
            rows = marks[start : start + block, None]
            no_worse[start : start + block] = (rows <= marks_and_slack).all(axis=2)
        np.fill_diagonal(no_worse, False)
        better, worse = np.nonzero(no_worse)
        return live[better], live[worse]

    def _dominations(self, v: int, s: np.ndarray, t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Those of the pairs of which s truly dominates t."""
        if not len(s):
            return s, t
        beyond = self.cost[v][s] - self.cost[v][t]  # how much s can cost beyond t at worst
        possible = np.ones(
            len(s), bool
        )  # to meet: where t is forbidden next to every strategy of a neighbour, t is not
        for matrix in self.near[v].values():
            more = _beyond(matrix, s, t)
            possible &= more > -np.inf
            beyond = beyond + np.where(more > -np.inf, more, 0.0)
        holds = (beyond <= 0) | ~possible
        for table in self.tables[v]:
            holds &= (table[s] <= table[t]).all(axis=1)
        return s[holds], t[holds]

    def _slice(self, v: int, kept: np.ndarray) -> None:
        self.cost[v] = self.cost[v][kept]
        tables = [table[kept] for table in self.tables[v]]
        # A usage that no longer depends on the choice does not hold the node; a load does, it must be added somewhere.
        self.tables[v] = [table for table in tables if len(self.problem.load) or (table != table[0]).any()]
        self.strategies[v] = self.strategies[v][kept]
        self.undo.append(lambda choice: choice.__setitem__(v, kept[choice[v]]))
        for u, matrix in list(self.near[v].items()):
            key = ("rows", id(matrix), kept.tobytes())
            if key not in self.done:
                self.done[key] = (matrix[kept], (matrix,))
            del self.near[v][u], self.near[u][v]
            self._join(v, u, self.done[key][0])

    def _fail(self, v: int) -> None:
        raise InfeasibleError(f"`problem` has no allowed choice: every strategy of node {v} is forbidden.")

    def reduction(self) -> Reduction:
        problem = self.problem
        kept = [v for v, cost in enumerate(self.cost) if cost is not None]
        number = {v: i for i, v in enumerate(kept)}
        pairs = [(u, v) for u in kept for v in self.near[u] if u < v]
        usages = []
        for k, v in enumerate(np.asarray(problem.usage_node).tolist()):
            table = np.asarray(problem.usage[k])
            table = table[self.strategies[v]]
            usages.append((number[v], table) if v in number else (0, table[:1]))
        if usages and not kept:
            kept, number = [0], {0: 0}
            self.cost[0], self.strategies[0] = np.zeros(1), np.zeros(1, np.int64)
        size = len(self.cost[kept[0]]) if kept else 0
        constants = [v not in number for v in np.asarray(problem.usage_node).tolist()]
        reduced = problem._replace(
            node_cost=[self.cost[v] for v in kept],
            edge_nodes=np.array([(number[u], number[v]) for u, v in pairs], np.int64).reshape(-1, 2),
            edge_cost=[self.near[u][v] for u, v in pairs],
            usage_node=np.array([v for v, _ in usages], np.int64),
            usage=[np.repeat(t, size, axis=0) if c else t for (_, t), c in zip(usages, constants, strict=True)],
            load=[np.asarray(problem.load[v], float)[self.strategies[v]] for v in kept] if len(problem.load) else (),
        )
        undo, count = tuple(reversed(self.undo)), len(self.cost)

        def expand(choice: np.ndarray) -> np.ndarray:
            full = np.zeros(count, np.int64)
            full[kept] = choice[: len(kept)]
            for step in undo:
                step(full)
            return full

        return Reduction(reduced, self.constant, expand)


def _split(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Row and column costs that sum to the matrix, or None where there are none."""
    if not np.isfinite(matrix).all():
        return None
    row, column = matrix[:, 0], matrix[0] - matrix[0, 0]
    return (row, column) if (row[:, None] + column[None] == matrix).all() else None


def _min_plus(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """min_y first[x, y] + second[y, z]."""
    product = np.empty((first.shape[0], second.shape[1]))
    block = max(_BLOCK // second.size, 1)
    for start in range(0, len(first), block):
        product[start : start + block] = (first[start : start + block, :, None] + second[None]).min(axis=1)
    return product


def _mixtures(matrix: np.ndarray) -> np.ndarray:
    """`[S, _NUM_MIXTURES]`: what a strategy costs for some columns and some weighted means of columns."""
    finite = matrix if np.isfinite(matrix).all() else np.where(np.isinf(matrix), FORBIDDEN, matrix)
    return finite @ _weights(matrix.shape[1])


@functools.cache
def _weights(columns: int) -> np.ndarray:
    rng = np.random.default_rng(columns)
    single = np.eye(columns)[:, rng.integers(columns, size=_NUM_MIXTURES // 2)]
    return np.concatenate([single, rng.dirichlet(np.ones(columns), size=_NUM_MIXTURES - single.shape[1]).T], axis=1)


def _beyond(matrix: np.ndarray, s: np.ndarray, t: np.ndarray) -> np.ndarray:
    """max_y matrix[s, y] - matrix[t, y] for each pair: where t is forbidden it was not chosen, so there s may be."""
    worst = np.empty(len(s))
    finite = np.isfinite(matrix).all()
    block = max(_BLOCK // matrix.shape[1], 1)
    for start in range(0, len(s), block):
        part = slice(start, start + block)
        rows, others = matrix[s[part]], matrix[t[part]]
        if not finite:
            rows, others = np.where(np.isinf(others), -np.inf, rows), np.where(np.isinf(others), 0.0, others)
        worst[part] = (rows - others).max(axis=1)
    return worst

"""Exact reductions on the graph: separable edges, nodes of degree 0, 1 and 2, dominated strategies.

A node of degree two is eliminated by the min-plus product of its matrices, which is exact; its strategy is read off on
the way back. Nodes whose memory or load depends on the choice are not eliminated, only their dominated strategies are.

Strategy s dominates t if, at every neighbour's worst strategy for s, it costs no more than t and none of its usages and
loads is larger:

    c[s] - c[t] + Σ_e max_y (M_e[s, y] - M_e[t, y]) <= 0

Comparing all pairs exactly is expensive, so that pairs are first compared on a few mixtures of the neighbours'
strategies: s can dominate t only if it is no worse on each of them.
"""

import functools
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from cost.base import FORBIDDEN, Problem, edge_ends
from cost.edges import map_distinct
from cost.memory import usage_tables
from diffshard.base import InfeasibleError
from diffshard.solving.form import Reduction

LARGEST_PRODUCT = 1 << 16
"""Entries of a new transfer matrix beyond which a node of degree two stays: it would cost more than the node."""


def eliminate(problem: Problem, changed_nodes: Iterable[int] | None = None) -> Reduction:
    """Folds separable edges, eliminates nodes of degree up to two, drops dominated strategies, until nothing changes.

    Args:
      changed_nodes: nodes to look at first, if the rest is known to hold nothing to reduce; None looks everywhere.

    Raises:
      InfeasibleError: some node has no allowed strategy.
    """
    graph = _Graph(problem)
    graph.reduce(set(range(len(problem.node_cost)) if changed_nodes is None else changed_nodes))
    return graph.reduction()


class Memo:
    """Results of operations on arrays, so that the same operation on the same arrays runs once.

    Edges of equal layers share one matrix. With a memo elimination transforms it once, and all of these edges share
    the result again. Arrays are told apart by identity; the memo keeps them alive, so that no identity is used twice.
    """

    def __init__(self):
        self._results: dict[tuple, tuple] = {}

    def __call__(self, operation: Callable, *arrays: np.ndarray, parameter: np.ndarray | None = None):
        """Returns `operation(*arrays)`, or `operation(*arrays, parameter)`, where the parameter counts by its value."""
        value = () if parameter is None else (parameter,)
        key = (operation, *(id(array) for array in arrays), *(array.tobytes() for array in value))
        if key not in self._results:
            self._results[key] = (operation(*arrays, *value), arrays)
        return self._results[key][0]

    def transpose(self, matrix: np.ndarray) -> np.ndarray:
        """Returns the transposed matrix as an array of its own, whose transposed one is `matrix` itself."""
        result = self(_transpose, matrix)
        self._results.setdefault((_transpose, id(result)), (matrix, (result,)))
        return result


def _transpose(matrix: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(matrix.T)


class _Graph:
    """The problem while it shrinks.

    Attributes:
      cost: V arrays of node costs; None for an eliminated node.
      neighbours: `neighbours[u][v]` is the transfer matrix with u's strategies as rows; `neighbours[v][u]` is its
        transpose. Matrices that are one array stay one array through every step.
      strategies: V arrays, which of its original strategies each node still has.
      tables: usages and loads of each node that depend on the choice, `[S_v, ...]`.
      undo: steps that complete a choice on the way back, the last one first.
    """

    def __init__(self, problem: Problem):
        self.problem = problem
        self.cost: list = map_distinct(lambda cost: np.asarray(cost, float), problem.node_cost)
        self.neighbours: list[dict[int, np.ndarray]] = [{} for _ in problem.node_cost]
        self.strategies = map_distinct(lambda cost: np.arange(len(cost)), problem.node_cost)
        self.tables = _choice_dependent_tables(problem)
        self.constant = 0.0
        self.undo: list[Callable[[np.ndarray], None]] = []
        self._memo = Memo()
        for (u, v), cost in zip(edge_ends(problem).tolist(), problem.edge_cost, strict=True):
            self._join(u, v, cost)

    def reduce(self, changed_nodes: set[int]) -> None:
        """Eliminates and drops, starting from the changed nodes, until nothing changes any more."""
        while changed_nodes:
            touched_nodes = self._eliminate_all(changed_nodes)
            changed_nodes = set()
            for v in sorted(touched_nodes):
                if self.cost[v] is not None and self._drop_dominated(v):
                    changed_nodes |= {v, *self.neighbours[v]}

    def _join(self, u: int, v: int, matrix: np.ndarray) -> None:
        """Adds a matrix between u and v to the one that is there, if any; a separable sum goes into the node costs."""
        if v in self.neighbours[u]:
            matrix = self._memo(np.add, self.neighbours[u][v], matrix)
        row_and_column = self._memo(_separate, matrix)
        if row_and_column is not None:
            self.neighbours[u].pop(v, None)
            self.neighbours[v].pop(u, None)
            self.cost[u] = self._memo(np.add, self.cost[u], row_and_column[0])
            self.cost[v] = self._memo(np.add, self.cost[v], row_and_column[1])
        else:
            self.neighbours[u][v] = matrix
            self.neighbours[v][u] = self._memo.transpose(matrix)

    def _eliminate_all(self, changed_nodes: set[int]) -> set[int]:
        """Eliminates what it can of the changed nodes and of those around; returns all nodes that changed."""
        stack, touched_nodes = sorted(changed_nodes), set(changed_nodes)
        waiting = set(stack)
        while stack:
            v = stack.pop()
            waiting.discard(v)
            if not self._can_go(v):
                continue
            ends = list(self.neighbours[v])
            (self._eliminate_alone, self._eliminate_leaf, self._eliminate_between)[len(ends)](v, *ends)
            self.cost[v] = None
            touched_nodes.update(ends)
            stack += [u for u in ends if u not in waiting]
            waiting.update(ends)
        return touched_nodes

    def _can_go(self, v: int) -> bool:
        if self.cost[v] is None or self.tables[v] or len(self.neighbours[v]) > 2:
            return False
        ends = list(self.neighbours[v])
        return len(ends) < 2 or len(self.cost[ends[0]]) * len(self.cost[ends[1]]) <= LARGEST_PRODUCT

    def _eliminate_alone(self, v: int) -> None:
        best = int(self.cost[v].argmin())
        if np.isinf(self.cost[v][best]):
            self._fail(v)
        self.constant += self.cost[v][best]
        self.undo.append(lambda choice: choice.__setitem__(v, best))

    def _eliminate_leaf(self, v: int, u: int) -> None:
        least, best = self._memo(_through_leaf, self.neighbours[u][v], parameter=self.cost[v])
        self.cost[u] = self.cost[u] + least
        self._disconnect(v)
        self.undo.append(lambda choice: choice.__setitem__(v, best[choice[u]]))

    def _eliminate_between(self, v: int, u: int, w: int) -> None:
        first, second, cost = self.neighbours[u][v], self.neighbours[v][w], self.cost[v]
        product = self._memo(_through, first, second, parameter=cost)
        self._disconnect(v)
        self._join(u, w, product)

        def choose(choice: np.ndarray) -> None:
            choice[v] = (first[choice[u]] + cost + second[:, choice[w]]).argmin()

        self.undo.append(choose)

    def _disconnect(self, v: int) -> None:
        for u in self.neighbours[v]:
            del self.neighbours[u][v]
        self.neighbours[v] = {}

    def _drop_dominated(self, v: int) -> bool:
        """Drops the strategies of v that are forbidden or dominated; returns whether there were any."""
        if not np.isfinite(self.cost[v]).any():
            self._fail(v)
        own = np.concatenate([self.cost[v][:, None], *self.tables[v]], axis=1)
        keep = self._memo(self._undominated, *self.neighbours[v].values(), parameter=own)
        if keep is None:
            return False
        self._restrict(v, keep)
        return True

    def _undominated(self, *matrices_and_own: np.ndarray) -> np.ndarray | None:
        """Returns which strategies of a node are not dominated, or None if none is.

        Args:
          matrices_and_own: matrices to the neighbours; last the node's costs and tables, side by side.
        """
        *matrices, own = matrices_and_own
        keep = undominated_strategies(own[:, 0], matrices, [own[:, 1:]], self._memo)
        return None if keep.all() else np.flatnonzero(keep)

    def _restrict(self, v: int, strategies: np.ndarray) -> None:
        """Leaves v only some of its strategies."""
        self.cost[v] = self._memo(_rows, self.cost[v], parameter=strategies)
        tables = [self._memo(_rows, table, parameter=strategies) for table in self.tables[v]]
        # A usage that no longer depends on the choice does not hold the node; a load does, it must be added somewhere.
        self.tables[v] = [table for table in tables if len(self.problem.load) or (table != table[0]).any()]
        self.strategies[v] = self._memo(_rows, self.strategies[v], parameter=strategies)
        self.undo.append(lambda choice: choice.__setitem__(v, strategies[choice[v]]))
        for u, matrix in list(self.neighbours[v].items()):
            del self.neighbours[v][u], self.neighbours[u][v]
            self._join(v, u, self._memo(_rows, matrix, parameter=strategies))

    def _fail(self, v: int) -> None:
        raise InfeasibleError(f"`problem` has no allowed choice: every strategy of node {v} is forbidden.")

    def reduction(self) -> Reduction:
        """Returns the problem that is left, and the way back."""
        remaining = [v for v, cost in enumerate(self.cost) if cost is not None]
        if len(self.problem.usage) and not remaining:  # the usages still need a node: one without a choice
            remaining = [0]
            self.cost[0], self.strategies[0] = np.zeros(1), self.strategies[0][:1]
        number = {v: i for i, v in enumerate(remaining)}
        pairs = [(u, v) for u in remaining for v in self.neighbours[u] if u < v]
        usage_node, usage = self._usages(number)
        problem = self.problem._replace(
            node_cost=[self.cost[v] for v in remaining],
            edge_nodes=np.array([(number[u], number[v]) for u, v in pairs], np.int64).reshape(-1, 2),
            edge_cost=[self.neighbours[u][v] for u, v in pairs],
            usage_node=usage_node,
            usage=usage,
            load=self._loads(remaining),
        )
        return Reduction(problem, self.constant, self._expansion(remaining))

    def _usages(self, number: dict[int, int]) -> tuple[np.ndarray, list[np.ndarray]]:
        """Returns the nodes and the tables of all usages; those of eliminated nodes are constant and go to node 0."""
        first, nodes, tables = next(iter(number), 0), [], []
        for v, usage in zip(np.asarray(self.problem.usage_node).tolist(), self.problem.usage, strict=True):
            table = self._memo(_rows, usage, parameter=self.strategies[v])
            if v not in number:
                table = np.repeat(table[:1], len(self.cost[first]), axis=0)
            nodes.append(number.get(v, 0))
            tables.append(table)
        return np.array(nodes, np.int64), tables

    def _loads(self, remaining: list[int]) -> Sequence[np.ndarray]:
        load = self.problem.load
        return [np.asarray(load[v], float)[self.strategies[v]] for v in remaining] if len(load) else ()

    def _expansion(self, remaining: list[int]) -> Callable[[np.ndarray], np.ndarray]:
        count, steps = len(self.cost), tuple(reversed(self.undo))

        def expand(choice: np.ndarray) -> np.ndarray:
            full_choice = np.zeros(count, np.int64)
            full_choice[remaining] = choice[: len(remaining)]
            for step in steps:
                step(full_choice)
            return full_choice

        return expand


def _choice_dependent_tables(problem: Problem) -> list[list[np.ndarray]]:
    """Returns for each node its usages and loads that depend on the choice, `[S_v, ...]` each."""
    tables: list[list[np.ndarray]] = [[] for _ in problem.node_cost]
    for v, table in zip(problem.usage_node, usage_tables(problem), strict=True):
        if (table != table[0]).any():
            tables[v].append(table)
    for v, load in enumerate(problem.load):
        if np.any(load):
            tables[v].append(np.asarray(load, float))
    return tables


def _separate(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns row and column costs that sum to the matrix, or None where there are none."""
    if not np.isfinite(matrix).all():
        return None
    row, column = matrix[:, 0], matrix[0] - matrix[0, 0]
    return (row, column) if (row[:, None] + column[None] == matrix).all() else None


def _rows(matrix: np.ndarray, rows: np.ndarray) -> np.ndarray:
    return np.asarray(matrix)[rows]


def _through_leaf(matrix: np.ndarray, cost: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the cost of a leaf for each of its neighbour's strategies, and its best strategy for each."""
    through = matrix + cost
    return through.min(axis=1), through.argmin(axis=1)


def _through(first: np.ndarray, second: np.ndarray, cost: np.ndarray) -> np.ndarray:
    """Computes the min-plus product through a node with costs: min_y first[x, y] + cost[y] + second[y, z]."""
    to_node = first + cost
    product = np.empty((first.shape[0], second.shape[1]))
    block = max(NUMBERS_PER_BLOCK // second.size, 1)
    for start in range(0, len(to_node), block):
        product[start : start + block] = (to_node[start : start + block, :, None] + second[None]).min(axis=1)
    return product


NUMBERS_PER_BLOCK = 1 << 20
"""Numbers in a temporary array, 8 MB: what fits a processor's cache several times over, but not its memory."""
_NUM_MIXTURES = 16
"""Mixtures of a neighbour's strategies on which pairs are compared first; more leave hardly fewer pairs."""
_ROUNDING = 1e-9
"""Relative tolerance of that first comparison, so that rounding hides no pair."""


def undominated_strategies(
    cost: np.ndarray, matrices: Sequence[np.ndarray], tables: Sequence[np.ndarray], memo: Memo
) -> np.ndarray:
    """Returns which strategies of a node are allowed and not dominated, `[S]` booleans.

    Args:
      cost: `[S]` node costs, infinite where forbidden.
      matrices: transfer matrices to the neighbours, the node's strategies as rows.
      tables: usages and loads `[S, ...]`.
    """
    is_allowed = np.isfinite(cost)
    pairs = _candidates(cost, matrices, tables, memo, np.flatnonzero(is_allowed))
    better, worse = _dominations(cost, matrices, tables, *pairs)
    keep = is_allowed.copy()
    for t in np.unique(worse)[::-1]:  # of two that are equal, the first stays
        keep[t] = not keep[better[worse == t]].any()
    return keep


def _candidates(
    cost: np.ndarray, matrices: Sequence[np.ndarray], tables: Sequence[np.ndarray], memo: Memo, strategies: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns pairs (s, t) of allowed strategies where s is no worse than t on every mixture.

    This is necessary for domination and takes a hundredth of the time of comparing all pairs on everything.
    """
    marks = cost[strategies, None] * np.ones(_NUM_MIXTURES)
    for matrix in matrices:
        marks = marks + memo(_mixtures, matrix)[strategies]
    marks = np.concatenate([marks, *(table[strategies] for table in tables)], axis=1)
    marks_and_slack = marks + _ROUNDING * np.abs(marks).max(axis=0)
    no_worse = np.empty((len(strategies), len(strategies)), bool)
    block = max(NUMBERS_PER_BLOCK // marks.size, 1)
    for start in range(0, len(strategies), block):
        rows = marks[start : start + block, None]
        no_worse[start : start + block] = (rows <= marks_and_slack).all(axis=2)
    np.fill_diagonal(no_worse, False)
    better, worse = np.nonzero(no_worse)
    return strategies[better], strategies[worse]


def _dominations(
    cost: np.ndarray, matrices: Sequence[np.ndarray], tables: Sequence[np.ndarray], s: np.ndarray, t: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns those of the pairs (s, t) where s truly dominates t."""
    if not len(s):
        return s, t
    extra = cost[s] - cost[t]  # what s costs beyond t at worst
    possible = np.ones(len(s), bool)  # False where some neighbour forbids t with each of its strategies
    for matrix in matrices:
        largest = _largest_differences(matrix, s, t)
        possible &= largest > -np.inf
        extra = extra + np.where(largest > -np.inf, largest, 0.0)
    holds = (extra <= 0) | ~possible
    for table in tables:
        holds &= (table[s] <= table[t]).all(axis=1)
    return s[holds], t[holds]


def _mixtures(matrix: np.ndarray) -> np.ndarray:
    """Computes what each strategy costs for some columns and some weighted means of columns, `[S, _NUM_MIXTURES]`."""
    finite = matrix if np.isfinite(matrix).all() else np.where(np.isinf(matrix), FORBIDDEN, matrix)
    return finite @ _weights(matrix.shape[1])


@functools.cache
def _weights(columns: int) -> np.ndarray:
    rng = np.random.default_rng(columns)
    single = np.eye(columns)[:, rng.integers(columns, size=_NUM_MIXTURES // 2)]
    return np.concatenate([single, rng.dirichlet(np.ones(columns), size=_NUM_MIXTURES - single.shape[1]).T], axis=1)


def _largest_differences(matrix: np.ndarray, s: np.ndarray, t: np.ndarray) -> np.ndarray:
    """Computes max_y matrix[s, y] - matrix[t, y] for each pair, over the columns y where t is allowed."""
    largest = np.empty(len(s))
    finite = np.isfinite(matrix).all()
    block = max(NUMBERS_PER_BLOCK // matrix.shape[1], 1)
    for start in range(0, len(s), block):
        part = slice(start, start + block)
        rows, others = matrix[s[part]], matrix[t[part]]
        if not finite:
            rows, others = np.where(np.isinf(others), -np.inf, rows), np.where(np.isinf(others), 0.0, others)
        largest[part] = (rows - others).max(axis=1)
    return largest

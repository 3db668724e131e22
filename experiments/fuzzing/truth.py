"""The truth about small problems: every choice is priced in integers of any size, without any rounding.

Every float is a whole number of 2^-1074, so that sums and comparisons of such numbers are exact.
"""

import itertools
from collections.abc import Iterator
from fractions import Fraction

import numpy as np

from cost.base import Problem, edge_ends, is_forbidden, load_groups, num_memory_devices, num_strategies

_UNIT = 1 << 1074


class Truth:
    """Exact costs of a problem's choices, laid out once."""

    def __init__(self, problem: Problem):
        self._sizes = num_strategies(problem).tolist()
        self._nodes = [_exact(cost) for cost in problem.node_cost]
        pairs = edge_ends(problem).tolist()
        self._edges = [(u, v, _exact(cost)) for (u, v), cost in zip(pairs, problem.edge_cost, strict=True)]
        self._loads, self._edge_loads = ([_exact(table) for table in t] for t in (problem.load, problem.edge_load))
        self._groups = [group.tolist() for group in load_groups(problem)]
        self._amounts, self._edge_amounts = (
            [_amounts(np.asarray(table)) for table in t] for t in (problem.amount, problem.edge_amount)
        )
        self._amount_limits = [_whole(limit) for limit in problem.amount_limit.tolist()]
        self._num_memory_devices = num_memory_devices(problem)
        self._usages = [
            (v, tuple(interval), _amounts(np.asarray(usage).reshape(len(usage), -1)))
            for v, usage, interval in zip(
                np.asarray(problem.usage_node).tolist(),
                problem.usage,
                np.asarray(problem.usage_interval).reshape(-1, 2).tolist(),
                strict=True,
            )
        ]
        limits = np.broadcast_to(np.asarray(problem.memory_limit), (self._num_memory_devices,))
        self._limits = [None if limit == np.inf else _whole(limit) for limit in limits.tolist()]

    def cost_of(self, choice: tuple[int, ...]) -> Fraction | None:
        """Returns the exact cost of a choice, None where it is not feasible."""
        terms = [cost[s] for cost, s in zip(self._nodes, choice, strict=True)]
        terms += [cost[choice[u]][choice[v]] for u, v, cost in self._edges]
        loads = self._sums(self._loads, self._edge_loads, choice)
        if any(term is None for term in terms) or any(load is None for load in loads):
            return None
        amounts = self._sums(self._amounts, self._edge_amounts, choice)
        if any(amount > limit for amount, limit in zip(amounts, self._amount_limits, strict=True)):
            return None
        total = sum(terms) + sum(max(loads[r] for r in group) for group in self._groups)
        return Fraction(total, _UNIT) if self._fits(choice) else None

    def _sums(self, of_nodes: list, of_edges: list, choice: tuple[int, ...]) -> list:
        """Returns each load or amount, None where a part of it is forbidden."""
        rows = [table[s] for table, s in zip(of_nodes, choice, strict=True)] if of_nodes else []
        rows += [table[choice[u]][choice[v]] for (u, v, _), table in zip(self._edges, of_edges, strict=False)]
        return [None if None in column else sum(column) for column in zip(*rows, strict=True)]

    def least_cost(self) -> Fraction | None:
        """Returns the exact cost of the best choice, None where none is feasible."""
        costs = (self.cost_of(choice) for choice in self._choices())
        return min((cost for cost in costs if cost is not None), default=None)

    def _choices(self) -> Iterator[tuple[int, ...]]:
        return itertools.product(*(range(size) for size in self._sizes))

    def _fits(self, choice: tuple[int, ...]) -> bool:
        for time in {start for _, (start, _), _ in self._usages}:
            live = [table[choice[v]] for v, (start, end), table in self._usages if start <= time < end]
            for d, limit in enumerate(self._limits):
                if limit is not None and sum(row[min(d, len(row) - 1)] for row in live) > limit:
                    return False
        return True


def _amounts(numbers: np.ndarray) -> list:
    """Returns amounts as nested lists of whole numbers of 2^-1074."""
    return np.array([_whole(number) for number in numbers.ravel().tolist()], object).reshape(numbers.shape).tolist()


def _exact(numbers: np.ndarray) -> list:
    """Returns numbers as nested lists of whole numbers of 2^-1074, None where they are forbidden costs."""
    array = np.asarray(numbers)
    flat = [None if is_forbidden(number) else _whole(number) for number in array.ravel().tolist()]
    return np.array(flat, object).reshape(array.shape).tolist()


def _whole(number: float) -> int:
    exact = Fraction(number)
    return exact.numerator * (_UNIT // exact.denominator)

"""Enumeration: every choice is priced, a block at a time. It is the oracle of the tests, for small problems."""

import math
from collections.abc import Iterator

import jax
import numpy as np

from cost.base import Problem, is_forbidden, load_groups, num_strategies
from cost.memory import usage_error
from diffshard.base import Proposal
from diffshard.solving.examples import coupled_ring

MOST_CHOICES = 10**7
"""Choices at most, which take about a second for ten nodes."""
_CHOICES_PER_BLOCK = 1 << 14  # about a millisecond; chosen by hand


def solve(problem: Problem, *, time_limit_s: float | None = None, key: jax.Array | None = None) -> Iterator[Proposal]:
    """Yields each block's improvement and, after the last block, the optimum as the bound.

    Raises:
      ValueError: there are more than `MOST_CHOICES` choices.
    """
    del time_limit_s, key  # the loop stops it; nothing is random
    sizes = num_strategies(problem)
    count = math.prod(sizes.tolist())
    if count > MOST_CHOICES:
        raise ValueError(
            f"`solver` 'exhaustive' takes at most {MOST_CHOICES:,} choices; this problem has "
            f"10^{math.log10(count):.0f}. Take 'gradient'."
        )
    best: tuple[float, float] = (math.inf, math.inf)
    least_cost, error = math.inf, usage_error(problem)
    for start in range(0, count, _CHOICES_PER_BLOCK):
        block = np.arange(start, min(start + _CHOICES_PER_BLOCK, count))
        choices = np.stack(np.unravel_index(block, sizes.tolist()), axis=1) if len(sizes) else np.zeros((1, 0), int)
        cost, excess = price(problem, choices)
        first = np.lexsort((cost, excess))[0]
        rank = float(excess[first]), float(cost[first])
        if rank < best:
            best = rank
            yield Proposal(choices[first])
        else:
            yield Proposal()
        perhaps = np.where(excess <= error, cost, np.inf)  # what float64 cannot tell from the limit may fit
        cheapest = int(perhaps.argmin())
        if perhaps[cheapest] < least_cost:
            least_cost = float(perhaps[cheapest])
            yield Proposal(choices[cheapest])
    yield Proposal(lower_bound=least_cost)


def price(problem: Problem, choices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns cost `[N]`, inf if forbidden, and memory excess `[N]` of many choices `[N, V]`, in float64."""
    parts = [np.asarray(cost)[choices[:, v]] for v, cost in enumerate(problem.node_cost)]
    pairs = zip(problem.edge_nodes, problem.edge_cost, strict=True)
    parts += [np.asarray(cost)[choices[:, u], choices[:, v]] for (u, v), cost in pairs]
    total, is_allowed = np.zeros(len(choices)), np.ones(len(choices), bool)
    for part in parts:
        is_allowed &= ~is_forbidden(part)
        total += np.where(is_allowed, part, 0)  # sums of what is forbidden may be too large for a float
    if len(problem.load):
        rows = [np.asarray(load, float)[choices[:, v]] for v, load in enumerate(problem.load)]
        loads = np.sum(rows, axis=0)
        total += sum(loads[:, group].max(axis=1) for group in load_groups(problem))
    return np.where(is_allowed, total, np.inf), _excess(problem, choices)


def _excess(problem: Problem, choices: np.ndarray) -> np.ndarray:
    worst = np.zeros(len(choices))
    intervals = np.asarray(problem.usage_interval).reshape(-1, 2)
    for time in np.unique(intervals[:, 0]):  # usage only rises where an interval starts
        live = np.flatnonzero((intervals[:, 0] <= time) & (time < intervals[:, 1])).tolist()
        tables = [np.asarray(problem.usage[k])[choices[:, problem.usage_node[k]]] for k in live]
        # `[C, 1]` where all devices use alike, else `[C, D]`.
        memory = sum((table.reshape(len(choices), -1) for table in tables), start=np.zeros((len(choices), 1)))
        worst = np.maximum(worst, (memory - np.asarray(problem.memory_limit)).max(axis=1))
    return worst


EXAMPLE = coupled_ring

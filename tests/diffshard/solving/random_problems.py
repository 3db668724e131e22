"""Random problems for tests, small enough for exhaustive search, and their optimum."""

import math

import numpy as np

from cost.base import Problem, is_forbidden, num_strategies
from diffshard.solving.solvers.exhaustive import price
from experiments.layered import layered_problem

__all__ = ["CHAIN", "EMPTY", "FORMS", "KINDS", "layered_problem", "optimum", "random_graph", "small_problem"]

EMPTY = np.zeros((0, 2), int)
KINDS = {
    "plain": {},
    "forbidden": {"forbidden": 0.1},
    "memory": {"memory": True},
    "loads": {"devices": 3},
    "groups": {"devices": 4, "memory": True, "groups": True},
    "all": {"forbidden": 0.1, "memory": True, "devices": 2},
}


def optimum(problem: Problem) -> float:
    """Returns the least cost of any feasible choice, by brute force; inf if there is none."""
    sizes = num_strategies(problem).tolist()
    choices = np.stack(np.unravel_index(np.arange(math.prod(sizes)), sizes), axis=1)
    cost, excess = price(problem, choices)
    return float(np.where((excess > 0) | is_forbidden(cost), np.inf, cost).min())


def small_problem(
    seed: int, *, forbidden: float = 0.0, memory: bool = False, devices: int = 0, groups: bool = False
) -> Problem:
    """Up to six nodes of up to four strategies, with every feature that is asked for.

    Args:
      seed: equal seeds give equal problems.
      forbidden: share of forbidden transfers.
      memory: usages under a limit that often binds.
      devices: number of devices with loads of their own, 0 for none.
      groups: whether the loads are in two groups.
    """
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 7))
    sizes = rng.integers(1, 5, count)
    pairs = [(u, v) for u in range(count) for v in range(count) if u != v and rng.random() < 0.25]
    num_usages = int(rng.integers(1, 2 * count + 1)) if memory else 0
    usage_node = rng.integers(0, count, num_usages)
    starts = rng.integers(0, 8, num_usages)
    return Problem(
        node_cost=[rng.integers(0, 30, size).astype(float) for size in sizes],
        edge_nodes=np.array(pairs, np.int64).reshape(-1, 2),
        edge_cost=[_matrix(rng, (sizes[u], sizes[v]), forbidden) for u, v in pairs],
        usage_node=usage_node,
        usage=[rng.integers(0, 10, sizes[v]) for v in usage_node],
        usage_interval=np.stack([starts, starts + rng.integers(1, 6, num_usages)], axis=1),
        memory_limit=float(rng.integers(5, 40)) if memory else np.inf,
        load=[rng.integers(0, 20, (size, devices)).astype(float) for size in sizes] if devices else (),
        load_group=np.arange(devices) % 2 if groups else np.zeros(0, np.int64),
    )


def _matrix(rng: np.random.Generator, shape: tuple[int, int], forbidden: float) -> np.ndarray:
    matrix = rng.integers(0, 30, shape).astype(float)
    if rng.random() < 0.3:  # separable: folds into the nodes
        matrix = matrix[:, :1] + matrix[:1] * rng.integers(0, 2)
    return np.where(rng.random(shape) < forbidden, np.inf, matrix)


def random_graph(seed: int, pairs: list[tuple[int, int]], *, shared: bool = False) -> Problem:
    """Returns a problem of six nodes of three strategies with these edges."""
    rng = np.random.default_rng(seed)
    common = rng.integers(0, 20, (3, 3)).astype(float)
    return Problem(
        [rng.integers(0, 20, 3).astype(float) for _ in range(6)],
        np.array(pairs, int).reshape(-1, 2),
        [common if shared else rng.integers(0, 20, (3, 3)).astype(float) for _ in pairs],
        EMPTY[:, 0],
        [],
        EMPTY,
    )


CHAIN = [(v, v + 1) for v in range(5)]
FORMS = {
    "chain": random_graph(0, CHAIN),
    "chain against the order": random_graph(1, [(v, u) for u, v in CHAIN]),
    "tree": random_graph(2, [(0, 1), (0, 2), (3, 0), (3, 4), (5, 3)]),
    "ring": random_graph(3, [*CHAIN, (5, 0)]),
    "one matrix for all edges": random_graph(4, [*CHAIN, (5, 0), (0, 3)], shared=True),
    "complete": random_graph(5, [(u, v) for v in range(6) for u in range(v)]),
    "no edges": random_graph(6, []),
}

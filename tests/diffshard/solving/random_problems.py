"""Random problems for tests, small enough for exhaustive search."""

import numpy as np

from cost.base import Problem
from experiments.layered import layered_problem

__all__ = ["layered_problem", "small_problem"]


def small_problem(seed: int, *, forbidden: float = 0.0, memory: bool = False, devices: int = 0) -> Problem:
    """Up to six nodes of up to four strategies, with every feature that is asked for.

    Args:
      seed: equal seeds give equal problems.
      forbidden: share of forbidden transfers.
      memory: usages under a limit that often binds.
      devices: number of devices with loads of their own, 0 for none.
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
    )


def _matrix(rng: np.random.Generator, shape: tuple[int, int], forbidden: float) -> np.ndarray:
    matrix = rng.integers(0, 30, shape).astype(float)
    if rng.random() < 0.3:  # separable: folds into the nodes
        matrix = matrix[:, :1] + matrix[:1] * rng.integers(0, 2)
    return np.where(rng.random(shape) < forbidden, np.inf, matrix)

"""Generated problems of any size that look like a training step of many equal layers."""

import numpy as np

from cost.base import Problem
from cost.memory import memory_profile


def layered_problem(
    seed: int, layers: int, *, width: int = 40, most: int = 30, binding: float | None = None
) -> Problem:
    """Returns a step of many equal layers: chains of nodes, skips, a hub in each layer, matrices that are one array.

    Args:
      seed: equal seeds give equal problems.
      layers: how often the layer is repeated.
      width: nodes of a layer.
      most: strategies of a node at most.
      binding: the memory limit as a share of what the cheapest strategies would use together; None for no limit.
    """
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, most + 1, width)
    node_cost = [rng.exponential(1e-3, size) * (rng.random(size) < 0.5) for size in sizes]
    links = [(i, i + 1) for i in range(width - 1)]
    links += [(int(rng.integers(i)), i) for i in range(2, width, 3)]
    hub = int(rng.integers(width))
    links += [(hub, i) for i in range(width) if abs(i - hub) > 1 and i % 5 == 0]
    links = sorted({tuple(sorted(link)) for link in links})
    matrices = {link: _reshards(rng, sizes[link[0]], sizes[link[1]]) for link in links}
    onward = _reshards(rng, sizes[-1], sizes[0])
    usage = [rng.choice([1, 2, 4, 8], size) * 1e6 for size in sizes]
    edges, costs = [], []
    for layer in range(layers):
        edges += [(layer * width + u, layer * width + v) for u, v in links]
        costs += [matrices[link] for link in links]
        if layer:
            edges.append((layer * width - 1, layer * width))
            costs.append(onward)
    count = layers * width
    intervals = np.stack(
        [np.arange(count), np.minimum(np.arange(count) + 1 + rng.integers(1, width, count), count + 1)]
    )
    limit = np.inf
    if binding is not None:
        cheapest = np.tile([table[cost.argmin()] for table, cost in zip(usage, node_cost, strict=True)], layers)
        limit = binding * memory_profile(intervals.T, cheapest[:, None], count + 1).max()
    return Problem(
        node_cost=node_cost * layers,
        edge_nodes=np.array(edges),
        edge_cost=costs,
        usage_node=np.arange(count),
        usage=usage * layers,
        usage_interval=intervals.T,
        memory_limit=limit,
    )


def _reshards(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Returns zero where source and target agree, else one of few prices, as between layouts."""
    prices = rng.choice([1e-4, 5e-4, 2e-3, 1e-2], (rows, columns))
    kinds = rng.integers(4, size=rows)[:, None] == rng.integers(4, size=columns)[None]
    return np.where(kinds, 0.0, prices)

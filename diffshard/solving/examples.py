"""Two small problems, one without and one with what joins all nodes: each solver's `EXAMPLE` is one of them."""

import numpy as np

from cost.base import FORBIDDEN, Problem

_NUM_STRATEGIES = 3


def chain(num_nodes: int = 5) -> Problem:
    """Returns a chain of nodes with three strategies each; nothing but its edges joins them."""
    node, strategy = np.arange(num_nodes)[:, None], np.arange(_NUM_STRATEGIES)
    edges = np.stack([np.arange(num_nodes - 1), np.arange(1, num_nodes)], axis=1)
    return Problem(
        node_cost=list(((3 * node + 5 * strategy) % 7).astype(float)),
        edge_nodes=edges,
        edge_cost=[_transfer(u) for u, _ in edges.tolist()],
    )


def coupled_ring(num_nodes: int = 5) -> Problem:
    """Returns a ring with memory that binds, loads of two devices, and a forbidden pair of strategies."""
    line = chain(num_nodes)
    node, strategy = np.arange(num_nodes)[:, None], np.arange(_NUM_STRATEGIES)
    closing = _transfer(num_nodes)
    closing[0, 0] = FORBIDDEN
    first, second = (node + 2 * strategy) % 4, (2 * node + strategy) % 3
    return line._replace(
        edge_nodes=np.concatenate([line.edge_nodes, [[num_nodes - 1, 0]]]),
        edge_cost=[*line.edge_cost, closing],
        usage_node=np.arange(num_nodes),
        usage=list(1.0 + (2 * node + strategy) % 3),
        usage_interval=np.stack([np.arange(num_nodes), np.arange(num_nodes) + 3], axis=1),
        memory_limit=5.0,
        load=list(np.stack([first, second], axis=2).astype(float)),
    )


def _transfer(seed: int) -> np.ndarray:
    row, column = np.arange(_NUM_STRATEGIES)[:, None], np.arange(_NUM_STRATEGIES)
    return ((2 * row + 3 * column + seed) % 5).astype(float)

"""The one representation of everything searchable, and what a choice of strategies costs in it.

Letters for sizes: V nodes, S_v strategies of node v, E edges, K usages, D devices that differ from each other.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Problem(NamedTuple):
    """Nodes with strategies, edges with transfer matrices, memory usages with live intervals, loads of devices.

    A choice is one strategy index for each node, `[V]` integers. Its cost is the sum of the chosen node costs and edge
    costs plus the largest device load; at every time the chosen usages that are live must fit the memory limit.
    Costs are in seconds and usages in bytes for our own spaces; contest instances have units of their own.

    Attributes:
      node_cost: V arrays `[S_v]`.
      edge_nodes: `[E, 2]` integers, the two ends u, v of each edge; u != v.
      edge_cost: E arrays `[S_u, S_v]`; edges with equal matrices may share one array.
      usage_node: `[K]` integers, the node that each usage belongs to; a node may have none or several.
      usage: K arrays `[S_v]` (the same on all devices) or `[S_v, D]`.
      usage_interval: `[K, 2]` integers, half-open `[start, end)` times at which the usage is live.
      memory_limit: a number, or `[D]` where devices differ; `inf` means no limit.
      load: V arrays `[S_v, D]`, seconds of each device's time, or `()` where all devices do equal work.
    """

    node_cost: Sequence[np.ndarray]
    edge_nodes: np.ndarray
    edge_cost: Sequence[np.ndarray]
    usage_node: np.ndarray
    usage: Sequence[np.ndarray]
    usage_interval: np.ndarray
    memory_limit: float | np.ndarray = np.inf
    load: Sequence[np.ndarray] = ()

"""What products gain in float8, in a space in which their strategies are there twice (`ShardingSpace.with_float8`)."""

from collections.abc import Sequence

import numpy as np

from cost.evaluation import change_costs
from search_spaces.sharding.edge_costs import edge_transfer_s
from search_spaces.sharding.space import ShardingSpace


def most_gains_s(space: ShardingSpace) -> dict[int, float]:
    """Returns what each product can gain at most, seconds, with any strategies of the others."""
    gains = {}
    for i in space.float8_price_s:
        exact_s, float8_s = np.split(space.node_costs.compute_s(space.graph.vertices[i], space.nodes[i].strategies), 2)
        gains[i] = exact_s - float8_s
    for edge in space.edges:
        if edge.reader in gains and edge.node != edge.reader:
            matrix = edge_transfer_s(edge, space.nodes, space.reshard_costs, space.node_costs.shares)
            exact_s, float8_s = np.split(matrix, 2, axis=1)
            gains[edge.reader] = gains[edge.reader] + np.max(exact_s - float8_s, axis=0)
    return {i: float(np.max(gain)) for i, gain in gains.items()}


def gains_s(space: ShardingSpace, choice: Sequence[int] | np.ndarray) -> dict[int, float]:
    """Returns what each product gains at a choice, seconds, with the other products as they are there."""
    added_s, gains = change_costs(space.problem, choice), {}
    for i, price_s in space.float8_price_s.items():
        count = _count(space, i)
        exact = choice[i] % count
        gains[i] = float(added_s[i][exact] - added_s[i][exact + count]) + price_s
    return gains


def in_own_formats(space: ShardingSpace, choice: Sequence[int] | np.ndarray) -> np.ndarray:
    """Returns a choice `[V]` with all products as they are; it means the same in the space without float8."""
    exact = np.array(choice)
    for i in space.float8_price_s:
        exact[i] %= _count(space, i)
    return exact


def in_float8(space: ShardingSpace, choice: np.ndarray, products: Sequence[int]) -> np.ndarray:
    """Returns a choice `[V]` of the space without float8 with these products in it."""
    choice = choice.copy()
    for i in products:
        choice[i] += _count(space, i)
    return choice


def _count(space: ShardingSpace, product: int) -> int:
    return len(space.nodes[product].strategies) // 2

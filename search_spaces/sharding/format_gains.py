"""What products gain in fewer bits, in a space in which their strategies are there again for each format."""

from collections.abc import Iterable, Sequence

import numpy as np

from cost.evaluation import change_costs
from search_spaces.sharding.edge_costs import edge_transfer_s
from search_spaces.sharding.product_formats import FormattedProduct
from search_spaces.sharding.space import ShardingSpace


def most_gains_s(space: ShardingSpace) -> dict[FormattedProduct, float]:
    """Returns what each product can gain at most in each format, seconds, with any strategies of the others."""
    gains = {}
    for i, names in space.formats_of.items():
        seconds = space.node_costs.compute_s(space.graph.vertices[i], space.nodes[i].strategies)
        exact_s, *formatted_s = np.split(seconds, 1 + len(names))
        gains[i] = exact_s - np.array(formatted_s)  # [formats, strategies]
    for edge in space.edges:
        if edge.reader in gains and edge.node != edge.reader:
            matrix = edge_transfer_s(edge, space.nodes, space.reshard_costs, space.node_costs.shares)
            exact_s, *formatted_s = np.split(matrix, 1 + len(gains[edge.reader]), axis=1)
            gains[edge.reader] = gains[edge.reader] + np.max(exact_s - np.array(formatted_s), axis=1)
    return {
        (i, name): float(np.max(gain))
        for i, of_formats in gains.items()
        for name, gain in zip(space.formats_of[i], of_formats, strict=True)
    }


def gains_s(space: ShardingSpace, choice: Sequence[int] | np.ndarray) -> dict[FormattedProduct, float]:
    """Returns what each product gains in each format at a choice, seconds, with the others as they are there."""
    added_s, gains = change_costs(space.problem, choice), {}
    for i, names in space.formats_of.items():
        count = _count(space, i)
        exact = choice[i] % count
        for number, name in enumerate(names, 1):
            gains[i, name] = float(added_s[i][exact] - added_s[i][exact + number * count])
            gains[i, name] += space.format_price_s[i, name]
    return gains


def best_gains_s(space: ShardingSpace, choice: Sequence[int] | np.ndarray) -> dict[FormattedProduct, float]:
    """Returns of each product the format that gains most at a choice, less its price, if any gains; and these gains."""
    best: dict[int, tuple[float, str]] = {}
    for (i, name), gain_s in gains_s(space, choice).items():
        net_s = gain_s - space.format_price_s[i, name]
        if net_s > best.get(i, (0.0, ""))[0]:
            best[i] = net_s, name
    return {(i, name): net_s for i, (net_s, name) in best.items()}


def in_own_formats(space: ShardingSpace, choice: Sequence[int] | np.ndarray) -> np.ndarray:
    """Returns a choice `[V]` with all products as they are; it means the same in the space without formats."""
    exact = np.array(choice)
    for i in space.formats_of:
        exact[i] %= _count(space, i)
    return exact


def in_formats(space: ShardingSpace, choice: np.ndarray, products: Iterable[FormattedProduct]) -> np.ndarray:
    """Returns a choice `[V]` of the space without formats with these products in them."""
    choice = choice.copy()
    for i, name in products:
        choice[i] += (1 + space.formats_of[i].index(name)) * _count(space, i)
    return choice


def _count(space: ShardingSpace, product: int) -> int:
    return len(space.nodes[product].strategies) // (1 + len(space.formats_of[product]))

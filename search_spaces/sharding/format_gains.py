"""What products and sums gain in fewer bits, in a space in which their strategies are there again for each format."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from search_spaces.sharding.base import Coded, Edge, FormatKey, in_format, without_formats
from search_spaces.sharding.space import ShardingSpace


def most_gains_s(space: ShardingSpace) -> dict[FormatKey, float]:
    """Returns the most seconds that each product and sum can gain in each format, with any strategies of the others.

    A sum gains the time that its link is busy less, whatever part of it the step waits for: links may bound the step.
    """
    coded: dict[FormatKey, float] = {}
    for key in space.format_price_s:
        if isinstance(key, Coded) and key.kind == "sum":
            coded[key] = _most_gain_of_sum_s(space, key)
    coded |= _most_gains_of_exchanges_s(space)
    space = space.with_formats({k: price_s for k, price_s in space.format_price_s.items() if not isinstance(k, Coded)})
    gains = {}
    for i, names in space.formats_of.items():
        seconds = space.node_costs.compute_s(space.graph.vertices[i], space.nodes[i].strategies)
        exact_s, *formatted_s = np.split(seconds, 1 + len(names))
        gains[i] = exact_s - np.array(formatted_s)  # [formats, strategies]
    for edge in space.edges:
        if edge.reader in gains and edge.node != edge.reader:
            matrix = space.edge_costs.transfer_s(edge, space.nodes)
            exact_s, *formatted_s = np.split(matrix, 1 + len(gains[edge.reader]), axis=1)
            gains[edge.reader] = gains[edge.reader] + np.max(exact_s - np.array(formatted_s), axis=1)
    products: dict[FormatKey, float] = {
        (i, name): float(np.max(gain))
        for i, of_formats in gains.items()
        for name, gain in zip(space.formats_of[i], of_formats, strict=True)
    }
    return coded | products


def _most_gains_of_exchanges_s(space: ShardingSpace) -> dict[Coded, float]:
    keys = [key for key in space.format_price_s if isinstance(key, Coded) and key.kind == "exchange"]
    space = space.with_formats(dict.fromkeys(keys, 0.0))
    edges: dict[int, list[Edge]] = {}
    for edge in space.edges if keys else ():
        if edge.node < len(space.graph.vertices):
            edges.setdefault(edge.node, []).append(edge)
    gains = {}
    for key in keys:
        node, (edge,) = space.node_of(key), edges[key.vertex]  # to its shared reshard, or its only reader
        matrix = space.edge_costs.transfer_s(edge, space.nodes)
        matrix = matrix if node == edge.node else matrix.T
        numbers = space.strategy_numbers(node)
        pairs = [(numbers[in_format(s, key, "")], t) for s, t in numbers.items() if s.exchanged_in == key.format]
        exact, coded = np.array(pairs).T
        gains[key] = float(np.max(matrix[exact] - matrix[coded], initial=0.0))
    return gains


def _most_gain_of_sum_s(space: ShardingSpace, coded: Coded) -> float:
    vertex, costs = space.graph.vertices[coded.vertex], space.node_costs
    exposed, gains = costs.shares.exposed(vertex.results[0]), [0.0]
    for strategy in space.nodes[coded.vertex].strategies:
        if strategy.sent_in == coded.format and not strategy.format:
            exact_s = costs.reduction_s(vertex, strategy._replace(sent_in=""))
            gains.append((exact_s / exposed if exposed else 0.0) - costs.finish_s(vertex, strategy))
    return max(gains)


def gains_s(space: ShardingSpace, choice: Sequence[int] | np.ndarray) -> dict[FormatKey, float]:
    """Returns the seconds that each product and sum gains in each format at a choice, with the others as they are."""
    at_choice, gains = _AtChoice(space, choice), {}
    for key, price_s in space.format_price_s.items():
        node = space.node_of(key)
        strategy, numbers = space.nodes[node].strategies[choice[node]], space.strategy_numbers(node)
        exact, changed = numbers[in_format(strategy, key, "")], numbers.get(in_format(strategy, key))
        gains[key] = 0.0 if changed is None else at_choice.saved_s(node, exact, changed) + price_s
    return gains


class _AtChoice:
    """Prices of two strategies of a node among the chosen ones of its neighbours."""

    def __init__(self, space: ShardingSpace, choice: Sequence[int] | np.ndarray):
        self._space, self._choice = space, choice
        nodes = {*map(space.node_of, space.format_price_s), *space.shared_formats}
        self._edges_of: dict[int, list[Edge]] = {node: [] for node in nodes}
        for edge in space.edges:
            for node in {edge.node, edge.reader} if edge.node != edge.reader else ():
                if node in self._edges_of:
                    self._edges_of[node].append(edge)

    def saved_s(self, node: int, before: int, after: int) -> float:
        """Returns by how many seconds a strategy of a node is cheaper than another, with its edges."""
        own_s = self._space.node_costs.node_s(self._space.nodes[node])
        edges_s = (self._edge_s(edge, node) for edge in self._edges_of[node])
        return float(own_s[before] - own_s[after]) + sum(float(s[before] - s[after]) for s in edges_s)

    def _edge_s(self, edge: Edge, node: int) -> np.ndarray:
        """Returns the seconds of an edge of a node for each of its strategies."""
        seconds = self._space.edge_costs.transfer_s(edge, self._space.nodes)
        return seconds[:, self._choice[edge.reader]] if edge.node == node else seconds[self._choice[edge.node]]


def gains_together_s(space: ShardingSpace, choice: Sequence[int] | np.ndarray) -> dict[FormatKey, float]:
    """Returns the seconds that each gains in each format at a choice, if others share the roundings that they can."""
    names = dict.fromkeys(name for own in space.shared_formats.values() for name in own)
    shared = {name: gains_s(space, _with_shared_reshards_in(space, choice, name)) for name in names}
    own = gains_s(space, choice)
    return {key: gain_s if isinstance(key, Coded) else shared.get(key[1], own)[key] for key, gain_s in own.items()}


def best_formats(space: ShardingSpace, choice: Sequence[int] | np.ndarray) -> tuple[list[FormatKey], float]:
    """Returns of each the format that gains most at a choice, less its price, if any gains; and the seconds saved."""
    best: dict[Any, tuple[float, FormatKey]] = {}
    for key, gain_s in gains_together_s(space, choice).items():
        net_s, place = gain_s - space.format_price_s[key], (key[0], key[2:])
        if net_s > 0 and (place not in best or net_s > best[place][0]):
            best[place] = net_s, key
    chosen = in_formats(space, np.array(choice), [key for _, key in best.values()])
    gains = gains_s(space, chosen)  # some may share with none
    keys = [key for _, key in best.values() if gains[key] > space.format_price_s[key]]
    at_choice, saved_s = _AtChoice(space, choice), sum(gains[key] - space.format_price_s[key] for key in keys)
    for node in space.shared_formats:
        saved_s += at_choice.saved_s(node, int(choice[node]), int(chosen[node]))
    return keys, saved_s


def _with_shared_reshards_in(space: ShardingSpace, choice: Sequence[int] | np.ndarray, name: str) -> np.ndarray:
    """Returns a choice in which all shared reshards that can round their values to a format do."""
    choice = np.array(choice)
    for node in space.shared_formats:
        strategy = space.nodes[node].strategies[choice[node]]
        choice[node] = space.strategy_numbers(node).get(strategy._replace(format=name), choice[node])
    return choice


def in_own_formats(space: ShardingSpace, choice: Sequence[int] | np.ndarray) -> np.ndarray:
    """Returns a choice `[V]` with everything as it is; it means the same in the space without formats."""
    exact = np.array(choice)
    for node in {*map(space.node_of, space.format_price_s), *space.shared_formats}:
        strategy = space.nodes[node].strategies[choice[node]]
        exact[node] = space.strategy_numbers(node)[without_formats(strategy)]
    return exact


def in_formats(space: ShardingSpace, choice: np.ndarray, keys: Iterable[FormatKey]) -> np.ndarray:
    """Returns a choice `[V]` of the space without formats with these in fewer bits, where strategies have that."""
    choice = choice.copy()
    for key in keys:
        node = space.node_of(key)
        numbers, strategy = space.strategy_numbers(node), space.nodes[node].strategies[choice[node]]
        choice[node] = numbers.get(in_format(strategy, key), choice[node])
    return with_shared_rounding(space, choice)


def with_shared_rounding(space: ShardingSpace, choice: np.ndarray) -> np.ndarray:
    """Returns a choice in which shared reshards round their values for several products where that is faster."""
    choice, at_choice = choice.copy(), _AtChoice(space, choice)
    for node, names in space.shared_formats.items():
        strategy, numbers = space.nodes[node].strategies[choice[node]], space.strategy_numbers(node)
        ways = [numbers[strategy._replace(format=n)] for n in ("", *names) if strategy._replace(format=n) in numbers]
        choice[node] = max(ways, key=lambda way: at_choice.saved_s(node, ways[0], way))
    return choice

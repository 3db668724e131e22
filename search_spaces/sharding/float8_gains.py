"""What products gain in float8 and sums in codes, in a space that has strategies for them (`with_formats`)."""

from collections.abc import Iterable, Sequence

import numpy as np

from cost.evaluation import change_costs
from search_spaces.sharding.base import Coded, FormatKey, ShardingStrategy
from search_spaces.sharding.edge_costs import edge_transfer_s
from search_spaces.sharding.space import ShardingSpace


def most_gains_s(space: ShardingSpace) -> dict[FormatKey, float]:
    """Returns what each product and each sum can gain at most, seconds, with any strategies of the others.

    A sum gains what its link is busy less, whatever part of that the step waits for: links may be what bounds the step.
    """
    gains = {}
    exact = space.with_codes({})
    for i in exact.float8_price_s:
        exact_s, float8_s = np.split(exact.node_costs.compute_s(exact.graph.vertices[i], exact.nodes[i].strategies), 2)
        gains[i] = exact_s - float8_s
    for edge in exact.edges:
        if edge.reader in gains and edge.node != edge.reader:
            matrix = edge_transfer_s(edge, exact.nodes, exact.reshard_costs, exact.node_costs.shares)
            exact_s, float8_s = np.split(matrix, 2, axis=1)
            gains[edge.reader] = gains[edge.reader] + np.max(exact_s - float8_s, axis=0)
    most: dict[FormatKey, float] = {i: float(np.max(gain)) for i, gain in gains.items()}
    return most | {coded: _most_gain_of_sum_s(space, coded) for coded in space.code_price_s}


def _most_gain_of_sum_s(space: ShardingSpace, coded: Coded) -> float:
    vertex, costs = space.graph.vertices[coded.index], space.node_costs
    exposed, gains = costs.shares.exposed(vertex.results[0]), [0.0]
    for strategy in space.nodes[coded.index].strategies:
        if strategy.sent_in == coded.format and not strategy.in_float8:
            exact = strategy._replace(sent_in="")
            waited_s = costs.reduction_s(vertex, exact) - costs.reduction_s(vertex, strategy)
            coding_s = costs.finish_s(vertex, strategy) - costs.reduction_s(vertex, strategy)
            gains.append((waited_s / exposed if exposed else 0.0) - coding_s)
    return max(gains)


def gains_s(space: ShardingSpace, choice: Sequence[int] | np.ndarray) -> dict[FormatKey, float]:
    """Returns what each product and sum gains at a choice, seconds, with all others as they are there."""
    added_s, gains = change_costs(space.problem, choice), {}
    for key, price_s in {**space.float8_price_s, **space.code_price_s}.items():
        node = _node(key)
        strategy, numbers = space.nodes[node].strategies[choice[node]], _numbers(space, node)
        exact, changed = numbers[_own(strategy, key)], numbers.get(_changed(strategy, key))
        gains[key] = 0.0 if changed is None else float(added_s[node][exact] - added_s[node][changed]) + price_s
    return gains


def in_own_formats(space: ShardingSpace, choice: Sequence[int] | np.ndarray) -> np.ndarray:
    """Returns a choice `[V]` with everything as it is; it means the same in the space without formats."""
    exact = np.array(choice)
    for node in {*map(_node, space.float8_price_s), *map(_node, space.code_price_s)}:
        strategy = space.nodes[node].strategies[choice[node]]
        exact[node] = _numbers(space, node)[strategy._replace(in_float8=False, sent_in="")]
    return exact


def in_float8(space: ShardingSpace, choice: np.ndarray, keys: Iterable[FormatKey]) -> np.ndarray:
    """Returns a choice `[V]` with some products in float8 and some sums in codes, where strategies have these.

    Args:
      space: with strategies for them.
      choice: `[V]`.
      keys: what is to be in fewer bits; of several formats of one sum the last one counts.
    """
    choice = choice.copy()
    for key in keys:
        node = _node(key)
        changed = _numbers(space, node).get(_changed(space.nodes[node].strategies[choice[node]], key))
        choice[node] = choice[node] if changed is None else changed
    return choice


def _node(key: FormatKey) -> int:
    return key.index if isinstance(key, Coded) else key


def _own(strategy: ShardingStrategy, key: FormatKey) -> ShardingStrategy:
    return strategy._replace(sent_in="") if isinstance(key, Coded) else strategy._replace(in_float8=False)


def _changed(strategy: ShardingStrategy, key: FormatKey) -> ShardingStrategy:
    return strategy._replace(sent_in=key.format) if isinstance(key, Coded) else strategy._replace(in_float8=True)


def _numbers(space: ShardingSpace, node: int) -> dict[ShardingStrategy, int]:
    return space.strategy_numbers(node)

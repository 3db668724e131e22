"""Finds the equal layers of a function: vertices at the same place of a stretch of the program that is repeated.

A traced function lists its equations in the order in which they run, so equal layers are stretches of the list that
repeat: one in the forward pass, one in the backward pass, some in the optimiser. They are found without names and
without searching for isomorphic graphs: a stretch repeats with period p where each vertex is like the one p places
later. Arguments follow from the vertices that read them.
"""

import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import lru_cache

import numpy as np

from search_spaces.sharding.base import Node, Rule
from search_spaces.sharding.graph import Graph, Operand, Value, Vertex

_NEIGHBOURS_COMPARED = 4  # vertices that must be equal one after the other before their distance counts as a period
_MOST_PERIODS = 64  # distances that are tried, the most frequent ones; chosen by hand on training steps
_LEAST_INNER_SHARE = 0.5  # of a period that a repetition inside it must fill: query and key of a layer do not count
_NUMBER = re.compile(r"\d+")


def tied_nodes(
    graph: Graph, forms: Sequence[int], nodes: Sequence[Node], shared_reshards: Mapping[int, int]
) -> np.ndarray:
    """Returns `[V]` numbers of the nodes of a space, equal for nodes at the same place of equal layers.

    Nodes of equal numbers have the same strategies.

    Args:
      nodes: of the space: the vertices, then the shared reshards.
      shared_reshards: the index of the node of a value's shared reshard, by the value's id.
    """
    group = tied_vertices(graph, forms)
    node_group = np.arange(len(nodes))
    node_group[: len(group)] = group
    first_shared: dict[tuple[int, int], int] = {}
    for value in graph.values:
        if value.id in shared_reshards:
            place = int(group[value.vertex]), value.result
            node_group[shared_reshards[value.id]] = first_shared.setdefault(place, shared_reshards[value.id])
    distinct = {id(node.strategies): node.strategies for node in nodes}
    first: dict[Hashable, int] = {}
    number = {name: first.setdefault(strategies, len(first)) for name, strategies in distinct.items()}
    strategies = [number[id(node.strategies)] for node in nodes]
    return np.unique(np.stack([node_group, strategies]), axis=1, return_inverse=True)[1].ravel()


def tied_vertices(graph: Graph, forms: Sequence[int]) -> np.ndarray:
    """Returns for each vertex the index of the first one that is at the same place of an equal layer, `[vertices]`."""
    names: dict[Hashable, int] = {}
    symbols = np.array([names.setdefault(_named(v, forms[v.index]), len(names)) for v in graph.vertices], np.int64)
    group = np.arange(len(symbols))
    inside = np.array([v.kind not in ("input", "constant") for v in graph.vertices], bool)
    place = np.flatnonzero(inside)
    for start, stop, period in _nested_repetitions(symbols[place]):
        for i in range(start + period, stop):
            group[place[i]] = group[place[i - period]]
    _join_arguments(graph, symbols, group)
    return group


def _nested_repetitions(symbols: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Yields stretches that repeat; what fills most of a period by repeating itself comes before its stretch.

    Adam does the same to the first moments of all layers as to the second ones, so that both are periods of one
    stretch, in which the layers repeat.
    """
    for start, stop, period in repetitions(symbols):
        for first, last, inner in repetitions(symbols[start : start + period]):
            if last - first > _LEAST_INNER_SHARE * period:
                yield start + first, start + last, inner
        yield start, stop, period


def repetitions(symbols: np.ndarray) -> list[tuple[int, int, int]]:
    """Finds stretches of a sequence that repeat at once, `symbols[i] == symbols[i + period]`.

    Args:
      symbols: `[n]` integers.

    Returns:
      (start, stop, period) of stretches that do not overlap, each at least two periods long. Longer stretches come
      first, of equal ones that of the shorter period; so what repeats inside a layer is left out.
    """
    runs = ((period, run) for period in _periods(symbols) for run in _runs(symbols, period))
    stretches = [(stop - start, period, start) for period, (start, stop) in runs]
    free = np.ones(len(symbols), bool)
    result = []
    for length, period, start in sorted(stretches, key=lambda s: (-s[0], s[1], s[2])):
        for first, last in _true_runs(free[start : start + length]):
            if last - first >= 2 * period:
                result.append((start + first, start + last, period))
                free[start + first : start + last] = False
    return result


def _periods(symbols: np.ndarray) -> list[int]:
    """Returns the most frequent distances from a few symbols to where the same few come next."""
    places: dict[bytes, int] = {}
    distances: Counter[int] = Counter()
    for i in range(len(symbols) - _NEIGHBOURS_COMPARED + 1):
        window = symbols[i : i + _NEIGHBOURS_COMPARED].tobytes()
        if window in places:
            distances[i - places[window]] += 1
        places[window] = i
    return [distance for distance, _ in distances.most_common(_MOST_PERIODS)]


def _runs(symbols: np.ndarray, period: int) -> Iterator[tuple[int, int]]:
    """Yields the longest stretches of at least two periods that repeat with a period."""
    for start, stop in _true_runs(symbols[period:] == symbols[:-period]):
        if stop - start >= period:
            yield start, stop + period


def _true_runs(flags: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yields the first position and the one after the last of each run of True."""
    changes = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    yield from zip(changes[::2].tolist(), changes[1::2].tolist(), strict=True)


def _join_arguments(graph: Graph, symbols: np.ndarray, group: np.ndarray) -> None:
    """Gives arguments of equal symbols that tied vertices read as the same operand one group; changes `group`."""
    first: dict[tuple[int, int, int], int] = {}
    for vertex in graph.vertices:
        for i, operand in enumerate(vertex.operands):
            if isinstance(operand, Value) and graph.vertices[operand.vertex].kind in ("input", "constant"):
                place = int(group[vertex.index]), i, int(symbols[operand.vertex])
                other = first.setdefault(place, operand.vertex)
                low, high = sorted((int(group[other]), int(group[operand.vertex])))
                if low != high:
                    group[group == high] = low


def _named(vertex: Vertex, form: int) -> Hashable:
    """Returns a key that equal vertices share: of what they compute, and of the names around them."""
    return form, _unnumbered(vertex.scope), _unnumbered(vertex.name)


@lru_cache(maxsize=10_000)
def _unnumbered(name: str) -> str:
    """Returns a name without the numbers in it, such as a layer's."""
    return _NUMBER.sub("#", name)


def forms_of(graph: Graph, rules: Sequence[Rule | None]) -> list[int]:
    """Returns a number for each vertex, equal where kind, equation, types and weights are equal, whatever is read.

    Equal equations are told by their rules, which `shardy.operation_rules` makes once for each; an operation without a
    rule has a form of its own.

    Args:
      rules: for each vertex its rule or None.
    """
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(_form(v, rules[v.index]), len(numbers)) for v in graph.vertices]


def _form(vertex: Vertex, rule: Rule | None) -> Hashable:
    has_own_form = vertex.kind == "operation" and rule is None
    return (
        vertex.kind, vertex.primitive, vertex.index if has_own_form else id(rule), vertex.weight,
        tuple(vertex.operand_weight), tuple(map(_type, vertex.operands)), tuple(map(_type, vertex.results)),
    )  # fmt: skip


def _type(array: Operand) -> Hashable:
    """Returns the shape and type of an array for the form of a vertex; literals of any number are equal."""
    if isinstance(array, Value):
        return array.shape, array.dtype
    return "literal", getattr(array.aval, "shape", ()), getattr(array.aval, "dtype", None)

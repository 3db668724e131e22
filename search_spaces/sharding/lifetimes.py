"""Which values of a graph are really written to memory, and from when to when they live.

A compiler fuses pointwise operations into the ones that read them, so most values of a jaxpr never exist; what a fused
operation reads must then live as long as the fusion that reads it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from search_spaces.sharding.graph import Graph, Value, Vertex
from search_spaces.sharding.rule import Rule

# Pointwise but dear: XLA does not compute them again for a second reader.
DEAR = frozenset(
    [
        "cos",
        "digamma",
        "div",
        "erf",
        "erf_inv",
        "erfc",
        "exp",
        "exp2",
        "expm1",
        "lgamma",
        "log",
        "log1p",
        "logistic",
        "pow",
        "random_bits",
        "rsqrt",
        "sin",
        "sqrt",
        "tan",
        "tanh",
        "threefry2x32",
        "cbrt",
    ]
)
CONTRACTIONS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})


class Lifetimes(NamedTuple):
    """Indexed by value id.

    Attributes:
      written: `[values]` booleans, whether the value exists in memory.
      interval: `[values, 2]` half-open positions at which it lives.
      first_use: `[values]` position of the first operation that reads it.
    """

    written: np.ndarray
    interval: np.ndarray
    first_use: np.ndarray


def is_pointwise(vertex: Vertex, rule: Rule | None) -> bool:
    """Whether each element of the result is made of one element of each operand (in any layout)."""
    if vertex.kind != "operation" or rule is None or vertex.equation is None:
        return False
    if vertex.equation.primitive.name in CONTRACTIONS or vertex.equation.effects:
        return False
    return not (rule.reduction or rule.permutation or rule.need_replication)


def lifetimes(graph: Graph, rules: Sequence[Rule | None], donated: Sequence[bool]) -> Lifetimes:
    """Which values are written and when they live.

    Args:
      graph: the traced function.
      rules: for each vertex its rule or None.
      donated: for each flat argument whether its memory may be used again.
    """
    consumers = graph.consumers()
    pointwise = [is_pointwise(v, rules[v.index]) for v in graph.vertices]
    ends = {o.id for o in graph.outputs if isinstance(o, Value)}
    written = np.ones(len(graph.values), bool)
    dies = np.array([v.dies for v in graph.values], int)
    for value in reversed(graph.values):
        readers = consumers[value.id]
        vertex = graph.vertices[value.vertex]
        if pointwise[vertex.index] and value.id not in ends and readers:
            written[value.id] = not _fuses(vertex, readers, pointwise)
        for reader, _ in readers:
            if pointwise[reader.index] and not written[reader.results[0].id]:
                dies[value.id] = max(dies[value.id], dies[reader.results[0].id])
    interval = np.stack([[v.born for v in graph.values], dies + 1], axis=1) if graph.values else np.zeros((0, 2), int)
    for vertex, gives in zip(graph.inputs, donated, strict=True):
        value = vertex.results[0].id
        if not gives or value in ends:
            interval[value, 1] = graph.length + 1
    for vertex in graph.constants:
        interval[vertex.results[0].id, 1] = graph.length + 1
    for vertex in graph.vertices:
        if vertex.kind == "carry":  # one buffer for what the body reads and what the loop leaves
            inside, outside = (r.id for r in vertex.results)
            interval[inside, 1] = max(interval[inside, 1], interval[outside, 1])
            written[outside] = False
    interval += 1  # inputs are born at -1
    first = np.array([min((c.position for c, _ in consumers[v.id]), default=v.born) for v in graph.values], int)
    return Lifetimes(written, interval, first + 1)


def _fuses(vertex: Vertex, readers: Sequence[tuple[Vertex, int]], pointwise: Sequence[bool]) -> bool:
    assert vertex.equation is not None
    if vertex.equation.primitive.name in DEAR and len(readers) > 1:
        return False
    return all(_takes_fused(reader, pointwise[reader.index]) for reader, _ in readers)


def _takes_fused(reader: Vertex, pointwise: bool) -> bool:
    if pointwise:
        return True
    return reader.equation is not None and reader.equation.primitive.name.startswith(("reduce_", "argm"))

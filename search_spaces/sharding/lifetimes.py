"""Which values of a graph are really written to memory, and from when to when they live.

A compiler fuses pointwise operations into the ones that read them, so most values of a jaxpr never exist; what a fused
operation reads must then live as long as the fusion that reads it. A fusion writes its result over an operand of the
same size that nobody reads afterwards.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from search_spaces.sharding.graph import REMAT, Block, Graph, Value, Vertex
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
# A contraction reads its operands in any layout, so these before it move nothing.
VIEWS = frozenset({"transpose", "reshape", "squeeze", "expand_dims"})
# Not pointwise, but written over their first operand.
UPDATES = ("scatter", "dynamic_update_slice")


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
    fusing = _Fusing(graph, [is_pointwise(v, rules[v.index]) for v in graph.vertices])
    ends = {o.id for o in graph.outputs if isinstance(o, Value)}
    written = np.ones(len(graph.values), bool)
    dies = np.array([v.dies for v in graph.values], int)
    for value in reversed(graph.values):
        readers = consumers[value.id]
        if value.id not in ends and readers:
            written[value.id] = not fusing.fuses(graph.vertices[value.vertex], [r for r, _ in readers])
        for reader, _ in readers:
            if fusing.pointwise[reader.index] and not written[reader.results[0].id]:
                dies[value.id] = max(dies[value.id], dies[reader.results[0].id])
    interval = np.stack([[v.born for v in graph.values], dies + 1], axis=1) if graph.values else np.zeros((0, 2), int)
    for overwritten in fusing.overwritten(written, dies):
        interval[overwritten.id, 1] = max(interval[overwritten.id, 1] - 1, overwritten.born + 1)
    kept = [v for v, gives in zip(graph.inputs, donated, strict=True) if not gives or v.results[0].id in ends]
    for vertex in (*kept, *graph.constants):
        interval[vertex.results[0].id, 1] = graph.length + 1
    for vertex in graph.vertices:
        if vertex.kind == "carry":  # one buffer for what the body reads and what the loop leaves
            inside, outside = (r.id for r in vertex.results)
            interval[inside, 1] = max(interval[inside, 1], interval[outside, 1])
            written[outside] = False
    interval += 1  # inputs are born at -1
    first = np.array([min((c.position for c, _ in consumers[v.id]), default=v.born) for v in graph.values], int)
    return Lifetimes(written, interval, first + 1)


class _Fusing:
    """What goes into the fusion of its reader, and what a fusion writes over."""

    def __init__(self, graph: Graph, pointwise: Sequence[bool]):
        self.graph, self.pointwise = graph, pointwise
        self.body = dict(_bodies(graph.block, 0))

    def fuses(self, vertex: Vertex, readers: Sequence[Vertex]) -> bool:
        """Whether a vertex is computed inside each of its readers; a loop reads what is before it from memory."""
        if not self.pointwise[vertex.index]:
            return False
        assert vertex.equation is not None
        if vertex.equation.primitive.name in DEAR and len(readers) > 1:
            return False
        body = self.body.get(vertex.index)
        return all(self.body.get(r.index) == body and self._takes(r, vertex) for r in readers)

    def _takes(self, reader: Vertex, vertex: Vertex) -> bool:
        if self.pointwise[reader.index]:
            return True
        if reader.equation is None or reader.kind != "operation" or vertex.equation is None:
            return False
        name = reader.equation.primitive.name
        if name in CONTRACTIONS:
            return vertex.equation.primitive.name in VIEWS
        return name.startswith(("reduce_", "argm"))

    def overwritten(self, written: np.ndarray, dies: np.ndarray) -> Iterator[Value]:
        """Values that the operation which reads them last writes its result over."""
        for vertex in self.graph.operations():
            result = vertex.results[0] if vertex.results else None
            if result is None or not result.shape or not written[result.id]:
                continue
            for value in self._read(vertex, written):
                if dies[value.id] == vertex.position and value.num_bytes == result.num_bytes:
                    yield value
                    break

    def _read(self, vertex: Vertex, written: np.ndarray) -> Iterator[Value]:
        """Operands in memory that a vertex could write over, those of what is fused into it included."""
        assert vertex.equation is not None
        operands = [o for o in vertex.operands if isinstance(o, Value)]
        if vertex.equation.primitive.name.startswith(UPDATES):
            operands = operands[:1]
        elif not self.pointwise[vertex.index]:
            return
        for operand in operands:
            if written[operand.id]:
                yield operand
            else:
                yield from self._read(self.graph.vertices[operand.vertex], written)


def _bodies(block: Block, number: int) -> Iterator[tuple[int, int]]:
    """The loop or branch that each vertex runs in, as a number; a rematerialised region is no border."""
    for step in block.steps:
        if isinstance(step, Vertex):
            yield step.index, number
            continue
        border = step.equation.primitive.name not in REMAT
        for i, inner in enumerate(step.blocks):
            yield from _bodies(inner, hash((id(step), i)) if border else number)

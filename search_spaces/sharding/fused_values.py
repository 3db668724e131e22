"""What a compiler computes inside the operations that read it, so that it never is in memory, and what they overwrite.

What counts as fused is less than `fusion.py` says, so that the peak errs on the side of more memory: an expensive
operation with several readers is written.
"""

from collections.abc import Iterator, Sequence
from itertools import count

import numpy as np

from cost.compute import CONTRACTIONS
from search_spaces.replay import REMAT
from search_spaces.sharding.base import Rule
from search_spaces.sharding.fusion import PICKS, VIEWS
from search_spaces.sharding.graph import Block, Graph, Value, Vertex, copies_over_host_link, leads_to_contraction
from search_spaces.sharding.opaque.operations import opaque_of

# Pointwise but expensive: XLA does not compute them again for a second reader.
_NEVER_RECOMPUTED = frozenset(
    (
        *("cbrt", "cos", "digamma", "div", "erf", "erf_inv", "erfc", "expm1", "lgamma", "log", "log1p"),
        *("log2", "logistic", "pow", "random_bits", "rsqrt", "sin", "sqrt", "tan", "tanh", "threefry2x32"),
    )
)
# Computed again for a second reader, as the derivative of a cross-entropy is, but not for the four of an attention's.
_RECOMPUTED_ONCE = ("exp", "exp2")
# Not pointwise, but written over their first operand.
IN_PLACE = ("scatter", "dynamic_update_slice")


def is_pointwise(vertex: Vertex, rule: Rule | None) -> bool:
    """Tells whether each element of the result is made of one element of each operand, in any layout.

    A dimension of one element may be broadcast.
    """
    if vertex.kind != "operation" or rule is None or vertex.equation is None:
        return False
    if vertex.primitive == "broadcast_in_dim" and not any(isinstance(o, Value) and o.shape for o in vertex.operands):
        return True  # copies of one number
    if copies_over_host_link(vertex):
        return False
    if vertex.primitive in CONTRACTIONS or vertex.equation.effects or opaque_of(vertex) is not None:
        return False
    if rule.reduction or rule.permutation:
        return False
    is_update = vertex.primitive.startswith(IN_PLACE)
    return not rule.need_replication or (not is_update and all(rule.sizes[f] == 1 for f in rule.need_replication))


class Fusing:
    """What goes into the fusion of its reader, and what a fusion writes over."""

    def __init__(self, graph: Graph, pointwise: Sequence[bool]):
        self.graph, self.pointwise = graph, pointwise
        self.body_of_vertex = dict(_body_numbers(graph.block, 0, count(1)))
        self.leads_to_contraction = leads_to_contraction(graph)
        self.views_in_products: set[int] = set()

    def fuses(self, vertex: Vertex, readers: Sequence[Vertex]) -> bool:
        """Tells whether a vertex is computed inside each of its readers; a loop reads what is before it from memory."""
        if not self.pointwise[vertex.index]:
            return False
        assert vertex.equation is not None
        if len(readers) > 1 and vertex.primitive in _NEVER_RECOMPUTED:
            return False
        if len(readers) > 2 and vertex.primitive in _RECOMPUTED_ONCE:
            return False
        body = self.body_of_vertex.get(vertex.index)
        if not all(self.body_of_vertex.get(r.index) == body and self._takes(r, vertex) for r in readers):
            return False
        if any(r.primitive in CONTRACTIONS or r.index in self.views_in_products for r in readers):
            self.views_in_products.add(vertex.index)
        return True

    def _takes(self, reader: Vertex, vertex: Vertex) -> bool:
        if reader.index in self.views_in_products:
            return vertex.primitive in VIEWS
        if self.pointwise[reader.index]:
            return True
        if reader.equation is None or reader.kind != "operation" or vertex.equation is None:
            return False
        name = reader.equation.primitive.name
        if name in CONTRACTIONS:
            return vertex.equation.primitive.name in VIEWS
        return name in PICKS or name.startswith(("reduce_", "argm"))

    def overwritten(self, is_written: np.ndarray, last_read: np.ndarray) -> Iterator[Value]:
        """Yields values that the operation which reads them last writes its result over."""
        for vertex in self.graph.operations():
            result = vertex.results[0] if vertex.results else None
            if result is None or not result.shape or not is_written[result.id]:
                continue
            for value in self._read_operands(vertex, is_written):
                is_last = last_read[value.id] == vertex.position and not self._is_looked_up(value, is_written)
                if is_last and value.num_bytes == result.num_bytes:
                    yield value
                    break

    def _is_looked_up(self, value: Value, is_written: np.ndarray) -> bool:
        """Tells whether elements are looked up in a value for results alone, which a compiler may put off.

        Such are the logits of labels, which only the loss needs.
        """
        readers = [reader for reader, _ in self.graph.consumers()[value.id]]
        return any(
            (reader.primitive == "gather" and not self.leads_to_contraction[reader.index])
            or (
                self.pointwise[reader.index]
                and any(self._is_looked_up(r, is_written) for r in reader.results if not is_written[r.id])
            )
            for reader in readers
        )

    def _read_operands(self, vertex: Vertex, is_written: np.ndarray) -> Iterator[Value]:
        """Yields operands in memory that a vertex could write over, those of what is fused into it included."""
        assert vertex.equation is not None
        operands = [o for o in vertex.operands if isinstance(o, Value)]
        if vertex.equation.primitive.name.startswith(IN_PLACE):
            operands = operands[:1]
        elif not self.pointwise[vertex.index]:
            return
        for operand in operands:
            if is_written[operand.id]:
                yield operand
            else:
                yield from self._read_operands(self.graph.vertices[operand.vertex], is_written)


def _body_numbers(block: Block, number: int, fresh_numbers: Iterator[int]) -> Iterator[tuple[int, int]]:
    """Yields each vertex with the number of the loop body or branch in which it runs.

    Rematerialised regions are no bodies of their own; their vertices have the number of what surrounds them.
    """
    for step in block.steps:
        if isinstance(step, Vertex):
            yield step.index, number
            continue
        is_body = step.equation.primitive.name not in REMAT
        for inner in step.blocks:
            yield from _body_numbers(inner, next(fresh_numbers) if is_body else number, fresh_numbers)

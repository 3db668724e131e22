"""Which operations a compiler for GPUs computes inside their readers' kernels, so that their results never exist.

Values are visited from the last to the first. One goes into all kernels that read it or into none: with several it is
computed again in each, which pays where it moves no more bytes than writing the value and reading it back. So both
reductions of a softmax, and the division after them, start from the scores, and no exponential is ever written.

Source: XLA, xla/service/gpu/transforms/priority_fusion.cc (a producer goes into all of its consumers if that takes less
time) and xla/service/gpu/gpu_fusible.cc (what can be computed where).

For the peak of memory less counts as fused, so that it errs on the side of more memory: an expensive operation with
several readers is written.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import count

import numpy as np

from search_spaces.replay import REMAT
from search_spaces.sharding.base import Rule
from search_spaces.sharding.custom_calls.operations import custom_call_of
from search_spaces.sharding.graph import (
    Block,
    Graph,
    Value,
    Vertex,
    copies_over_host_link,
    is_contraction,
    leads_to_contraction,
    values_of,
)

REDUCTIONS = ("reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum", "argm")
"""How the names of operations begin that compute what they read inside their own kernel."""
PICKS = frozenset({"gather", "slice", "dynamic_slice"})
"""Operations that read no more of their first operand than they return."""
SPLITS = frozenset({"split", "unstack"})
"""Operations whose results are parts of their operand."""
VIEWS = frozenset({"transpose", "reshape", "squeeze", "expand_dims"})
"""Operations that move nothing before a contraction, which reads its operands in any layout."""
# Computed at each element of a reader, although their sharding rules say that elements move.
_ALSO_FUSIBLE = PICKS | SPLITS | {"concatenate", "iota", "pad", "reshape", "rev", "squeeze", "stack"}
# Not computed again in a second kernel. Divisions, roots, exponentials and logistic functions are cheap on GPUs.
# Source: XLA, `PriorityFusion::IsExpensive` and `InstructionFusion::IsExpensive`.
_EXPENSIVE = frozenset(
    (
        *("acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cos", "cosh", "sin", "sinh", "tan", "tanh"),
        *("cbrt", "digamma", "erf", "erf_inv", "erfc", "expm1", "lgamma", "log", "log1p", "log2", "pow", "rem"),
        *("random_bits", "threefry2x32"),
    )
)

Kernel = int
"""A kernel, named by the index of a vertex whose results it writes."""


class Fusion:
    """Divides the vertices of a graph among kernels.

    Args:
      rules: for each vertex its rule or None.
      group_of: what is known of kernels that are merged: the group of each, by kernel.

    Attributes:
      is_written: `[values]` booleans, by value id, whether the value exists in memory.
      is_fusible: for each vertex whether it can be computed inside its readers.
      kernels_with: for each vertex the kernels that compute it.
      reads_of: for each vertex the values, by id, that the kernel of this name reads.
    """

    def __init__(self, graph: Graph, rules: Sequence[Rule | None], group_of: Mapping[Kernel, int]):
        self.graph, self.group_of = graph, group_of
        self.consumers = graph.consumers()
        self.is_fusible = [_is_fusible(v, rules[v.index]) for v in graph.vertices]
        self.is_written = np.ones(len(graph.values), bool)
        self.kernels_with: list[set[Kernel]] = [{v.index} for v in graph.vertices]
        self.reads_of = [value_ids(v) for v in graph.vertices]
        self._region_of = dict(_regions(graph.block, 0, (), count(1)))
        self._source_bytes = self._bytes_to_compute()
        outputs = {v.id for v in values_of(graph.outputs)} | set(graph.stored_until)
        for vertex in reversed(graph.vertices):
            if vertex.kind == "operation":
                self._visit(vertex, outputs)

    def runs_with(self, vertex: Vertex, other: Vertex) -> bool:
        """Returns whether two vertices run in the same trip of a loop, the same branch and the same remat region."""
        return self._region_of.get(vertex.index) == self._region_of.get(other.index)

    def _visit(self, vertex: Vertex, outputs: set[int]) -> None:
        for value in vertex.results:
            if value.id in outputs:
                continue
            kernels = set().union(*(self.kernels_with[reader.index] for reader, _ in self.consumers[value.id]))
            if not self.consumers[value.id] or (self.is_fusible[vertex.index] and self._fuses(vertex, value, kernels)):
                self.is_written[value.id] = False
                self.kernels_with[vertex.index] |= kernels
                for kernel in kernels:
                    self.reads_of[kernel].discard(value.id)
                    self.reads_of[kernel] |= value_ids(vertex)
        assert vertex.equation is not None
        if vertex.results and not vertex.equation.effects and not any(self.is_written[v.id] for v in vertex.results):
            self.kernels_with[vertex.index].discard(vertex.index)

    def _fuses(self, vertex: Vertex, value: Value, kernels: set[Kernel]) -> bool:
        """Returns whether a value is computed in each of these kernels, which read it."""
        operands = value_ids(vertex)
        if not all(self._takes(reader, operand, vertex) for reader, operand in self.consumers[value.id]):
            return False
        if len(kernels) == 1 or not operands:
            return True
        if vertex.primitive in _EXPENSIVE or moves_elements(vertex):
            others = {k for k in kernels if not is_contraction(self.graph.vertices[k])}
            if len({self.group_of.get(k, -1 - k) for k in others}) > 1:
                return False
        source_bytes = self._source_bytes
        apart = value.num_bytes * (1 + len(kernels)) + sum(source_bytes[i] for i in operands)
        return sum(source_bytes[i] for k in kernels for i in operands - self.reads_of[k]) <= apart

    def _takes(self, reader: Vertex, operand: int, vertex: Vertex) -> bool:
        """Returns whether the kernels of a reader can compute a vertex whose result is the reader's operand."""
        if reader.kind != "operation" or (value_ids(vertex) and not self._reaches(reader, vertex)):
            return False
        if not self.is_fusible[reader.index]:
            return self._root_takes(reader, operand, vertex)
        roots = (self.graph.vertices[k] for k in self.kernels_with[reader.index])
        return all(root is reader or self._root_takes(root, 1, vertex) for root in roots)

    def _root_takes(self, root: Vertex, operand: int, vertex: Vertex) -> bool:
        if is_contraction(root):
            return vertex.primitive in VIEWS
        if _is_update(root):
            return operand > 0  # the first operand is the buffer that is written
        return self.is_fusible[root.index] or root.primitive.startswith(REDUCTIONS)

    def _reaches(self, reader: Vertex, vertex: Vertex) -> bool:
        """Returns whether no border of a loop, branch or remat region keeps a vertex out of its reader's kernels.

        What a remat region reads has to exist; what it makes can be computed by readers outside.
        """
        body, remats = self._region_of[vertex.index]
        reader_body, reader_remats = self._region_of[reader.index]
        return body == reader_body and remats[: len(reader_remats)] == reader_remats

    def _bytes_to_compute(self) -> list[int]:
        """Returns for each value the bytes from which a kernel computes it if it is not in memory, at most its own.

        A broadcast array is read as the elements that it repeats, and a converted one in its first type.
        """
        num_bytes = [value.num_bytes for value in self.graph.values]
        for vertex in self.graph.vertices:
            if self.is_fusible[vertex.index] and vertex.primitive not in _EXPENSIVE:
                source_bytes = sum(num_bytes[i] for i in value_ids(vertex))
                for value in vertex.results:
                    num_bytes[value.id] = min(num_bytes[value.id], source_bytes)
        return num_bytes


def value_ids(vertex: Vertex) -> set[int]:
    """Returns the ids of the values that a vertex reads."""
    return {v.id for v in values_of(vertex.operands)}


def moves_elements(vertex: Vertex) -> bool:
    """Returns whether a vertex is a transposition that changes the order in memory; those of size 1 do not."""
    if vertex.primitive != "transpose" or not isinstance(vertex.operands[0], Value):
        return False
    shape = vertex.operands[0].shape
    order = [d for d in vertex.params["permutation"] if shape[d] > 1]
    return order != sorted(order)


def _is_update(vertex: Vertex) -> bool:
    """Returns whether a vertex writes a part of its first operand, in place; for one index the rule does not say so."""
    return vertex.primitive.startswith("scatter") or vertex.primitive == "dynamic_update_slice"


def _is_fusible(vertex: Vertex, rule: Rule | None) -> bool:
    """Returns whether a vertex can be computed inside its readers."""
    if vertex.primitive in _ALSO_FUSIBLE:
        return True
    return not _is_update(vertex) and rule is not None and _is_elementwise(vertex, rule)


def _is_elementwise(vertex: Vertex, rule: Rule) -> bool:
    """Returns whether each element of the results is made of one element of each operand, in any layout.

    A dimension of one element may be broadcast.
    """
    if vertex.kind != "operation" or vertex.equation is None or vertex.equation.effects:
        return False
    is_other = is_contraction(vertex) or custom_call_of(vertex) is not None or copies_over_host_link(vertex)
    if is_other or rule.reduction or rule.permutation:
        return False
    return all(rule.sizes[f] == 1 for f in rule.need_replication)


def _regions(
    block: Block, body: int, remats: tuple[int, ...], fresh_numbers: Iterator[int]
) -> Iterator[tuple[int, tuple[int, tuple[int, ...]]]]:
    """Yields each vertex with the number of its loop body or branch, and those of the remat regions around it there."""
    for step in block.steps:
        if isinstance(step, Vertex):
            yield step.index, (body, remats)
            continue
        is_remat = step.equation.primitive.name in REMAT
        has_barrier = is_remat and step.equation.params["differentiated"]
        for inner in step.blocks:
            number = next(fresh_numbers)
            inner_remats = (*remats, number) if has_barrier else remats
            yield from _regions(inner, *((body, inner_remats) if is_remat else (number, ())), fresh_numbers)


# Pointwise but expensive: XLA does not compute them again for a second reader.
_NEVER_RECOMPUTED = frozenset(
    (
        *("cbrt", "cos", "digamma", "div", "erf", "erf_inv", "erfc", "expm1", "lgamma", "log", "log1p"),
        *("log2", "logistic", "pow", "random_bits", "rsqrt", "sin", "sqrt", "tan", "tanh", "threefry2x32"),
    )
)
# Computed again for a second reader, as the derivative of a cross-entropy is, but not for the four of an attention's.
_RECOMPUTED_ONCE = ("exp", "exp2")


def is_pointwise(vertex: Vertex, rule: Rule | None) -> bool:
    """Returns whether each element of the result is made of one element of each operand, in any layout.

    A dimension of one element may be broadcast, but not where a part of the first operand is written.
    """
    if rule is None:
        return False
    if vertex.primitive == "broadcast_in_dim" and not any(v.shape for v in values_of(vertex.operands)):
        return True  # copies of one number
    return _is_elementwise(vertex, rule) and not (_is_update(vertex) and rule.need_replication)


class Fusing:
    """The operations that are fused into their reader, and the arrays that a fusion writes over."""

    def __init__(self, graph: Graph, pointwise: Sequence[bool]):
        self.graph, self.pointwise = graph, pointwise
        self.body_of_vertex = {v: body for v, (body, _) in _regions(graph.block, 0, (), count(1))}
        self.leads_to_contraction = leads_to_contraction(graph)
        self.views_in_products: set[int] = set()

    def fuses(self, vertex: Vertex, readers: Sequence[Vertex]) -> bool:
        """Returns whether a vertex is computed inside each of its readers; a loop reads its inputs from memory."""
        if not self.pointwise[vertex.index]:
            return False
        if len(readers) > 1 and vertex.primitive in _NEVER_RECOMPUTED:
            return False
        if len(readers) > 2 and vertex.primitive in _RECOMPUTED_ONCE:
            return False
        body = self.body_of_vertex.get(vertex.index)
        if not all(self.body_of_vertex.get(r.index) == body and self._takes(r, vertex) for r in readers):
            return False
        if any(is_contraction(r) or r.index in self.views_in_products for r in readers):
            self.views_in_products.add(vertex.index)
        return True

    def _takes(self, reader: Vertex, vertex: Vertex) -> bool:
        if reader.index in self.views_in_products or is_contraction(reader):
            return vertex.primitive in VIEWS
        name = reader.primitive
        return self.pointwise[reader.index] or name in PICKS or name.startswith(("reduce_", "argm"))

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
        """Returns whether elements are looked up in a value for results alone, which a compiler may put off.

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
        operands = values_of(vertex.operands)
        if _is_update(vertex):
            operands = operands[:1]
        elif not self.pointwise[vertex.index]:
            return
        for operand in operands:
            if is_written[operand.id]:
                yield operand
            else:
                yield from self._read_operands(self.graph.vertices[operand.vertex], is_written)

"""What the kernels of a traced function read from memory and write to it.

A chain of elementwise operations costs the bytes that its kernel moves: each array once for each kernel that reads it,
and what lies between nothing. Kernels follow from the graph alone and not from how it is sharded, so the bytes stay a
sum over vertices: a write belongs to the vertex that makes the array, and a kernel's read of it to one of the vertices
that read it there.

`fusion.py` says what a kernel computes. Here kernels that run over the same elements are merged into one that writes
several arrays, as the three results of an adam update are, and the copies are added that a compiler inserts.

Source: XLA, xla/service/gpu/transforms/multi_output_fusion.cc (siblings that share an operand, and a producer with its
consumer), `ShapesCompatibleForMultiOutputFusion` in xla/service/gpu/gpu_fusible.cc (which loops can be one).
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby
from math import prod
from typing import NamedTuple

import numpy as np

from search_spaces.sharding.base import Rule
from search_spaces.sharding.fusion import (
    PICKS,
    REDUCTIONS,
    SPLITS,
    VIEWS,
    Fusion,
    Kernel,
    moves_elements,
    value_ids,
)
from search_spaces.sharding.graph import Graph, Value, Vertex, is_contraction, values_of

BITCASTS = frozenset(
    {"reshape", "squeeze", "expand_dims", "name", "optimization_barrier", "sharding_constraint", "copy_p"}
)
"""Operations that only give an array in memory another name."""


class Kernels(NamedTuple):
    """The arrays that are moved in one run of each vertex.

    Attributes:
      reads: for each vertex and operand, how often the operand's bytes are read: once for each kernel whose read is
        counted here, or less where a kernel needs only a part of the operand.
      copies: for each vertex and operand, how often the operand's bytes are moved before the vertex's kernel begins.
      writes: `[values]` by value id, how often the value's bytes are moved to write it; 0 if it is not in memory.
      launches: `[vertices]` the kernels that are counted at the vertex.
    """

    reads: list[list[float]]
    copies: list[list[float]]
    writes: np.ndarray
    launches: np.ndarray

    def at(self, vertex: Vertex) -> tuple[float, ...]:
        """Returns all that is counted at a vertex: reads, copies, writes, launches."""
        writes = (self.writes[value.id] for value in vertex.results)
        return (*self.reads[vertex.index], *self.copies[vertex.index], *writes, self.launches[vertex.index])


def kernels_of(graph: Graph, rules: Sequence[Rule | None], donated: Sequence[bool]) -> Kernels:
    """Divides a graph into kernels and counts what they move.

    What is expensive is computed again in a second kernel only if both are merged later, so there are two rounds: the
    second one knows what the first one merged.

    Args:
      rules: for each vertex its rule or None.
      donated: for each flat argument whether its memory may be used again.
    """
    first_round = _MergedKernels(Fusion(graph, rules, {}))
    return _count(_MergedKernels(Fusion(graph, rules, first_round.group_of)), donated)


class _MergedKernels:
    """The kernels of a graph, those that run over the same elements in one group."""

    def __init__(self, fusion: Fusion):
        self.fusion, self.graph = fusion, fusion.graph
        self.group_of: dict[Kernel, int] = {}
        self.members: list[list[Kernel]] = []
        self._depends_on: list[int] = []  # for each group a set of groups, as bits
        self._loops: list[list[tuple[int, tuple[int, ...] | None]]] = []
        for vertex in self.graph.operations():
            if vertex.index in fusion.kernels_with[vertex.index] and not self._is_bitcast(vertex):
                self._add(vertex)

    def _is_bitcast(self, vertex: Vertex) -> bool:
        return vertex.primitive in BITCASTS and all(self.fusion.is_written[i] for i in value_ids(vertex))

    def _add(self, root: Vertex) -> None:
        """Puts a kernel into the group that it shares the most bytes with, or into a group of its own."""
        fusion, values, loop = self.fusion, self.graph.values, _loop(root)
        makers, depends_on = {}, 0
        shared_bytes: dict[int, float] = defaultdict(float)
        for i in fusion.reads_of[root.index]:
            maker = self._maker(values[i])
            if maker is not None:
                makers[i] = maker
                depends_on |= 1 << maker | self._depends_on[maker]
            if prod(values[i].shape) != loop[0]:
                continue
            sharing = {k for reader, _ in fusion.consumers[i] for k in fusion.kernels_with[reader.index]}
            groups = {self.group_of[k] for k in sharing if k in self.group_of}
            for group in groups if maker is None else groups | {maker}:
                shared_bytes[group] += values[i].num_bytes
        for group in sorted(shared_bytes, key=lambda g: -shared_bytes[g]):
            if self._fits(root, loop, group) and self._can_join(makers, group):
                break
        else:
            group = len(self.members)
            self.members.append([])
            self._loops.append([])
            self._depends_on.append(0)
        self.group_of[root.index] = group
        self.members[group].append(root.index)
        self._loops[group].append(loop)
        self._depends_on[group] |= depends_on & ~(1 << group)

    def _maker(self, value: Value) -> int | None:
        """Returns the group that makes a value, behind other names of it; None for what no kernel makes."""
        vertex = self.graph.vertices[value.vertex]
        while vertex.index not in self.group_of and self._is_bitcast(vertex):
            operand = vertex.operands[value.result if len(vertex.results) > 1 else 0]
            if not isinstance(operand, Value):
                return None
            value, vertex = operand, self.graph.vertices[operand.vertex]
        return self.group_of.get(vertex.index)

    def _fits(self, root: Vertex, loop: tuple[int, tuple[int, ...] | None], group: int) -> bool:
        """Returns whether a kernel runs over the elements that a group runs over, and reduces the same dimensions."""
        first = self.graph.vertices[self.members[group][0]]
        if not (self._can_merge(first) and self._can_merge(root) and self.fusion.runs_with(first, root)):
            return False
        dimensions = {reduced for _, reduced in (*self._loops[group], loop)} - {None}
        return self._loops[group][0][0] == loop[0] and len(dimensions) <= 1

    def _can_merge(self, root: Vertex) -> bool:
        return self.fusion.is_fusible[root.index] or root.primitive.startswith(REDUCTIONS)

    def _can_join(self, makers: dict[int, int], group: int) -> bool:
        """Returns whether what a kernel reads is there when the group runs, or is made element by element in it."""
        for i, maker in makers.items():
            vertex = self.graph.values[i].vertex
            if maker == group and not (vertex in self.group_of and self.fusion.is_fusible[vertex]):
                return False
            if maker != group and self._depends_on[maker] >> group & 1:
                return False
        return True


def _count(kernels: _MergedKernels, donated: Sequence[bool]) -> Kernels:
    """Counts what kernels move: each group reads a value once, and nothing that it makes itself."""
    graph, is_written = kernels.graph, kernels.fusion.is_written
    reads = [[0.0] * len(v.operands) for v in graph.vertices]
    writes, launches = np.zeros(len(graph.values)), np.zeros(len(graph.vertices))
    feedback = zip(graph.outputs, graph.feedback, strict=True)
    overwriting = {o.id for o, i in feedback if isinstance(o, Value) and i is not None and donated[i]}
    for members in kernels.members:
        launches[members[0]] += 1
        written_values = {v.id for k in members for v in graph.vertices[k].results if is_written[v.id]}
        places: dict[int, tuple[float, int, int]] = {}
        is_transposing = False
        for kernel in members:
            inside, places_of_kernel = _inside(graph, is_written, kernel)
            is_transposing |= any(moves_elements(graph.vertices[i]) for i in inside)
            for value, place in places_of_kernel:
                if value not in written_values:
                    places[value] = max(places.get(value, place), place)
        for share, vertex, operand in places.values():
            reads[vertex][operand] += share
        for value in written_values:
            # A kernel that transposes cannot write over its operands: XLA copies what belongs in their memory.
            writes[value] = 3 if is_transposing and value in overwriting else 1
    return Kernels(reads, [copies_of(v, graph, is_written) for v in graph.vertices], writes, launches)


def _inside(
    graph: Graph, is_written: np.ndarray, kernel: Kernel
) -> tuple[set[int], list[tuple[int, tuple[float, int, int]]]]:
    """Follows a kernel from its result to what it reads.

    Returns:
      The vertices that it computes, and the values that it reads, each with the place of the read: the share of the
      operand that is needed, the vertex and the operand. A contraction's reads are its own, through views as well.
    """
    shares, vertices_left = {kernel: 1.0}, {kernel}
    places = []
    reads_views = is_contraction(graph.vertices[kernel])
    while vertices_left:
        vertex = graph.vertices[max(vertices_left)]
        vertices_left.discard(vertex.index)
        for number, operand in enumerate(vertex.operands):
            if not isinstance(operand, Value):
                continue
            share = min(1.0, shares[vertex.index] * _needed_share(vertex, number, operand))
            if is_written[operand.id] or reads_views:
                places.append((operand.id, (share, vertex.index, number)))
                continue
            maker, before = graph.vertices[operand.vertex], shares.get(operand.vertex, 0.0)
            if maker.primitive in SPLITS:
                share *= prod(operand.shape) / max(1, sum(prod(v.shape) for v in maker.results))
            is_part = vertex.primitive in PICKS or maker.primitive in SPLITS
            shares[operand.vertex] = min(1.0, before + share) if is_part else max(before, share)
            vertices_left.add(operand.vertex)
    return set(shares), places


def _needed_share(vertex: Vertex, number: int, operand: Value) -> float:
    """Returns the share of an operand that a share of the vertex's result needs, as the quotient of the two."""
    if not vertex.results:  # a callback, such as `jax.debug.print`
        return 1.0
    ratio = prod(vertex.results[0].shape) / max(1, prod(operand.shape))
    if vertex.primitive in PICKS and number == 0:
        return min(1.0, ratio)
    return max(1.0, ratio) if vertex.primitive == "broadcast_in_dim" else 1.0


def _loop(root: Vertex) -> tuple[int, tuple[int, ...] | None]:
    """Returns how many elements a kernel runs over, and which dimensions it reduces; None for no reduction."""
    if root.primitive.startswith(REDUCTIONS):
        operands = values_of(root.operands)
        return (prod(operands[0].shape) if operands else 1), tuple(root.params["axes"])
    return max((prod(v.shape) for v in root.results), default=0), None


def copies_of(vertex: Vertex, graph: Graph, is_written: np.ndarray) -> list[float]:
    """Returns for each operand how often its bytes are moved before the vertex's own kernel begins.

    A scan's stacked result is first filled with zeros, and each trip writes its part by a kernel of its own, which
    computes again what is cheap, or copies what others read as well: the result of a product, say.

    Products read whole matrices, so a slice of a loop's stacked operand is copied for each of them, and a product's
    result is transposed for the next one that does not find matrices in it. cuDNN pads both sides alike, so XLA pads
    the input of other convolutions (`ConvPaddingLegalization`). The gradient of max-pooling becomes a scatter, for
    which the place of each maximum is written and read, one index for each dimension (`SelectAndScatterExpander`).

    Args:
      is_written: for each value, by id, whether it exists in memory.
    """
    copies = [0.0] * len(vertex.operands)
    if vertex.kind == "stack" and isinstance(vertex.operands[0], Value):
        maker, readers = graph.vertices[vertex.operands[0].vertex], graph.consumers()[vertex.operands[0].id]
        is_copied = is_contraction(maker) or any(graph.vertices[r.index].kind != "stack" for r, _ in readers)
        copies[0] = 3.0 if is_copied else 2.0
    if is_contraction(vertex):
        for number, operand in enumerate(vertex.operands):
            if isinstance(operand, Value):
                is_slice = graph.vertices[operand.vertex].kind == "slice"
                copies[number] = 2.0 if is_slice or _is_rearranged(vertex, number, graph, is_written) else 0.0
    if vertex.primitive == "conv_general_dilated":
        params = vertex.params
        is_forward = all(d == 1 for d in (*params["lhs_dilation"], *params["rhs_dilation"]))
        if is_forward and any(before != after for before, after in params["padding"]):
            copies[0] += 2.0
    if vertex.primitive == "select_and_scatter_add":
        copies[0] = 2.0 * (len(vertex.results[0].shape) + 1) + 1.0
    return copies


def _is_rearranged(vertex: Vertex, number: int, graph: Graph, is_written: np.ndarray) -> bool:
    """Returns whether an operand is another product's result that does not consist of the matrices that this one reads.

    Matrices are the contracted dimensions side by side and the others side by side, in either order, behind the batch
    dimensions. What an elementwise kernel makes is written in the order in which it is wanted.
    """
    operand = vertex.operands[number]
    if vertex.primitive != "dot_general" or not isinstance(operand, Value):
        return False
    order, maker = _in_memory(operand, graph, is_written)
    if not is_contraction(maker):
        return False
    if order is None:
        return True
    contracted, batch = (dims[number] for dims in vertex.params["dimension_numbers"])
    roles = {**dict.fromkeys(batch, "batch"), **dict.fromkeys(contracted, "contracted")}
    blocks = [role for role, _ in groupby(roles.get(d, "other") for d in order if operand.shape[d] > 1)]
    return "batch" in blocks[1:] or len(blocks) > len(set(blocks))


def _in_memory(value: Value, graph: Graph, is_written: np.ndarray) -> tuple[list[int] | None, Vertex]:
    """Returns the dimensions of a value in the order of what it is a view of, and the vertex that makes that.

    The order is None where dimensions are merged or divided after a transposition.
    """
    maker = graph.vertices[value.vertex]
    identity = list(range(len(value.shape)))
    if maker.primitive not in VIEWS or not isinstance(maker.operands[0], Value):
        return identity, maker
    source = maker.operands[0]
    if maker.primitive == "transpose":
        if is_written[value.id]:
            return identity, maker
        order, first_maker = _in_memory(source, graph, is_written)
        permutation = list(maker.params["permutation"])
        return None if order is None else [permutation.index(d) for d in order], first_maker
    order, first_maker = _in_memory(source, graph, is_written)
    kept_order = [] if order is None else [d for d in order if source.shape[d] > 1]
    return None if order is None or kept_order != sorted(kept_order) else identity, first_maker

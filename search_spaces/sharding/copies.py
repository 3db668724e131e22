"""The copies that a compiler for GPUs adds before an operation that cannot read an operand as it lies in memory."""

from itertools import groupby

import numpy as np

from search_spaces.sharding.fusion import VIEWS
from search_spaces.sharding.graph import Graph, Value, Vertex, is_contraction


def copies_of(vertex: Vertex, graph: Graph, is_written: np.ndarray) -> list[float]:
    """Returns for each operand how often its bytes are moved before the vertex's own kernel begins.

    A scan's stacked result is first filled with zeros, and each trip writes its part by a kernel of its own, which
    computes again what is cheap, or copies what others read as well: the result of a product, say.

    Products read whole matrices, so a slice of a loop's stacked operand is copied for each of them, and a product's
    result is transposed for the next one that does not find matrices in it. cuDNN pads both sides alike, so XLA pads
    the input of other convolutions (`ConvPaddingLegalization`). The gradient of max-pooling becomes a scatter, for
    which the place of each maximum is written and read, one index for each dimension (`SelectAndScatterExpander`).

    Args:
      vertex: of any kind.
      graph: the traced function.
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
    if vertex.primitive == "conv_general_dilated" and vertex.equation is not None:
        params = vertex.equation.params
        is_forward = all(d == 1 for d in (*params["lhs_dilation"], *params["rhs_dilation"]))
        if is_forward and any(before != after for before, after in params["padding"]):
            copies[0] += 2.0
    if vertex.primitive == "select_and_scatter_add":
        copies[0] = 2.0 * (len(vertex.results[0].shape) + 1) + 1.0
    return copies


def _is_rearranged(vertex: Vertex, number: int, graph: Graph, is_written: np.ndarray) -> bool:
    """Tells whether an operand is another product's result that does not consist of the matrices that this one reads.

    Matrices are the contracted dimensions side by side and the others side by side, in either order, behind the batch
    dimensions. What an elementwise kernel makes is written in the order in which it is wanted.
    """
    operand = vertex.operands[number]
    if vertex.primitive != "dot_general" or vertex.equation is None or not isinstance(operand, Value):
        return False
    order, maker = _in_memory(operand, graph, is_written)
    if not is_contraction(maker):
        return False
    if order is None:
        return True
    contracted, batch = (dims[number] for dims in vertex.equation.params["dimension_numbers"])
    roles = {**dict.fromkeys(batch, "batch"), **dict.fromkeys(contracted, "contracted")}
    blocks = [role for role, _ in groupby(roles.get(d, "other") for d in order if operand.shape[d] > 1)]
    return "batch" in blocks[1:] or len(blocks) > len(set(blocks))


def _in_memory(value: Value, graph: Graph, is_written: np.ndarray) -> tuple[list[int] | None, Vertex]:
    """Returns the dimensions of a value in the order of what it is a view of, and the vertex that makes that.

    The order is None where dimensions are merged or divided after a transposition.
    """
    maker = graph.vertices[value.vertex]
    identity = list(range(len(value.shape)))
    if maker.primitive not in VIEWS or not isinstance(maker.operands[0], Value) or maker.equation is None:
        return identity, maker
    source = maker.operands[0]
    if maker.primitive == "transpose":
        if is_written[value.id]:
            return identity, maker
        order, first_maker = _in_memory(source, graph, is_written)
        permutation = list(maker.equation.params["permutation"])
        return None if order is None else [permutation.index(d) for d in order], first_maker
    order, first_maker = _in_memory(source, graph, is_written)
    kept_order = [] if order is None else [d for d in order if source.shape[d] > 1]
    return None if order is None or kept_order != sorted(kept_order) else identity, first_maker

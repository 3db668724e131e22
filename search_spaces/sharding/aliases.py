"""Arrays that have two names in a graph and one place in memory."""

import numpy as np

from search_spaces.sharding.graph import Graph, Value, Vertex


def share_memory(graph: Graph, is_written: np.ndarray, interval: np.ndarray, last_read: np.ndarray) -> None:
    """Says which arrays are other arrays under another name: results of barriers, slices and stacks of a single trip.

    A compiler runs a scan with one trip as straight code, where they are the arrays outside in another shape.

    Args:
      graph: the traced function.
      is_written: as in `memory.Lifetimes`; it is changed, as are the others.
      interval: as there, but with inputs at -1.
      last_read: positions of the operations that read values last.
    """
    for vertex in reversed(graph.vertices):
        is_barrier = vertex.primitive == "optimization_barrier"
        if not is_barrier and not (vertex.kind in ("slice", "stack") and has_one_trip(vertex)):
            continue
        for operand, result in zip(vertex.operands, vertex.results, strict=True):
            if not isinstance(operand, Value) or not is_written[operand.id] or not is_written[result.id]:
                continue
            one, other = (result, operand) if vertex.kind == "stack" else (operand, result)  # the first one stays
            if vertex.kind == "stack" and operand.made_at < result.made_at:
                continue  # it was made before the loop
            is_written[other.id] = False
            start = interval[operand.id, 0]
            interval[one.id] = start, max(interval[one.id, 1], interval[other.id, 1])
            last_read[one.id] = max(last_read[one.id], last_read[other.id])


def has_one_trip(vertex: Vertex) -> bool:
    """Tells whether the loop of a vertex is a scan with one trip."""
    return vertex.equation is not None and vertex.equation.params.get("length") == 1

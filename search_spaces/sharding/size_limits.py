"""Refuses functions whose arrays or loops are too large for any device: no sum of bytes or seconds overflows then."""

from search_spaces.sharding.graph import Graph, Vertex

MOST_BYTES = 2**63
"""An array has less bytes than this: as many as 64-bit addresses reach."""
MOST_RUNS = 1e18
"""An operation runs less often than this in one call: more take 30 years at a nanosecond each, whatever they do."""


def check_sizes(graph: Graph) -> None:
    """Checks that a traced function could run at all."""
    for value in graph.values:
        if value.num_bytes >= MOST_BYTES:
            raise ValueError(
                f"{_named(graph.vertices[value.vertex])} has the shape {value.shape} and so at least 2^63 bytes, which "
                "no memory holds. Check the shapes of the arguments."
            )
    vertex = max(graph.vertices, key=lambda vertex: vertex.weight, default=None)
    if vertex is not None and vertex.weight >= MOST_RUNS:
        raise ValueError(
            f"{_named(vertex)} runs {vertex.weight:.0e} times in one call, because of the loops that it is in. "
            "Check their lengths."
        )


def _named(vertex: Vertex) -> str:
    """Returns what a user calls an array or an operation."""
    return f"`{vertex.name}`" if vertex.name else f"{vertex.primitive or vertex.kind} ({vertex.user_source})"

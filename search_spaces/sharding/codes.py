"""What a plan can have in fewer bits besides its products: sums on their way between devices, and kept arrays.

Codes are narrow numbers with a scale for each block of them (`communication.collectives`). Products in float8 are
priced and chosen by strategies of their own (`number_formats.py`), because what their operands cost depends on them.
"""

import jax.numpy as jnp

from cost.compute import CONTRACTIONS
from search_spaces.communication.base import BFLOAT16, FLOAT8, INT8, Precision
from search_spaces.sharding.float8 import is_backward
from search_spaces.sharding.graph import Graph, Vertex, leads_to_contraction
from search_spaces.sharding.local_operations import combiner

FORMATS: dict[str, Precision] = {precision.name: precision for precision in (BFLOAT16, FLOAT8, INT8)}
"""The formats of codes, by the names that plans have."""
_SUMS = {*CONTRACTIONS, "scatter-add"}
"""Operations whose partial sums are as large as weights or activations."""


def sum_formats(vertex: Vertex) -> list[str]:
    """Returns the formats in which the partial sums of an operation can be sent: those narrower than its result."""
    if vertex.primitive not in _SUMS or len(vertex.results) != 1 or combiner(vertex) != "sum":
        return []
    return narrower(vertex.results[0].dtype)


def narrower(dtype: jnp.dtype) -> list[str]:
    """Returns the formats that have fewer bits than a floating-point type; none for other types."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return []
    return [name for name, precision in FORMATS.items() if precision.bits < 8 * dtype.itemsize]


def directions(graph: Graph) -> list[str]:
    """Returns what each vertex belongs to, `[vertices]`: "gradient" where no product depends on it any more."""
    leads = leads_to_contraction(graph)
    return [
        "gradient" if not leads[vertex.index] else "backward" if is_backward(vertex) else "forward"
        for vertex in graph.vertices
    ]

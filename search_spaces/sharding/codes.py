"""What a plan can have in fewer bits besides the operands of its products: sums on their way between devices.

Codes are narrow numbers with a scale for each block of them (`communication.collectives`).
"""

import jax.numpy as jnp

from cost.compute import CONTRACTIONS
from search_spaces.communication.base import BFLOAT16, FLOAT8, INT4, INT8, Precision
from search_spaces.sharding.graph import Graph, Vertex, leads_to_contraction
from search_spaces.sharding.local_operations import combiner
from search_spaces.sharding.product_formats import is_backward

FORMATS: dict[str, Precision] = {"bfloat16": BFLOAT16, "float8": FLOAT8, "int8": INT8, "int4": INT4}
"""The formats of codes, by name."""
_SUMS = {*CONTRACTIONS, "scatter-add"}
"""Operations whose partial sums are as large as weights or activations."""


def sums_in(vertex: Vertex, name: str) -> bool:
    """Tells whether an operation has partial sums of more bits than a format, as which they can be sent."""
    is_sum = vertex.primitive in _SUMS and len(vertex.results) == 1 and combiner(vertex) == "sum"
    return is_sum and is_narrower(name, vertex.results[0].dtype)


def is_narrower(name: str, dtype: jnp.dtype) -> bool:
    """Tells whether a type is of floating-point numbers that have more bits than a format."""
    return bool(jnp.issubdtype(dtype, jnp.floating)) and FORMATS[name].bits < 8 * dtype.itemsize


def directions(graph: Graph) -> list[str]:
    """Returns what each vertex belongs to, `[vertices]`: "gradient" where no product depends on it any more."""
    leads = leads_to_contraction(graph)
    return [
        "gradient" if not leads[vertex.index] else "backward" if is_backward(vertex) else "forward"
        for vertex in graph.vertices
    ]

"""What a plan can have in fewer bits besides the operands of its products: sums on their way between devices.

Codes are narrow numbers with a scale for each block of them (`communication.collectives`).
"""

import jax
import jax.numpy as jnp

from cost.compute import CONTRACTIONS
from search_spaces.communication.base import BFLOAT16, FLOAT8, INT4, INT8, Precision
from search_spaces.communication.collectives import decode, encode
from search_spaces.sharding.graph import Graph, Vertex, leads_to_contraction
from search_spaces.sharding.local_operations import combiner
from search_spaces.sharding.product_formats import UNCERTAIN, is_backward

CODES: dict[str, Precision] = {"bfloat16": BFLOAT16, "float8": FLOAT8, "int8": INT8, "int4": INT4}
"""The formats of codes, by name."""
FEEDBACK = " with error feedback"
"""Ends the name of a format in which sums are sent where the next step adds what rounding loses of them."""
SUMS = (*CODES, *(name + FEEDBACK for name in CODES))
"""The names of the formats in which sums can be sent."""
_SUMS = {*CONTRACTIONS, "scatter-add"}
"""Operations whose partial sums are as large as weights or activations."""


def has_feedback(name: str) -> bool:
    """Returns whether what a format of sums loses is added in the next step; "" has nothing to lose."""
    return name.endswith(FEEDBACK)


def precision_of(name: str) -> Precision:
    """Returns the codes of a format of sums."""
    return CODES[name.removesuffix(FEEDBACK)]


def sums_in(vertex: Vertex, name: str) -> bool:
    """Returns whether an operation has partial sums of more bits than a format, as which they can be sent.

    With error feedback they have to be there in each step: not in a branch, or in a loop of unknown length.
    """
    is_sum = vertex.primitive in _SUMS and len(vertex.results) == 1 and combiner(vertex) == "sum"
    is_certain = all(caller.primitive.name not in UNCERTAIN for caller in vertex.callers)
    is_narrow = is_sum and is_narrower(name.removesuffix(FEEDBACK), vertex.results[0].dtype)
    return is_narrow and (is_certain or not has_feedback(name))


def is_narrower(name: str, dtype: jnp.dtype) -> bool:
    """Returns whether a type is of floating-point numbers that have more bits than a format."""
    return bool(jnp.issubdtype(dtype, jnp.floating)) and CODES[name].bits < 8 * dtype.itemsize


def in_codes(array: jax.Array, name: str) -> jax.Array:
    """Returns the numbers that the codes of an array have in a format, in the array's type."""
    return decode(encode(array, CODES[name]), CODES[name], array.shape[-1]).astype(array.dtype)


def directions(graph: Graph) -> list[str]:
    """Returns the direction of each vertex, `[vertices]`: "gradient" where no product depends on it any more."""
    leads = leads_to_contraction(graph)
    return [
        "gradient" if not leads[vertex.index] else "backward" if is_backward(vertex) else "forward"
        for vertex in graph.vertices
    ]

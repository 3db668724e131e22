"""Which operations can be products in float8, and which of its two formats their operands have.

Values and weights are rounded to e4m3 (3 bits of mantissa), cotangents to e5m2, whose range is wider. JAX transposes a
product to one whose first operand is the cotangent, so that operand of a product in the backward pass counts as one.

Source: Micikevicius et al., "FP8 Formats for Deep Learning" (2022), https://arxiv.org/abs/2209.05433.
"""

from typing import Any

import jax.numpy as jnp

from search_spaces.sharding.graph import Value, Vertex

FLOAT8 = "float8"
"""The name of the format in plans."""
RATE = "float8_e4m3fn"
"""The dtype at whose rate hardware multiplies float8 numbers, whichever of the two formats they have."""


def takes_float8(vertex: Vertex) -> bool:
    """Tells whether an operation is a product of floating-point arrays of more than 8 bits."""
    return vertex.primitive == "dot_general" and all(
        isinstance(operand, Value) and jnp.issubdtype(operand.dtype, jnp.floating) and operand.dtype.itemsize > 1
        for operand in vertex.operands
    )


def is_backward(vertex: Vertex) -> bool:
    """Tells whether JAX made an operation by transposing another; what a region computes again is not of them."""
    return "transpose(" in vertex.scope and "rematted_computation" not in vertex.scope


def float8_dtypes(vertex: Vertex) -> tuple[Any, Any]:
    """Returns the formats of the operands of a product."""
    return jnp.float8_e5m2 if is_backward(vertex) else jnp.float8_e4m3fn, jnp.float8_e4m3fn

"""Number formats of products: what their operands are rounded to, how they are scaled, and at which rate they run.

Values and weights in float8 are e4m3 (3 bits of mantissa), cotangents e5m2, whose range is wider. JAX transposes a
product to one whose first operand is the cotangent, so that operand of a product in the backward pass counts as one.
A scale belongs to a whole tensor, to a row of what a product contracts, or to a block of it.

Source: Micikevicius et al., "FP8 Formats for Deep Learning" (2022), https://arxiv.org/abs/2209.05433; blocks are those
of the "OCP Microscaling Formats (MX) Specification", version 1.0 (2023), but for scales that are rounded up.
"""

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp

from search_spaces.partition_specs import IndexedSpec
from search_spaces.sharding.graph import Value, Vertex
from search_spaces.sharding.spec import axes_in

FormattedProduct = tuple[int, str]
"""A product in a format: the index of its vertex, and the name of the format."""
UNCERTAIN = ("while", "cond")
"""Primitives whose bodies may run any number of times."""
BLOCK = 32
"""Numbers that share a scale in formats of blocks."""


class ProductFormat(NamedTuple):
    """A format that the operands of a product may be rounded to.

    Attributes:
      rate: the dtype at whose rate hardware multiplies such numbers.
      cotangents: of a cotangent, in float8 with a wider range.
      scaled: what has a scale of its own: a tensor, each row of what the product contracts, or each block of a row.
      num_bytes: of one number with its part of the scales.
      is_delayed: whether scales are those of earlier steps (`delayed_scales`).
    """

    name: str
    rate: str
    dtype: Any
    cotangents: Any
    scaled: Literal["tensor", "row", "block"]
    num_bytes: float
    is_delayed: bool = False

    def dtypes(self, vertex: Vertex) -> tuple[Any, Any]:
        """Returns the dtypes of the operands of a product."""
        return self.cotangents if is_backward(vertex) else self.dtype, self.dtype

    def maxima(self, vertex: Vertex, position: int, spec: IndexedSpec) -> tuple[int, ...]:
        """Returns the mesh axes over which a product waits for largest magnitudes of an operand, if that has a spec."""
        if self.scaled == "tensor":
            return () if self.is_delayed else tuple(sorted(axes_in(spec)))
        return tuple(sorted(axis for d in contracted(vertex, position) for axis in spec[d]))


_FLOAT8 = "float8_e4m3fn"
FORMATS = {
    f.name: f
    for f in (
        ProductFormat("float8", _FLOAT8, jnp.float8_e4m3fn, jnp.float8_e5m2, "tensor", 1.0),
        ProductFormat("float8_delayed", _FLOAT8, jnp.float8_e4m3fn, jnp.float8_e5m2, "tensor", 1.0, is_delayed=True),
        ProductFormat("float8_rows", _FLOAT8, jnp.float8_e4m3fn, jnp.float8_e5m2, "row", 1.0),
        ProductFormat("int8", "int8", jnp.int8, jnp.int8, "row", 1.0),
        ProductFormat("float4", "float4_e2m1fn", jnp.float4_e2m1fn, jnp.float4_e2m1fn, "block", 0.5 + 1 / BLOCK),
    )
}
"""The formats, by name."""


def takes_formats(vertex: Vertex) -> bool:
    """Returns whether an operation is a product of floating-point arrays of more than 8 bits."""
    return vertex.primitive == "dot_general" and all(
        isinstance(operand, Value) and jnp.issubdtype(operand.dtype, jnp.floating) and operand.dtype.itemsize > 1
        for operand in vertex.operands
    )


def takes(vertex: Vertex, name: str) -> bool:
    """Returns whether an operation is a product that can be in a format.

    One of blocks contracts whole blocks. One with delayed scales runs in each step: not in a branch, or in a loop of
    unknown length.
    """
    to = FORMATS[name]
    if not takes_formats(vertex) or (to.scaled == "block" and not has_whole_blocks(vertex)):
        return False
    return not to.is_delayed or all(caller.primitive.name not in UNCERTAIN for caller in vertex.callers)


def has_whole_blocks(vertex: Vertex, num_parts: int = 1) -> bool:
    """Returns whether a product contracts whole blocks if the dimension that they lie along is split evenly."""
    dims, operand = contracted(vertex, 0), vertex.operands[0]
    assert isinstance(operand, Value)
    return bool(dims) and operand.shape[dims[-1]] % (BLOCK * num_parts) == 0


def contracted(vertex: Vertex, position: int) -> tuple[int, ...]:
    """Returns the dimensions of an operand that a product contracts; blocks lie along the last one."""
    assert vertex.equation is not None
    return tuple(vertex.equation.params["dimension_numbers"][0][position])


def is_backward(vertex: Vertex) -> bool:
    """Returns whether JAX made an operation by transposing another; what a region computes again is not of them."""
    return "transpose(" in vertex.scope and "rematted_computation" not in vertex.scope


def vertices_of(products: Iterable[FormattedProduct]) -> frozenset[int]:
    """Returns the indices of the vertices of products in formats."""
    return frozenset(vertex for vertex, _ in products)

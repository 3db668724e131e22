"""Products in float8: their operands are rounded to 8 bits, and multiplied at the rate that a device has for these.

Most of a training step's arithmetic is in products, and GPUs multiply float8 numbers twice as fast as bfloat16. An
operand is divided by a scale, so that its largest magnitude is the largest number of the format, and rounded; the
products are summed in float32 and multiplied by both scales. The largest magnitude is that of the whole tensor: the
maximum over the mesh axes that split it. So a product has the same numbers however it is sharded.

Values and weights are rounded to e4m3 (3 bits of mantissa), cotangents to e5m2, whose range is wider. JAX transposes a
product to one whose first operand is the cotangent, so that operand of a product in the backward pass counts as one.

Source: Micikevicius et al., "FP8 Formats for Deep Learning" (2022), https://arxiv.org/abs/2209.05433.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from search_spaces.replay import bind, context_of
from search_spaces.sharding.base import Layout, ReshardStep
from search_spaces.sharding.graph import Graph, Value, Vertex
from search_spaces.sharding.interpreter import GraphInterpreter, ReadOperand
from search_spaces.sharding.schedule import ProgramSchedule

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


def float8_product(vertex: Vertex, operands: Sequence[Any], axes: Sequence[Sequence[str]]) -> list[Any]:
    """Returns the product of a vertex in float8, of one device's blocks.

    Args:
      vertex: which `takes_float8`.
      operands: blocks.
      axes: for each operand the names of the mesh axes that split it.
    """
    rounded = [_rounded(*parts) for parts in zip(operands, _dtypes(vertex), axes, strict=True)]
    codes, scales = zip(*rounded, strict=True)
    return _scaled(vertex, codes, scales)


class SwitchedProducts:
    """A graph on one device, in which groups of products are in float8 or not, as an argument says.

    It rounds as `float8_product` does, but multiplies the rounded numbers in the operands' own type, which has them
    all. So one compiled function measures every group.

    Args:
      graph: the traced function.
      layout: any layout; on one device specs mean nothing.
      group_of: by the index of a vertex, the number of its group.
    """

    def __init__(self, graph: Graph, layout: Layout, group_of: Mapping[int, int]):
        self.graph, self.layout, self.group_of = graph, layout._replace(rounded=frozenset()), group_of

    def __call__(self, in_float8: jax.Array, *arguments: Any) -> list[Any]:
        """Returns the flat results; `in_float8` is `[groups]`, of booleans."""
        arrays = _Switched(self.group_of, in_float8)
        run = GraphInterpreter(self.graph, self.layout, lambda source, target: (), arrays, ProgramSchedule())
        return run(arguments, self.graph.constant_arrays)


class _Switched:
    """`interpreter.Arrays` on one device."""

    def __init__(self, group_of: Mapping[int, int], in_float8: jax.Array):
        self.group_of, self.in_float8 = group_of, in_float8

    def reshard(self, array: Any, value: Value, source: Any, steps: Sequence[ReshardStep]) -> Any:
        del value, source, steps
        return array

    def fix(self, array: Any, value: Value, spec: Any) -> Any:
        del value, spec
        return array

    def operate(self, vertex: Vertex, read: ReadOperand) -> Sequence[Any]:
        assert vertex.equation is not None
        operands = [read(operand, ()) for operand in vertex.operands]
        if vertex.index not in self.group_of:
            return bind(vertex.equation, operands)
        switch, parts = self.in_float8[self.group_of[vertex.index]], []
        for operand, dtype in zip(operands, _dtypes(vertex), strict=True):
            codes, scale = _rounded(operand, dtype, ())
            parts.append((jnp.where(switch, codes.astype(operand.dtype), operand), jnp.where(switch, scale, 1.0)))
        codes, scales = zip(*parts, strict=True)
        return _scaled(vertex, codes, scales)

    def reduce(self, vertex: Vertex, results: Sequence[Any]) -> Sequence[Any]:
        del vertex
        return results

    def context_of(self, equation: core.JaxprEqn) -> AbstractContextManager[None]:
        return context_of(equation)


def _dtypes(vertex: Vertex) -> tuple[Any, Any]:
    return jnp.float8_e5m2 if is_backward(vertex) else jnp.float8_e4m3fn, jnp.float8_e4m3fn


def _rounded(array: Any, dtype: Any, axes: Sequence[str]) -> tuple[jax.Array, jax.Array]:
    """Returns an array in a format of 8 bits, and the scale by which it has to be multiplied."""
    most = jnp.max(jnp.abs(array), initial=0).astype(jnp.float32)
    most = lax.pmax(most, tuple(axes)) if axes else most
    largest = float(jnp.finfo(dtype).max)
    scale = jnp.where(most > 0, most / largest, 1.0)
    # The division may round to just beyond the largest number, which the format does not have.
    return jnp.clip(array.astype(jnp.float32) / scale, -largest, largest).astype(dtype), scale


def _scaled(vertex: Vertex, codes: Sequence[Any], scales: Sequence[Any]) -> list[Any]:
    assert vertex.equation is not None
    (product,) = bind(vertex.equation, codes, preferred_element_type=jnp.dtype(jnp.float32), out_sharding=None)
    return [(product * (scales[0] * scales[1])).astype(vertex.results[0].dtype)]

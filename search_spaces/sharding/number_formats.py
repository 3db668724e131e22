"""Products in float8: their operands are rounded to 8 bits, and multiplied at the rate that a device has for these.

Most of a training step's arithmetic is in products, and GPUs multiply float8 numbers twice as fast as bfloat16. An
operand is divided by a scale, so that its largest magnitude is the largest number of the format, and rounded; the
products are summed in float32 and multiplied by both scales. The largest magnitude is that of the whole tensor: the
maximum over the mesh axes that split it. So a product has the same numbers however it is sharded.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from search_spaces.replay import bind, context_of
from search_spaces.sharding.base import Layout, ReshardStep
from search_spaces.sharding.float8 import float8_dtypes
from search_spaces.sharding.graph import Graph, Value, Vertex
from search_spaces.sharding.interpreter import GraphInterpreter, ReadOperand
from search_spaces.sharding.schedule import ProgramSchedule


def float8_product(vertex: Vertex, operands: Sequence["Codes"]) -> list[Any]:
    """Returns the product of a vertex that `takes_float8`, of one device's blocks of rounded operands."""
    codes, scales = zip(*operands, strict=True)
    return _scaled(vertex, codes, scales)


class Codes(NamedTuple):
    """A block of an array that is rounded to 8 bits.

    Attributes:
      codes: the block.
      scale: by which the numbers of the whole array have to be multiplied, float32.
    """

    codes: jax.Array
    scale: jax.Array


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
        self.graph, self.layout, self.group_of = graph, layout.with_float8(()), group_of

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
        for operand, dtype in zip(operands, float8_dtypes(vertex), strict=True):
            codes, scale = rounded(operand, dtype, ())
            parts.append((jnp.where(switch, codes.astype(operand.dtype), operand), jnp.where(switch, scale, 1.0)))
        codes, scales = zip(*parts, strict=True)
        return _scaled(vertex, codes, scales)

    def reduce(self, vertex: Vertex, results: Sequence[Any]) -> Sequence[Any]:
        del vertex
        return results

    def context_of(self, equation: core.JaxprEqn) -> AbstractContextManager[None]:
        return context_of(equation)


def rounded(array: Any, dtype: Any, axes: Sequence[str]) -> Codes:
    """Returns an array in a format of 8 bits.

    Args:
      array: a block.
      dtype: the format.
      axes: names of the mesh axes that split the whole array.
    """
    most = jnp.max(jnp.abs(array), initial=0).astype(jnp.float32)
    most = lax.pmax(most, tuple(axes)) if axes else most
    largest = float(jnp.finfo(dtype).max)
    least = float(jnp.finfo(jnp.float32).smallest_normal)  # smaller scales are 0 where subnormal numbers are flushed
    scale = jnp.where(most > 0, jnp.maximum(most / largest, least), 1.0)
    # The division may round to just beyond the largest number, which the format does not have.
    return Codes(jnp.clip(array.astype(jnp.float32) / scale, -largest, largest).astype(dtype), scale)


def _scaled(vertex: Vertex, codes: Sequence[Any], scales: Sequence[Any]) -> list[Any]:
    assert vertex.equation is not None
    (product,) = bind(vertex.equation, codes, preferred_element_type=jnp.dtype(jnp.float32), out_sharding=None)
    return [(product * (scales[0] * scales[1])).astype(vertex.results[0].dtype)]

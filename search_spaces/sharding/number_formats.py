"""Products in float8: their operands are rounded to 8 bits, and multiplied at the rate that a device has for these.

Most of a training step's arithmetic is in products, and GPUs multiply float8 numbers twice as fast as bfloat16. An
operand is divided by a scale, so that its largest magnitude is the largest number of the format, and rounded; the
products are summed in float32 and multiplied by both scales. The largest magnitude is that of the whole tensor: the
maximum over the mesh axes that split it. So a product has the same numbers however it is sharded.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from search_spaces.replay import bind, context_of
from search_spaces.sharding.base import Coded, FormatKey, Layout, ReshardStep, Rule
from search_spaces.sharding.coded_sums import sum_in_parts
from search_spaces.sharding.codes import FORMATS
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


class SwitchedFormats:
    """A graph on one device, in which products are in float8 or not, and sums in codes, as an argument says.

    It rounds as `float8_product` does, but multiplies the rounded numbers in the operands' own type, which has them
    all; and sums as `sum_in_parts` does. So one compiled function measures every group.

    Args:
      graph: the traced function.
      layout: any layout; on one device specs mean nothing.
      number_of: by what can be in fewer bits, the number of its switch.
      rules: of the vertices.
      num_devices: that share each sum.
    """

    def __init__(
        self,
        graph: Graph,
        layout: Layout,
        number_of: Mapping[FormatKey, int],
        rules: Sequence[Rule | None] = (),
        num_devices: int = 1,
    ):
        self.graph, self.layout = graph, layout.with_float8(())
        self.number_of, self.rules, self.num_devices = number_of, rules, num_devices

    def __call__(self, switches: jax.Array, *arguments: Any) -> list[Any]:
        """Returns the flat results; `switches` are booleans."""
        arrays = _Switched(self, switches)
        run = GraphInterpreter(self.graph, self.layout, lambda source, target: (), arrays, ProgramSchedule())
        return run(arguments, self.graph.constant_arrays)


class _Switched:
    """`interpreter.Arrays` on one device."""

    def __init__(self, program: SwitchedFormats, switches: jax.Array):
        self.program, self.switches = program, switches
        self.sums: dict[int, list[tuple[int, Coded]]] = {}
        for key, number in program.number_of.items():
            if isinstance(key, Coded) and key.kind == "sum":
                self.sums.setdefault(key.index, []).append((number, key))

    def reshard(self, array: Any, value: Value, source: Any, steps: Sequence[ReshardStep]) -> Any:
        del value, source, steps
        return array

    def fix(self, array: Any, value: Value, spec: Any) -> Any:
        del value, spec
        return array

    def operate(self, vertex: Vertex, read: ReadOperand) -> Sequence[Any]:
        assert vertex.equation is not None
        operands = [read(operand, ()) for operand in vertex.operands]
        if vertex.index not in self.program.number_of:
            return self._summed(vertex, operands, bind(vertex.equation, operands))
        switch, parts = self.switches[self.program.number_of[vertex.index]], []
        for operand, dtype in zip(operands, float8_dtypes(vertex), strict=True):
            codes, scale = rounded(operand, dtype, ())
            parts.append((jnp.where(switch, codes.astype(operand.dtype), operand), jnp.where(switch, scale, 1.0)))
        codes, scales = zip(*parts, strict=True)
        numbers = [(code * scale).astype(code.dtype) for code, scale in parts]
        return self._summed(vertex, numbers, _scaled(vertex, codes, scales))

    def _summed(self, vertex: Vertex, operands: Sequence[Any], results: list[Any]) -> list[Any]:
        """Returns the results, or sums of parts in the format that is switched on."""
        rule = self.program.rules[vertex.index] if vertex.index in self.sums else None
        if rule is None:
            return results

        def in_parts(coded: Coded) -> Any:
            return sum_in_parts(vertex, rule, operands, self.program.num_devices, FORMATS[coded.format])[0]

        (result,) = results
        for number, coded in self.sums[vertex.index]:
            result = lax.cond(self.switches[number], partial(in_parts, coded), lambda result=result: result)
        return [result]

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

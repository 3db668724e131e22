"""Which operations take parts of sums to parts of sums."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from search_spaces.pipelines.batch_states import State
from search_spaces.sharding.graph import Vertex

# fmt: off
# Operations that are linear in what the names say; with whole others they take parts of sums to parts of sums.
_LINEAR_IN_ALL = frozenset(
    ("add", "add_any", "sub", "concatenate", "stack", "neg", "convert_element_type", "copy", "copy_p", "reshape",
     "transpose", "squeeze", "expand_dims", "broadcast_in_dim", "reduce_sum", "rev", "slice", "optimization_barrier",
     "split", "unstack")
)
# fmt: on
_LINEAR_IN_ONE = frozenset({"mul", "dot_general"})
_LINEAR_IN_FIRST = frozenset({"div", "dynamic_slice", "gather", "cumsum"})
_LINEAR_IN_CASES = frozenset({"select_n"})
_LINEAR_IN_FIRST_TWO = frozenset({"dynamic_update_slice", "pad"})


def is_linear(vertex: Vertex, states: Sequence[State]) -> bool:
    """Tells whether an operation is linear in the operands that are parts of sums."""
    name, partial = vertex.primitive, [i for i, state in enumerate(states) if state != "whole"]
    if not _has_linear_numbers(vertex, partial):
        return False
    if name in _LINEAR_IN_ALL:
        return True
    if name in _LINEAR_IN_ONE:
        return len(partial) == 1
    if name in _LINEAR_IN_FIRST:
        return partial == [0]
    if name in _LINEAR_IN_CASES:
        return 0 not in partial
    return name in _LINEAR_IN_FIRST_TWO and set(partial) <= {0, 1}


def counted_operands(vertex: Vertex, states: Sequence[State]) -> set[int]:
    """Returns the operands of a linear operation that are added to parts of sums, so that one micro-batch counts them.

    A factor counts in all micro-batches, and so do conditions and positions.
    """
    if vertex.primitive in _LINEAR_IN_ONE | _LINEAR_IN_FIRST:
        return set()
    counted = {i for i, state in enumerate(states) if state == "whole"}
    if vertex.primitive in _LINEAR_IN_CASES:
        return counted - {0}
    return counted & {0, 1} if vertex.primitive in _LINEAR_IN_FIRST_TWO else counted


def _has_linear_numbers(vertex: Vertex, partial: Sequence[int]) -> bool:
    """Tells whether types and parameters leave an operation linear: nothing is rounded to integers or out of range.

    A gather that fills what is out of bounds would add its fill once for each micro-batch.
    """
    name, equation = vertex.primitive, vertex.equation
    assert equation is not None
    types = [jnp.dtype(equation.invars[i].aval.dtype) for i in partial]  # pyright: ignore[reportAttributeAccessIssue]
    if any(dtype == jnp.bool for dtype in types):
        return False
    if name == "convert_element_type":
        return _keeps_sums(types[0], jnp.dtype(equation.params["new_dtype"]))
    if name == "div":
        return jnp.issubdtype(types[0], jnp.inexact)
    if name == "gather":
        fill = equation.params["fill_value"]
        is_zero_or_nan = jnp.issubdtype(types[0], jnp.inexact) if fill is None else fill == 0 or fill != fill
        return equation.params["mode"] != lax.GatherScatterMode.FILL_OR_DROP or is_zero_or_nan
    return True


def _keeps_sums(source: Any, target: Any) -> bool:
    """Tells whether converting the parts of a sum is, but for rounding, converting the sum."""
    if target == jnp.bool:
        return False
    if jnp.issubdtype(source, jnp.integer):
        if jnp.issubdtype(target, jnp.integer):
            return jnp.iinfo(target).max >= jnp.iinfo(source).max and jnp.iinfo(target).min <= jnp.iinfo(source).min
        return not jnp.issubdtype(target, jnp.floating) or float(jnp.finfo(target).max) >= jnp.iinfo(source).max
    if not jnp.issubdtype(target, jnp.inexact):
        return False
    return bool(jnp.finfo(target).nexp >= jnp.finfo(source).nexp)  # bfloat16 has the range of float32

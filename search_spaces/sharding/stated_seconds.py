"""What a `shard_map` says itself that it takes, where counting the bytes of its operands would be far off.

Lookups in tables read a few rows of arrays of many gigabytes. So whoever writes such a mapping marks what its body
returns with the seconds that go by until it is there. A mark is an identity that the backward pass keeps: the mark of a
gradient has the seconds of the way back. The seconds of a mapping are the sum of its marks.
"""

from typing import Any

import jax
from jax.extend import core
from jax.interpreters import ad, batching, mlir

stated_seconds_p = core.Primitive("stated_seconds")


def stating_seconds(results: Any, forward_s: float, backward_s: float = 0.0) -> Any:
    """Returns what a `shard_map`'s body returns, marked with seconds for a plan that the mapping is part of.

    Args:
      results: a pytree of arrays, which share the seconds equally.
      forward_s: until all are there, on the slowest device, with what is sent.
      backward_s: from their gradients on, until the gradients of the mapping's operands are there.
    """
    share = 1 / max(len(jax.tree.leaves(results)), 1)
    return jax.tree.map(lambda array: _marked(array, share * forward_s, share * backward_s), results)


def stated_seconds(equation: core.JaxprEqn) -> float | None:
    """Returns the seconds of one execution that a `shard_map` states; None where it states nothing."""
    if equation.primitive.name != "shard_map":
        return None
    seconds = [e.params["forward_s"] for e in equation.params["jaxpr"].eqns if e.primitive is stated_seconds_p]
    return sum(seconds) if seconds else None


def _transposed(gradient: Any, array: Any, *, forward_s: float, backward_s: float) -> tuple[Any]:
    del array
    if isinstance(gradient, ad.Zero):
        return (gradient,)
    return (_marked(gradient, backward_s, forward_s),)


def _marked(array: jax.Array, forward_s: float, backward_s: float) -> jax.Array:
    return stated_seconds_p.bind(array, forward_s=float(forward_s), backward_s=float(backward_s))


def _as_it_is(array: jax.Array, **seconds: float) -> jax.Array:
    del seconds
    return array


stated_seconds_p.def_impl(_as_it_is)
stated_seconds_p.def_abstract_eval(_as_it_is)
mlir.register_lowering(stated_seconds_p, lambda context, array, **seconds: [array])
ad.deflinear2(stated_seconds_p, _transposed)
batching.defvectorized(stated_seconds_p)

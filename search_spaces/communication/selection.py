"""What runs at a site: one strategy, one by a traced number, or a mixture by weights."""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from search_spaces.base import Selected


def select(functions: Sequence[Callable[..., Any]], selected: Selected, *operands: Any) -> Any:
    """The selected function's result; for weights the weighted sum of all results."""
    if isinstance(selected, int):
        return functions[selected](*operands)
    if jnp.ndim(selected) == 0:
        return lax.switch(selected, functions, *operands)
    results = [function(*operands) for function in functions]

    def mixed(*xs: jax.Array) -> jax.Array:
        return reduce(jnp.add, [w * x for w, x in zip(selected, xs, strict=True)]).astype(xs[0].dtype)

    return jax.tree.map(mixed, *results)


def with_backward(
    forward: Callable[..., jax.Array], backward: Callable[..., jax.Array], x: jax.Array, *extras: Any
) -> jax.Array:
    """`forward(x, extras[0], *extras[2:])`, whose cotangent is `backward(cotangent, extras[1], *extras[2:])`.

    Derivatives with respect to `extras[0]` are the forward's own; those with respect to the others are zero.
    """

    @jax.custom_vjp
    def op(x: jax.Array, ahead: Any, back: Any, others: Any) -> jax.Array:
        return forward(x, ahead, *others)

    def op_forward(x: jax.Array, ahead: Any, back: Any, others: Any) -> Any:
        y, pull = jax.vjp(lambda a: forward(x, a, *others), ahead)
        return y, (pull, back, others)

    def op_backward(saved: Any, cotangent: jax.Array) -> Any:
        pull, back, others = saved
        return backward(cotangent, back, *others), *pull(cotangent), None, None

    op.defvjp(op_forward, op_backward)
    ahead, back, *others = extras
    return op(x, ahead, back, others)

"""Exact results of which a backward pass leaves, as the gradient of a probe, what errors would do to the loss."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from search_spaces.communication.collectives import CollectiveOp


def probed(
    y: jax.Array, errors: jax.Array, probe: jax.Array, axes: tuple[str, ...], num_copies: int, scale: float
) -> jax.Array:
    """`y`, such that a backward pass leaves loss_increases as the gradient of `probe`.

    Args:
      y: a site's exact result.
      errors: `[S, *y.shape]`, each strategy's result minus `y`.
      probe: `[S]`, of any value.
      axes: over which the result is copied, if it is.
      num_copies: how many devices hold the same result; their cotangents are summed and each counts its share.
      scale: of the damage.

    Returns:
      `y`; the gradient of `probe` is scale/2 · Σ_t (g_t · e_t)² `[S]`, with t over all dimensions of `y` but the last.
    """

    @jax.custom_vjp
    def op(y: jax.Array, errors: jax.Array, probe: jax.Array) -> jax.Array:
        return y

    def op_backward(errors: jax.Array, cotangent: jax.Array) -> Any:
        whole = lax.psum(cotangent, axes) if num_copies > 1 else cotangent
        loss_increases = scale / num_copies * row_loss_increases(whole, errors)
        return cotangent, jnp.zeros_like(errors), loss_increases

    op.defvjp(lambda y, errors, probe: (y, errors), op_backward)
    return op(y, lax.stop_gradient(errors), probe)


def probed_back(
    collective: CollectiveOp, errors: Callable[..., jax.Array], x: jax.Array, probe: jax.Array, others: Any
) -> jax.Array:
    """The exact collective, with loss_increases of its way back; to run under `jax.jvp` within a gradient.

    Args:
      collective: forward.
      errors: `errors(cotangent, result, others)` `[S, *x.shape]`, each strategy's way back minus the exact one.
      x: the operand, of which `jax.jvp` knows the tangent.
      probe: `[S]`, of any value.
      others: arrays for `errors`.

    Returns:
      The result; the gradient of `probe` is 1/2 · Σ_t (ẋ_t · e_t)² `[S]`, with t over all dimensions of `x` but the
      last, and tangents of copies of what the way back leaves summed. For a tangent of x along v in the parameters
      ẋ · e is the inner product of v and what e changes in their gradients.
    """
    back = collective.transposed()

    @jax.custom_vjp
    def with_tangent(x: jax.Array, tangent: jax.Array, probe: jax.Array, others: Any) -> jax.Array:
        return collective.exact(x)

    def pull_back(saved: Any, cotangent: jax.Array) -> Any:
        tangent, others = saved
        result = back.exact(cotangent)
        whole = lax.psum(tangent, back.axes) if back.num_copies > 1 else tangent
        loss_increases = row_loss_increases(whole, errors(cotangent, result, others)) / back.num_copies
        return result, None, loss_increases, None

    with_tangent.defvjp(lambda x, tangent, probe, others: (collective.exact(x), (tangent, others)), pull_back)

    @jax.custom_jvp
    def op(x: jax.Array, probe: jax.Array, others: Any) -> jax.Array:
        return collective.exact(x)

    @op.defjvp
    def _(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
        x, probe, others = primals
        tangent = lax.stop_gradient(tangents[0])
        return with_tangent(x, tangent, probe, others), collective.exact(tangent)

    return op(x, probe, others)


def unprobed_back(collective: CollectiveOp, x: jax.Array) -> jax.Array:
    """The exact collective, which `jax.jvp` may pass too."""

    @jax.custom_jvp
    def op(x: jax.Array) -> jax.Array:
        return collective.exact(x)

    op.defjvp(lambda primals, tangents: (collective.exact(*primals), collective.exact(*tangents)))
    return op(x)


def row_loss_increases(adjoint: jax.Array, errors: jax.Array) -> jax.Array:
    """½ Σ_t (a_t · e_t)² `[S]` for adjoints `[..., elements]` and errors `[S, ..., elements]`."""
    product = adjoint.astype(jnp.float32) * errors
    rows = product.sum(axis=-1) if product.ndim > 1 else product
    return 0.5 * jnp.square(rows).reshape(len(errors), -1).sum(axis=1)

"""A probe is a zero-valued input whose gradient in the backward pass *is* the predicted increase of the loss.

A probe of a site is an array `[S]` of zeros that leaves the exact result as it is. A custom derivative stands in for
its gradient: the backward pass brings the cotangent g of the result, and from g and the error e_j of strategy j (its
result minus the exact one) follows the predicted increase ½ Σ_t (g_t · e_t)². `jax.grad` with respect to the probes of
all sites thus returns the increases of all strategies, at the price of one backward pass.

Backward sites need the derivative of their result instead, which is a tangent of the forward pass. The second half of
this file lets `jax.jvp` pass what it cannot pass by itself: collectives and functions with a custom backward.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from search_spaces.communication.base import CollectiveOp
from search_spaces.communication.collectives import run_exact
from search_spaces.replay import bind


def probed(
    y: jax.Array, errors: jax.Array, probe: jax.Array, axes: tuple[str, ...], num_copies: int, scale: float
) -> jax.Array:
    """Returns `y`; the gradient of `probe` is scale/2 · Σ_t (g_t · e_t)² `[S]`, t over all dimensions but the last.

    Args:
      y: the exact result of a site.
      errors: `[S, *y.shape]`, each strategy's result minus `y`.
      probe: `[S]`, of any value.
      axes: over which the result is copied, if it is.
      num_copies: how many devices hold the same result; their cotangents are summed, and each counts for its share.
      scale: of the increase.
    """

    @jax.custom_vjp
    def op(y: jax.Array, errors: jax.Array, probe: jax.Array) -> jax.Array:
        return y

    def op_backward(errors: jax.Array, cotangent: jax.Array) -> Any:
        whole = lax.psum(cotangent, axes) if num_copies > 1 else cotangent
        return cotangent, jnp.zeros_like(errors), scale / num_copies * _second_order(whole, errors)

    op.defvjp(lambda y, errors, probe: (y, errors), op_backward)
    return op(y, lax.stop_gradient(errors), probe)


def probed_backward(
    collective: CollectiveOp, errors: Callable[..., jax.Array], x: jax.Array, probe: jax.Array, others: Any
) -> jax.Array:
    """Runs a collective exactly, with a probe of its backward site; to be run under `jax.jvp` within a gradient.

    For a tangent ẋ of x along v in the parameters, ẋ · e is the inner product of v and of what e changes in the
    gradients of the parameters. The gradient of `probe` is ½ · Σ_t (ẋ_t · e_t)² `[S]`, t over all dimensions of `x` but
    the last; tangents of copies of the backward site's result are summed.

    Args:
      collective: of the forward site.
      errors: `errors(cotangent, result, others)`, `[S, *x.shape]`: each strategy's result at the backward site minus
        the exact one.
      x: the operand of the forward site.
      probe: `[S]`, of any value.
      others: arrays for `errors`.
    """
    transposed = collective.transposed()

    @jax.custom_vjp
    def run(x: jax.Array, tangent: jax.Array, probe: jax.Array, others: Any) -> jax.Array:
        return run_exact(collective, x)

    def run_backward(saved: Any, cotangent: jax.Array) -> Any:
        tangent, others = saved
        result = run_exact(transposed, cotangent)
        whole = lax.psum(tangent, transposed.axes) if transposed.num_copies > 1 else tangent
        increase = _second_order(whole, errors(cotangent, result, others)) / transposed.num_copies
        return result, None, increase, None

    run.defvjp(lambda x, tangent, probe, others: (run_exact(collective, x), (tangent, others)), run_backward)

    @jax.custom_jvp
    def op(x: jax.Array, probe: jax.Array, others: Any) -> jax.Array:
        return run_exact(collective, x)

    @op.defjvp
    def _(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
        x, probe, others = primals
        tangent = lax.stop_gradient(tangents[0])
        return run(x, tangent, probe, others), run_exact(collective, tangent)

    return op(x, probe, others)


def _second_order(adjoint: jax.Array, errors: jax.Array) -> jax.Array:
    """Returns ½ Σ_t (a_t · e_t)² `[S]` for adjoints `[..., elements]` and errors `[S, ..., elements]`."""
    product = adjoint.astype(jnp.float32) * errors
    rows = product.sum(axis=-1) if product.ndim > 1 else product
    return 0.5 * jnp.square(rows).reshape(len(errors), -1).sum(axis=1)


def with_tangent(collective: CollectiveOp, x: jax.Array) -> jax.Array:
    """Runs a collective exactly under `jax.jvp`, which cannot differentiate a `jax.custom_vjp` by itself."""

    @jax.custom_jvp
    def op(x: jax.Array) -> jax.Array:
        return run_exact(collective, x)

    op.defjvp(lambda primals, tangents: (run_exact(collective, *primals), run_exact(collective, *tangents)))
    return op(x)


def custom_vjp_with_tangents(equation: core.JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
    """Runs a user's `jax.custom_vjp` under `jax.jvp`: its tangents are the transpose of its custom backward.

    A custom backward that is not linear, such as one that clips, counts with its derivative at cotangents of 0.
    """
    differentiable = [_has_tangents(x) for x in operands]

    def results(numbers: Sequence[jax.Array], others: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        return _separated(bind(equation, _interleaved(differentiable, numbers, others)))

    @jax.custom_jvp
    def op(numbers: Sequence[jax.Array], others: Sequence[Any]) -> list[jax.Array]:
        return results(numbers, others)[0]

    @op.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        numbers, others = primals
        y, pull, _ = jax.vjp(lambda x: results(x, others), lax.stop_gradient(numbers), has_aux=True)
        _, push = jax.vjp(lambda cotangents: pull(cotangents)[0], jax.tree.map(jnp.zeros_like, y))
        return results(numbers, others)[0], push(lax.stop_gradient(tangents[0]))[0]

    numbers, others = _separated(operands)
    kinds = [jnp.issubdtype(var.aval.dtype, jnp.inexact) for var in equation.outvars]  # type: ignore[attr-defined]
    other_results = [] if all(kinds) else results(lax.stop_gradient(numbers), others)[1]
    return _interleaved(kinds, op(numbers, others), other_results)


def _has_tangents(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def _separated(values: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Separates the values that have tangents from the others."""
    values = list(values)
    return [x for x in values if _has_tangents(x)], [x for x in values if not _has_tangents(x)]


def _interleaved(differentiable: Sequence[bool], numbers: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Undoes `_separated`."""
    next_number, next_other = iter(numbers), iter(others)
    return [next(next_number if is_one else next_other) for is_one in differentiable]

"""Tangents of functions that have derivatives of their own for the way back alone."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from search_spaces.communication.interpreter import bind


def with_tangents(equation: core.JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
    """The results of a `jax.custom_vjp`, also under `jax.jvp`: tangents are the transpose of its way back.

    A way back that is not linear, as one that clips its cotangent, counts as it is at cotangents of 0.
    """
    differentiable = [jnp.issubdtype(jnp.result_type(x), jnp.inexact) for x in operands]

    def results(numbers: Sequence[jax.Array], others: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        return _parted(bind(equation, _merged(differentiable, numbers, others)))

    @jax.custom_jvp
    def op(numbers: Sequence[jax.Array], others: Sequence[Any]) -> list[jax.Array]:
        return results(numbers, others)[0]

    @op.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        numbers, others = primals
        found, pull, _ = jax.vjp(lambda x: results(x, others), lax.stop_gradient(numbers), has_aux=True)
        _, push = jax.vjp(lambda cotangents: pull(cotangents)[0], jax.tree.map(jnp.zeros_like, found))
        return results(numbers, others)[0], push(lax.stop_gradient(tangents[0]))[0]

    numbers, others = _parted(operands)
    kinds = [jnp.issubdtype(var.aval.dtype, jnp.inexact) for var in equation.outvars]  # type: ignore[attr-defined]
    rest = [] if all(kinds) else results(lax.stop_gradient(numbers), others)[1]
    return _merged(kinds, op(numbers, others), rest)


def _parted(values: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Those that have derivatives, and the others."""
    parts: tuple[list[Any], list[Any]] = [], []
    for x in values:
        parts[not jnp.issubdtype(jnp.result_type(x), jnp.inexact)].append(x)
    return parts


def _merged(differentiable: Sequence[bool], numbers: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    numbers_in_turn, others_in_turn = iter(numbers), iter(others)
    return [next(numbers_in_turn if is_one else others_in_turn) for is_one in differentiable]

"""Causal attention with scores in memory and its softmax in one kernel, as Transformer Engine and Megatron had it."""

import math

import jax
import jax.numpy as jnp

from search_spaces.sharding.custom_calls.declaration import kernel


def _weights(scores: jax.Array) -> jax.Array:
    """Returns the weights of a causal mask, `[B, heads, L, L]` in the type of the scores."""
    length = scores.shape[-1]
    seen = jnp.tril(jnp.ones((length, length), bool))
    return jax.nn.softmax(jnp.where(seen, scores.astype(jnp.float32), -1e9)).astype(scores.dtype)


def _weights_backward(scores: jax.Array, weights: jax.Array, gradient: jax.Array) -> jax.Array:
    del scores
    wide = weights.astype(jnp.float32) * gradient.astype(jnp.float32)
    return (wide - weights * wide.sum(axis=-1, keepdims=True)).astype(weights.dtype)


def _three_arrays(scores: jax.ShapeDtypeStruct, *others: jax.ShapeDtypeStruct) -> float:
    del others
    return 3.0 * math.prod(scores.shape) * scores.dtype.itemsize


_ARRAY = "b h q k"
_causal_softmax = kernel(
    _weights,
    f"{_ARRAY} -> {_ARRAY}",
    need_replication="q k",
    backward=kernel(
        _weights_backward,
        f"{_ARRAY}, {_ARRAY}, {_ARRAY} -> {_ARRAY}",
        need_replication="q k",
        bytes=_three_arrays,
        name="causal softmax backward",
    ),
    name="causal softmax",
)
"""One kernel, as Transformer Engine and Megatron have it: it reads scores and writes weights, both of 16 bits."""


def attend_by_scores(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Mixes values of as many heads as queries by weights in memory, all `[B, L, heads, D]`."""
    scores = jnp.einsum("blhd,bshd->bhls", query * query.shape[-1] ** -0.5, key)
    return jnp.einsum("bhls,bshd->blhd", _causal_softmax(scores), value)

"""cuDNN's attention of some queries to some keys: cuDNN's on NVIDIA GPUs, and the same in `jax.numpy` elsewhere.

So a model that is planned for GPUs can be run on the devices of any host.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from search_spaces.sharding.opaque.cudnn import FORWARD, bind_attention

_LARGE = -1e30
"""Stands for minus infinity among scores, so that a row without any key has no undefined numbers."""


def sequence_dimension(equation: core.JaxprEqn) -> int:
    """Returns which dimension of queries and keys is their sequence."""
    return 2 if equation.params["layout"] else 1


def is_causal(equation: core.JaxprEqn) -> bool:
    """Tells whether queries attend to no key after them."""
    return "CAUSAL" in str(equation.params["mask_type"])


def attend(equation: core.JaxprEqn, operands: Sequence[Any], **parameters: Any) -> list[Any]:
    """Returns the results of cuDNN's forward or backward for some operands, with some of its parameters changed.

    Dropout, packed sequences and keys in pages exist on NVIDIA GPUs alone.

    Args:
      equation: of the forward or of the backward.
      operands: as the equation has them: queries, keys, values, bias, six arrays of lengths and places; of the backward
        also the forward's statistics and output, and the output's gradient.
      parameters: of the equation's, other ones.
    """
    params = {**equation.params, **parameters}
    is_special = params["dropout_rate"] or any(operands[i].shape != (0,) for i in range(6, 10))
    if is_special or "ALIBI" in str(params["mask_type"]):
        return bind_attention(equation, operands, **parameters)
    reference = _forward if equation.primitive.name == FORWARD else _backward
    return list(
        jax.lax.platform_dependent(
            *operands,
            cuda=lambda *arrays: tuple(bind_attention(equation, arrays, **parameters)),
            default=partial(reference, params),
        )
    )


def _forward(params: dict[str, Any], *operands: Any) -> tuple[Any, ...]:
    """Returns the output, and in training the logarithm of each query's sum of exponentials."""
    query, key, value = (_heads_first(params, x) for x in operands[:3])
    scores, is_query = _scores(params, query, key, *operands[3:6])
    statistics = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.exp(scores - statistics[..., None]) * is_query
    out = jnp.einsum("bngts,bnsh->bngth", weights, _grouped(value, key.shape[1])[:, :, 0])
    out = _as_given(params, _joined(out)).astype(operands[0].dtype)
    return (out, _joined(statistics)) if params["is_training"] else (out,)


def _backward(params: dict[str, Any], *operands: Any) -> tuple[Any, ...]:
    """Returns the gradients, from the statistics of all keys, of which these may be a part.

    Source: Dao et al., "FlashAttention" (2022), algorithm 4.
    """
    query, key, value = (_heads_first(params, x) for x in operands[:3])
    statistics, out, cotangent = operands[10:13]
    num_heads = key.shape[1]
    scores, is_query = _scores(params, query, key, *operands[3:6])
    weights = jnp.exp(scores - _grouped(statistics[..., None], num_heads)) * is_query
    out, cotangent = (_grouped(_heads_first(params, x), num_heads) for x in (out, cotangent))
    query, key, value = _grouped(query, num_heads), key.astype(jnp.float32), value.astype(jnp.float32)
    of_weights = jnp.einsum("bngth,bnsh->bngts", cotangent, value) - (out * cotangent).sum(-1, keepdims=True)
    of_scores = weights * of_weights
    gradients = [
        _joined(params["scale"] * jnp.einsum("bngts,bnsh->bngth", of_scores, key)),
        params["scale"] * jnp.einsum("bngts,bngth->bnsh", of_scores, query),
        jnp.einsum("bngts,bngth->bnsh", weights, cotangent),
    ]
    results = [_as_given(params, x).astype(o.dtype) for x, o in zip(gradients, operands, strict=False)]
    if params["variadic_args"][1]:
        bias, of_scores = operands[3], _joined(of_scores)
        dims = [d for d, (n, m) in enumerate(zip(bias.shape, of_scores.shape, strict=True)) if n < m]
        results.append(of_scores.sum(dims, keepdims=True).astype(bias.dtype))
    return tuple(results)


def _scores(
    params: dict[str, Any], query: Any, key: Any, bias: Any, query_lengths: Any, key_lengths: Any
) -> tuple[Any, Any]:
    """Returns the scores `[batch, heads of keys, group, queries, keys]` and which queries there are."""
    length, num_keys = query.shape[2], key.shape[2]
    scores = params["scale"] * jnp.einsum("bngth,bnsh->bngts", _grouped(query, key.shape[1]), key.astype(jnp.float32))
    if bias.ndim == 4:
        whole = (bias.shape[0], query.shape[1], *bias.shape[2:])
        scores = scores + _grouped(jnp.broadcast_to(bias, whole), key.shape[1])
    place, place_of_key = jnp.arange(length)[:, None], jnp.arange(num_keys)
    is_seen, is_query = jnp.ones((length, num_keys), bool), jnp.ones((length, 1), bool)
    if "CAUSAL" in str(params["mask_type"]):
        is_seen &= place >= place_of_key
    if params.get("sliding_window_length"):
        is_seen &= place_of_key > place - params["sliding_window_length"]
    if "PADDING" in str(params["mask_type"]):
        is_seen = is_seen & (place_of_key < key_lengths[:, None, None, None, None])
        is_query = is_query & (place < query_lengths[:, None, None, None, None])
    return jnp.where(is_seen, scores, _LARGE), is_query


def _heads_first(params: dict[str, Any], array: Any) -> Any:
    return array if params["layout"] else array.swapaxes(1, 2)


_as_given = _heads_first  # the same two dimensions change places


def _grouped(array: Any, num_heads: int) -> Any:
    """Takes the dimension of heads apart into heads of keys and a group for each; returns float32."""
    batch, heads, *rest = array.shape
    return array.reshape(batch, num_heads, heads // num_heads, *rest).astype(jnp.float32)


def _joined(array: Any) -> Any:
    batch, heads, group, *rest = array.shape
    return array.reshape(batch, heads * group, *rest)

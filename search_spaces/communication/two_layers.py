"""Two layers as each device computes them: causal attention over a split sequence, and an expert layer.

The search chooses how far back a token sees, and how many tokens an expert takes.

Source: Beltagy et al., Longformer (arXiv:2004.05150), section 3.1, sliding windows, here of whole blocks. Lepikhin et
al., GShard (arXiv:2006.16668), section 2.2; with one expert for each token Fedus et al., Switch Transformer
(arXiv:2101.03961), section 2.2.

Letters for sizes: T tokens, E experts, K experts that a token goes to, C tokens in an expert's buffer.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from search_spaces.communication.call_sites import alternatives


def windowed_attention(
    name: str, query: jax.Array, key: jax.Array, value: jax.Array, axis: str, *, windows: Sequence[int] = (2, 1)
) -> jax.Array:
    """Computes causal self-attention of a sequence that is split into blocks, one for each device along a mesh axis.

    The exact choice sees the whole past: keys and values are all-gathered. A window of k blocks sees the device's own
    block and the k - 1 before it, each of which a collective permute brings. With k = 1 nothing is sent; with k of at
    least the number of devices the result is that of the whole past.

    Args:
      name: of the call site where the window is chosen.
      query: of this device's block, `[B, L, H, D]`.
      key: of this device's block, shaped as `query`.
      value: of this device's block, shaped as `query`.
      axis: the mesh axis over which the sequence is split.
      windows: numbers of blocks to choose from, beside the whole past; without any there is no choice.

    Returns:
      The result for this device's block, `[B, L, H, D]`.

    Raises:
      ValueError: shapes differ or do not have four dimensions, or windows are not distinct positive whole numbers.
    """
    if query.ndim != 4 or not query.shape == key.shape == value.shape:
        raise ValueError(
            f"`query`, `key` and `value` must have one shape [B, L, H, D], got {query.shape}, {key.shape} and "
            f"{value.shape}."
        )
    whole = isinstance(windows, Sequence) and all(isinstance(k, (int, np.integer)) and k >= 1 for k in windows)
    if not whole or len(set(windows)) < len(windows):
        raise ValueError(f"`windows` must be positive and distinct whole numbers of blocks, as (2, 1); got {windows}.")
    functions: dict[str, Callable[..., jax.Array]] = {"whole": partial(_attend_to_all, axis)}
    functions |= {f"{k} blocks" if k > 1 else "1 block": partial(_attend_to_window, axis, k) for k in windows}
    operands = query, jnp.stack([key, value])
    return alternatives(name, functions, *operands) if windows else _attend_to_all(axis, *operands)


def _attend_to_all(axis: str, query: jax.Array, key_value: jax.Array) -> jax.Array:
    key, value = lax.all_gather(key_value, axis, axis=2, tiled=True)
    return _attention(axis, query, key, value, jnp.arange(key.shape[1]))


def _attend_to_window(axis: str, num_blocks: int, query: jax.Array, key_value: jax.Array) -> jax.Array:
    num_devices, length = lax.axis_size(axis), query.shape[1]
    distances = range(min(num_blocks, num_devices))  # in blocks; the device's own block comes first
    blocks = [
        key_value,
        *(lax.ppermute(key_value, axis, [(i - b, i) for i in range(b, num_devices)]) for b in distances[1:]),
    ]
    starts = (lax.axis_index(axis) - jnp.array(distances)) * length
    key, value = jnp.concatenate(blocks, axis=2)
    return _attention(axis, query, key, value, (starts[:, None] + jnp.arange(length)).ravel())


def _attention(axis: str, query: jax.Array, key: jax.Array, value: jax.Array, positions: jax.Array) -> jax.Array:
    """Returns attention of this device's block to keys at positions `[S]`; negative positions are not attended to."""
    length = query.shape[1]
    query_positions = lax.axis_index(axis) * length + jnp.arange(length)
    visible = (positions >= 0) & (positions <= query_positions[:, None])
    scores = jnp.einsum("blhd,bshd->bhls", query, key) * query.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(visible, scores, jnp.finfo(scores.dtype).min), axis=-1)
    return jnp.einsum("bhls,bshd->blhd", weights, value)


def expert_layer(
    name: str,
    tokens: jax.Array,
    logits: jax.Array,
    expert: Callable[[Any, jax.Array], jax.Array],
    params: Any,
    axis: str,
    *,
    num_chosen: int = 2,
    capacity_factors: Sequence[float] = (2.0, 1.25, 1.0),
) -> jax.Array:
    """Applies to each token its best experts, weighted by their gates; experts are split over a mesh axis.

    An all-to-all sends the tokens to the devices of their experts, another one returns the results. Each expert has a
    buffer of C tokens, where C = capacity factor · tokens · chosen / experts, rounded up, and at most the number of
    tokens. First choices are placed before second ones, and early tokens before late ones; a token that finds an
    expert's buffer full gets zeros from this expert. The gates of several chosen experts sum to one; the gate of a
    single one is its probability.

    Example, with eight experts over the axis "model"::

        y = expert_layer("experts", x, x @ params["gate"], lambda w, x: jax.nn.gelu(x @ w["up"]) @ w["down"],
                         {"up": params["up"], "down": params["down"]}, "model")

    Args:
      name: of the call site where the capacity factor is chosen.
      tokens: of this device, `[T, M]`.
      logits: of their gates, `[T, E]`.
      expert: one expert's function of its parameters and any number S of tokens `[S, M]`; returns `[S, M]`, each row a
        function of its token alone.
      params: of this device's experts, each leaf `[E / devices, ...]`.
      axis: the mesh axis over which experts are split.
      num_chosen: experts for each token.
      capacity_factors: to choose from, the exact one first; with a single one there is no choice.

    Returns:
      The weighted results of the experts, `[T, M]`.

    Raises:
      ValueError: shapes do not fit, the devices do not divide the experts, more experts are chosen than there are, or
        capacity factors are missing, not positive and finite, or equal in their first six digits.
    """
    num_experts = logits.shape[-1]
    _check(tokens, logits, params, axis, num_chosen)
    factors = tuple(capacity_factors) if isinstance(capacity_factors, Sequence) else ()
    labels = [f"capacity {factor:g}" for factor in factors]
    if not factors or not all(0 < f < math.inf for f in factors) or len(set(labels)) < len(labels):
        raise ValueError(
            f"`capacity_factors` must be at least one, positive and distinct to six digits, got {capacity_factors}."
        )

    gates, chosen_experts = best_experts(logits, num_chosen)
    capacities = [buffer_tokens(factor, len(tokens), num_chosen, num_experts) for factor in factors]
    functions = {
        label: partial(_apply_experts, expert, axis, num_experts, capacity)
        for label, capacity in zip(labels, capacities, strict=True)
    }
    operands = params, tokens, gates.astype(tokens.dtype), chosen_experts
    if len(functions) == 1:
        return next(iter(functions.values()))(*operands)
    return alternatives(name, functions, *operands)


def balance_loss(logits: jax.Array) -> jax.Array:
    """Returns how unevenly gates with logits `[T, E]` spread tokens: 1 if evenly, E if all go to one expert.

    It is E · Σ_e (share of first choices · mean gate).

    Source: Switch Transformer (arXiv:2101.03961), equation 4; GShard's l_aux up to a factor.
    """
    num_experts = logits.shape[-1]
    first = jax.nn.one_hot(jnp.argmax(logits, axis=-1), num_experts)
    return num_experts * jnp.vdot(first.mean(axis=0), jax.nn.softmax(logits).mean(axis=0))


def _check(tokens: jax.Array, logits: jax.Array, params: Any, axis: str, num_chosen: int) -> None:
    """Raises `ValueError` where the shapes of an expert layer do not fit."""
    num_experts, num_devices = logits.shape[-1], lax.axis_size(axis)
    if tokens.ndim != 2 or logits.shape != (len(tokens), num_experts):
        raise ValueError(f"`tokens` must be [T, M] and `logits` [T, E], got {tokens.shape} and {logits.shape}.")
    if num_experts % num_devices:
        raise ValueError(
            f"`logits` are of {num_experts} experts; the {num_devices} devices of {axis!r} must divide it."
        )
    local = num_experts // num_devices
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if jnp.shape(leaf)[:1] != (local,):
            keys = jax.tree_util.keystr(path, simple=True, separator="/")
            name = f"`params` {keys!r}" if keys else "`params`"
            raise ValueError(f"{name} must begin with this device's {local} experts, got {jnp.shape(leaf)}.")
    if not 1 <= num_chosen <= num_experts:
        raise ValueError(f"`num_chosen` must be from 1 to the {num_experts} experts, not {num_chosen}.")


def _apply_experts(
    expert: Callable[[Any, jax.Array], jax.Array],
    axis: str,
    num_experts: int,
    capacity: int,
    params: Any,
    tokens: jax.Array,
    gates: jax.Array,
    chosen_experts: jax.Array,
) -> jax.Array:
    """Returns the layer's result with buffers of `capacity` tokens; `gates` and `chosen_experts` are `[T, K]`."""
    positions = buffer_positions(chosen_experts, num_experts)
    slots = jnp.where(positions < capacity, chosen_experts * capacity + positions, num_experts * capacity)
    buffers = jnp.zeros((num_experts * capacity, tokens.shape[1]), tokens.dtype)
    buffers = buffers.at[slots].add(tokens[:, None], mode="drop").reshape(num_experts, capacity, -1)
    with jax.named_scope("dispatch"):
        received_buffers = lax.all_to_all(buffers, axis, split_axis=0, concat_axis=1, tiled=True)
    results = jax.vmap(expert)(params, received_buffers)
    with jax.named_scope("combine"):
        returned_buffers = lax.all_to_all(results, axis, split_axis=1, concat_axis=0, tiled=True)
    rows = returned_buffers.reshape(num_experts * capacity, -1).at[slots].get(mode="fill", fill_value=0)
    return jnp.einsum("tk,tkm->tm", gates, rows)


def best_experts(logits: jax.Array, num_chosen: int) -> tuple[jax.Array, jax.Array]:
    """Returns the gates and the numbers of each token's best experts, `[T, K]` each, the best first.

    The gates of several chosen experts sum to one; the gate of a single one is its probability.
    """
    gates, chosen_experts = lax.top_k(jax.nn.softmax(logits), num_chosen)
    if num_chosen > 1:
        gates = gates / gates.sum(axis=-1, keepdims=True)
    return gates, chosen_experts


def buffer_tokens(capacity_factor: float, num_tokens: int, num_chosen: int, num_experts: int) -> int:
    """Returns C, the tokens in an expert's buffer for `num_tokens` tokens of one device; at most all of them."""
    return min(math.ceil(capacity_factor * num_tokens * num_chosen / num_experts), num_tokens)


def buffer_positions(chosen_experts: jax.Array, num_experts: int) -> jax.Array:
    """Returns how many tokens stand before each one in its expert's buffer, `[T, K]`.

    First choices stand before second ones, and early tokens before late ones. Where this is C or more there is no room.
    """
    in_turn = chosen_experts.T.ravel()  # all first choices, then all second ones
    of_expert = jax.nn.one_hot(in_turn, num_experts, dtype=jnp.int32)
    positions = ((of_expert.cumsum(axis=0) - 1) * of_expert).sum(axis=1)
    return positions.reshape(chosen_experts.shape[::-1]).T

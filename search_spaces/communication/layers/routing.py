"""Which experts a token goes to, and its place in their buffers; for all layers of experts.

Letters for sizes: T tokens, E experts, K experts that a token goes to, C tokens in an expert's buffer.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax


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

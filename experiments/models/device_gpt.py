"""A byte GPT written as every device computes it: tensor parallel over "model", data parallel over "data".

Heads and hidden units are split over "model", rows of the batch over "data"; layers are scanned, norms have no
parameters, the output head is tied to the embedding, which every device holds whole.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from experiments.models.gpt import next_token_loss
from experiments.models.text import VOCABULARY

SPECS = {
    "embedding": P(),
    "positions": P(),
    "layers": {
        "query_key_value": P(None, None, None, "model"),
        "out": P(None, "model"),
        "up": P(None, None, "model"),
        "down": P(None, "model"),
    },
}
BATCH_SPEC = P("data")


@dataclass(frozen=True)
class DeviceSizes:
    """Sizes of the whole model; devices along "model" must divide `heads`."""

    layers: int = 2
    width: int = 64
    heads: int = 4
    sequence: int = 64


def init(key: jax.Array, sizes: DeviceSizes) -> dict[str, Any]:
    """Returns whole parameters; those that write into the residual stream are smaller by the root of their number."""
    keys = jax.random.split(key, 6)
    layers, width, head = sizes.layers, sizes.width, sizes.width // sizes.heads

    def normal(key: jax.Array, shape: tuple[int, ...], scale: float) -> jax.Array:
        return scale * jax.random.normal(key, shape)

    residual = (2 * layers) ** -0.5
    return {
        "embedding": normal(keys[0], (VOCABULARY, width), width**-0.5),
        "positions": normal(keys[1], (sizes.sequence, width), width**-0.5),
        "layers": {
            "query_key_value": normal(keys[2], (layers, 3, width, sizes.heads, head), width**-0.5),
            "out": normal(keys[3], (layers, sizes.heads, head, width), residual * width**-0.5),
            "up": normal(keys[4], (layers, width, 4 * width), width**-0.5),
            "down": normal(keys[5], (layers, 4 * width, width), residual * (4 * width) ** -0.5),
        },
    }


def loss_fn(params: dict[str, Any], tokens: jax.Array) -> jax.Array:
    """Returns one device's mean cross-entropy in nats of its rows `[B, L + 1]` of tokens."""
    length = tokens.shape[1] - 1
    causal = jnp.tril(jnp.ones((length, length), bool))

    def layer(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        with jax.named_scope("attention"):
            query, key, value = jnp.einsum("blm,cmhd->cblhd", _normed(x), w["query_key_value"])
            scores = jnp.einsum("blhd,bshd->bhls", query, key) * query.shape[-1] ** -0.5
            weights = jax.nn.softmax(jnp.where(causal, scores, -1e9), axis=-1)
            x = x + lax.psum(jnp.einsum("bhls,bshd,hdm->blm", weights, value, w["out"]), "model")
        with jax.named_scope("mlp"):
            x = x + lax.psum(jax.nn.gelu(_normed(x) @ w["up"]) @ w["down"], "model")
        return x, None

    x = params["embedding"][tokens[:, :-1]] + params["positions"][:length]
    x, _ = lax.scan(layer, x, params["layers"])
    return next_token_loss(_normed(x) @ params["embedding"].T, tokens)


def _normed(x: jax.Array) -> jax.Array:
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred * lax.rsqrt(jnp.square(centred).mean(axis=-1, keepdims=True) + 1e-6)

"""A byte language model with experts, as every device computes it: sequence and experts split over "model".

Rows of the batch are split over "data". Each device along "model" has a block of the sequence, attends over a window of
blocks that is searched, and holds a part of the experts, whose capacity factor is searched; layers are scanned, norms
have no parameters, the output head is tied to the embedding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from experiments.models.gpt import next_token_loss
from experiments.models.text import VOCABULARY
from search_spaces.communication.two_layers import balance_loss, expert_layer, windowed_attention

SPECS = {
    "embedding": P(),
    "positions": P(),
    "layers": {
        "query_key_value": P(),
        "out": P(),
        "gate": P(),
        "up": P(None, "model"),
        "down": P(None, "model"),
    },
}
BATCH_SPEC = P("data")


@dataclass(frozen=True)
class MoeSizes:
    """Sizes of the whole model; devices along "model" must divide `experts` and `sequence`.

    An expert has `2 * width` hidden units, so that two experts for each token compute what a dense layer does.
    """

    layers: int = 2
    width: int = 64
    heads: int = 4
    experts: int = 8
    sequence: int = 64


def init(key: jax.Array, sizes: MoeSizes) -> dict[str, Any]:
    """Returns whole parameters; those that write into the residual stream are smaller by the root of their number."""
    keys = jax.random.split(key, 7)
    layers, width, head = sizes.layers, sizes.width, sizes.width // sizes.heads
    residual = (2 * layers) ** -0.5

    def normal(key: jax.Array, shape: tuple[int, ...], scale: float) -> jax.Array:
        return scale * jax.random.normal(key, shape)

    return {
        "embedding": normal(keys[0], (VOCABULARY, width), width**-0.5),
        "positions": normal(keys[1], (sizes.sequence, width), width**-0.5),
        "layers": {
            "query_key_value": normal(keys[2], (layers, 3, width, sizes.heads, head), width**-0.5),
            "out": normal(keys[3], (layers, sizes.heads, head, width), residual * width**-0.5),
            "gate": normal(keys[4], (layers, width, sizes.experts), width**-0.5),
            "up": normal(keys[5], (layers, sizes.experts, width, 2 * width), width**-0.5),
            "down": normal(keys[6], (layers, sizes.experts, 2 * width, width), residual * (2 * width) ** -0.5),
        },
    }


def loss_fn(
    params: dict[str, Any],
    tokens: jax.Array,
    *,
    capacity_factors: Sequence[float] = (2.0, 1.25, 1.0),
    windows: Sequence[int] = (2, 1),
    balance_weight: float = 1e-2,
) -> jax.Array:
    """Returns one device's mean cross-entropy in nats of its block of its rows.

    The balance loss of the gates adds its gradient but not its value, so that the losses of choices can be compared.

    Args:
      params: of this device.
      tokens: whole rows, `[B, L + 1]`.
      capacity_factors: to choose from (see `expert_layer`).
      windows: to choose from beside the whole past, in blocks; windows that reach over all devices are left out.
      balance_weight: weight of the balance loss of each layer.

    Raises:
      ValueError: devices along "model" do not divide L, or the experts.
    """
    devices = lax.axis_size("model")
    if (tokens.shape[1] - 1) % devices:
        raise ValueError(
            f'`tokens` are of {tokens.shape[1] - 1} places; {devices} devices of "model" must divide them.'
        )
    length = (tokens.shape[1] - 1) // devices
    start = lax.axis_index("model") * length
    own = lax.dynamic_slice_in_dim(tokens, start, length + 1, axis=1)
    narrow = [window for window in windows if window < devices]

    def layer(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        with jax.named_scope("attention"):
            query, key, value = jnp.einsum("blm,cmhd->cblhd", jax.nn.standardize(x), w["query_key_value"])
            values = windowed_attention("window", query, key, value, "model", windows=narrow)
            x = x + jnp.einsum("blhd,hdm->blm", values, w["out"])
        with jax.named_scope("experts"):
            flat = jax.nn.standardize(x).reshape(-1, x.shape[-1])
            logits, inside = flat @ w["gate"], {"up": w["up"], "down": w["down"]}
            y = expert_layer("capacity", flat, logits, _expert, inside, "model", capacity_factors=capacity_factors)
        return x + y.reshape(x.shape), balance_loss(logits)

    x = params["embedding"][own[:, :-1]] + lax.dynamic_slice_in_dim(params["positions"], start, length)
    x, imbalances = lax.scan(layer, x, params["layers"])
    balance = balance_weight * imbalances.sum()
    return next_token_loss(jax.nn.standardize(x) @ params["embedding"].T, own) + balance - lax.stop_gradient(balance)


def _expert(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x @ w["up"]) @ w["down"]

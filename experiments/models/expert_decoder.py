"""Decoders with mixtures of experts at real sizes: Mixtral's layers, and DeepSeek-V3's with latent attention.

Tokens are sent to experts by sorting: each sequence sorts its tokens by the expert that they chose, and each expert
takes as many of a sequence as it would have if loads were equal. This moves each token as often as it is used, where
the products with one-hot arrays of `experiments.models.moe` would take as much arithmetic as the experts themselves if
there are 256 of them. Losses that balance the loads are left out, because they cost next to nothing.

Source: Jiang et al., Mixtral of Experts (arXiv:2401.04088), table 1; DeepSeek-AI, DeepSeek-V3 (arXiv:2412.19437),
sections 2.1 and 4.2, without its second predicted token.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from experiments.models.decoder import rotary
from experiments.published.decoder import CONTEXT, Remat, Sizes, normed, rematerialised

Layer = Mapping[str, jax.Array]


@dataclass(frozen=True)
class LatentAttention:
    """Widths of attention whose queries, keys and values come from narrow arrays.

    Attributes:
      query, key_value: widths of these narrow arrays.
      position: features of a head that turn with the position; those of the keys are one array for all heads.
      head: the other features of a head, and those of a value.
    """

    query: int
    key_value: int
    position: int
    head: int


@dataclass(frozen=True)
class ExpertSizes(Sizes):
    """Sizes of a decoder with experts; `hidden` is the width inside the feed-forward of layers without experts.

    Attributes:
      experts, chosen: experts of a layer, and how many of them a token goes to.
      expert_hidden: the width inside an expert.
      shared: whether each token also goes to one more expert.
      dense_layers: the first layers, which have no experts.
      latent: of attention; None for grouped queries.
    """

    experts: int = 8
    chosen: int = 2
    expert_hidden: int = 0
    shared: bool = False
    dense_layers: int = 0
    latent: LatentAttention | None = None

    @property
    def capacity(self) -> int:
        """Tokens of a sequence that an expert takes: its part of equal loads."""
        return self.sequence * self.chosen // self.experts


def abstract_params(sizes: ExpertSizes) -> dict[str, Any]:
    """Returns the parameters as `jax.ShapeDtypeStruct` in float32; those of layers have these as leading dimension."""
    width, dense = sizes.width, sizes.dense_layers
    mixture = {
        "router": (width, sizes.experts),
        "expert_up": (sizes.experts, width, 2, sizes.expert_hidden),
        "expert_down": (sizes.experts, sizes.expert_hidden, width),
    }
    if sizes.shared:
        mixture |= {"up": (width, 2, sizes.expert_hidden), "down": (sizes.expert_hidden, width)}
    feed_forward = {"up": (width, 2, sizes.hidden), "down": (sizes.hidden, width)}
    norms = {"attention_norm": (width,), "feed_forward_norm": (width,)}
    shapes: dict[str, Any] = {
        "embedding": (sizes.vocabulary, width),
        "final_norm": (width,),
        "head": (width, sizes.vocabulary),
        "layers": _stacked(sizes.layers - dense, norms | _attention_shapes(sizes) | mixture),
    }
    if dense:
        shapes["dense_layers"] = _stacked(dense, norms | _attention_shapes(sizes) | feed_forward)
    return jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), shapes, is_leaf=_is_shape)


def loss_function(
    sizes: ExpertSizes, remat: Remat, attention: Literal["cudnn", "xla"] = "cudnn"
) -> Callable[[Any, jax.Array], jax.Array]:
    """Returns `(params, tokens [B, L + 1]) -> mean cross-entropy`.

    Args:
      sizes: of the decoder.
      remat: what is computed again, of each layer.
      attention: the implementation of `jax.nn.dot_product_attention`.
    """
    attend = _grouped_attention if sizes.latent is None else _latent_attention

    def layer(x: jax.Array, weights: Layer) -> tuple[jax.Array, None]:
        w = {name: weight.astype(jnp.bfloat16) for name, weight in weights.items()}
        query, key, value = attend(normed(x, w["attention_norm"], is_gated=True), w, sizes)
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation=attention)
        mixed = checkpoint_name(mixed, CONTEXT)
        x = x + jnp.einsum("blhd,hdm->blm", mixed[..., : w["out"].shape[1]], w["out"])
        y = normed(x, w["feed_forward_norm"], is_gated=True)
        x = x + _gated(y, w["up"], w["down"]) if "up" in w else x
        return x + _mixture(y, w, sizes) if "router" in w else x, None

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        x = params["embedding"].astype(jnp.bfloat16)[tokens[:, :-1]]
        for name in ("dense_layers", "layers"):
            if name in params:
                x, _ = lax.scan(rematerialised(layer, remat), x, params[name])
        x = normed(x, params["final_norm"].astype(jnp.bfloat16), is_gated=True)
        logits = (x @ params["head"].astype(jnp.bfloat16)).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return loss


def places(chosen: jax.Array, num_experts: int, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Sorts the tokens of a sequence by the experts `[L, k]` that they chose.

    Returns:
      For each place of an expert the token that has it, `[E, C]`, and for each token its places among all experts',
      `[L, k]`: e * C + c. A place that no token has, and a token for which there is no place, have one past the end.
    """
    length, num_chosen = chosen.shape
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat)  # stable, so that earlier tokens come first
    starts = jnp.sum(flat[:, None] < jnp.arange(num_experts), axis=0)
    ends = jnp.append(starts[1:], flat.size)
    sources = starts[:, None] + jnp.arange(capacity)
    tokens = jnp.where(sources < ends[:, None], order[jnp.minimum(sources, flat.size - 1)] // num_chosen, length)
    rank = jnp.argsort(order) - starts[flat]
    return tokens, jnp.where(rank < capacity, flat * capacity + rank, num_experts * capacity).reshape(chosen.shape)


def _mixture(x: jax.Array, w: Layer, sizes: ExpertSizes) -> jax.Array:
    """Returns the results of the chosen experts for each token, weighted by their scores, `[B, L, M] -> [B, L, M]`."""
    scores = jax.nn.sigmoid((x @ w["router"]).astype(jnp.float32))
    gates, chosen = lax.top_k(scores, sizes.chosen)
    gates = (gates / jnp.sum(gates, axis=-1, keepdims=True)).astype(x.dtype)
    tokens, slots = jax.vmap(lambda c: places(c, sizes.experts, sizes.capacity))(chosen)
    taken = jax.vmap(lambda x, i: x.at[i].get(mode="fill", fill_value=0))(x, tokens)
    gate, up = jnp.moveaxis(jnp.einsum("becm,emgf->becgf", taken, w["expert_up"]), 3, 0)
    hidden = jax.checkpoint(lambda gate, up: jax.nn.silu(gate) * up)(gate, up)
    made = jnp.einsum("becf,efm->becm", hidden, w["expert_down"])
    made = made.reshape(x.shape[0], sizes.experts * sizes.capacity, x.shape[-1])
    returned = jax.vmap(lambda y, i: y.at[i].get(mode="fill", fill_value=0))(made, slots)
    return jnp.einsum("blkm,blk->blm", returned, gates)


def _gated(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    gate, up = jnp.moveaxis(jnp.einsum("blm,mgf->blgf", x, up), 2, 0)
    return jax.checkpoint(lambda gate, up: jax.nn.silu(gate) * up)(gate, up) @ down


def _grouped_attention(x: jax.Array, w: Layer, sizes: ExpertSizes) -> tuple[jax.Array, jax.Array, jax.Array]:
    query = jnp.einsum("blm,mhd->blhd", x, w["query"])
    key_value = jnp.einsum("blm,mchd->cblhd", x, w["key_value"])
    return rotary(query), rotary(key_value[0]), key_value[1]


def _latent_attention(x: jax.Array, w: Layer, sizes: ExpertSizes) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns queries and keys of `head + position` features, and values with zeros up to as many."""
    latent = sizes.latent
    assert latent is not None
    query = jnp.einsum("blq,qhd->blhd", normed(x @ w["query_down"], w["query_norm"], is_gated=True), w["query_up"])
    narrow, turned = jnp.split(x @ w["key_value_down"], [latent.key_value], axis=-1)
    key_value = jnp.einsum("blr,rhd->blhd", normed(narrow, w["key_value_norm"], is_gated=True), w["key_value_up"])
    key, value = jnp.split(key_value, 2, axis=-1)
    plain, turning = jnp.split(query, [latent.head], axis=-1)
    query = jnp.concatenate([plain, rotary(turning)], axis=-1)
    turned = jnp.broadcast_to(rotary(turned[:, :, None]), (*key.shape[:3], latent.position))
    value = jnp.pad(value, ((0, 0), (0, 0), (0, 0), (0, latent.position)))
    return query, jnp.concatenate([key, turned], axis=-1), value


def _attention_shapes(sizes: ExpertSizes) -> dict[str, tuple[int, ...]]:
    width, heads, latent = sizes.width, sizes.heads, sizes.latent
    if latent is None:
        return {
            "query": (width, heads, sizes.head),
            "key_value": (width, 2, sizes.key_value_heads, sizes.head),
            "out": (heads, sizes.head, width),
        }
    return {
        "query_down": (width, latent.query),
        "query_norm": (latent.query,),
        "query_up": (latent.query, heads, latent.head + latent.position),
        "key_value_down": (width, latent.key_value + latent.position),
        "key_value_norm": (latent.key_value,),
        "key_value_up": (latent.key_value, heads, 2 * latent.head),
        "out": (heads, latent.head, width),
    }


def _stacked(layers: int, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {name: (layers, *shape) for name, shape in shapes.items()}


def _is_shape(x: Any) -> bool:
    return isinstance(x, tuple)

"""A decoder's training step as published runs have it: scanned layers, float32 state, bfloat16 arithmetic, adamw.

Nothing is executed: arguments are `jax.ShapeDtypeStruct`. Sharding constraints pin how activations are split, so that a
plan with the layout's shardings of arguments is the published one: the batch over its axes, and for tensor parallelism
heads and hidden units over "tensor". Weights are gathered and gradients reduced where the plan has it cheapest.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.models.decoder import rotary
from experiments.models.moe import top2_gating
from experiments.published.scores import attend_by_scores

Remat = Literal["none", "full", "products", "products and attention", "projections", "queries, keys and values"]
"""What the backward pass computes again: nothing, whole layers, all but products with weights, and all but attention's
results as well; then all but the products with attention's four weights, and all but those with three of them."""
Layer = Mapping[str, jax.Array]

CONTEXT, _QUERY_KEY_VALUE, _OUT = "context", "query, key or value", "out"


@dataclass(frozen=True)
class Sizes:
    """Sizes of a decoder.

    Attributes:
      layers, width, heads, key_value_heads, vocabulary, sequence: as usual.
      hidden: the width inside the feed-forward.
      gated: whether the feed-forward has a gate (SwiGLU) and positions are rotary, as in Llama; else gelu and learned
        positions, as in GPT.
      tied: whether the head is the embedding.
      experts: of a mixture in each layer, two of which each token goes to; 0 for none.
      capacity_factor: rows of an expert in a sequence, over those that it has if tokens are spread evenly.
    """

    layers: int
    width: int
    heads: int
    key_value_heads: int
    hidden: int
    vocabulary: int
    sequence: int
    gated: bool = False
    tied: bool = False
    experts: int = 0
    capacity_factor: float = 1.0

    @property
    def head(self) -> int:
        """Width of a head."""
        return self.width // self.heads


@dataclass(frozen=True)
class Split:
    """Which mesh axes split activations and weights.

    Attributes:
      batch: axes that split the batch.
      tensor: the axis that splits heads, hidden units and the vocabulary; None for none.
      state: axes that split each array of the state besides (FSDP, ZeRO); none for data parallelism.
      gathers_once: whether all weights are gathered at the beginning of the step, and gradients reduced at its end
        (ZeRO of stage 1).
      is_sequence_split: whether `tensor` splits the sequence between the parts of a layer.
    """

    batch: tuple[str, ...]
    tensor: str | None = None
    state: tuple[str, ...] = ()
    gathers_once: bool = False
    is_sequence_split: bool = False


def shapes_of(sizes: Sizes) -> dict[str, Any]:
    """Returns the shapes of the parameters; those of layers have the layers as their leading dimension."""
    layers, width, head = sizes.layers, sizes.width, sizes.head
    layer = {
        "attention_norm": (layers, width),
        "query": (layers, width, sizes.heads, head),
        "key_value": (layers, width, 2, sizes.key_value_heads, head),
        "out": (layers, sizes.heads, head, width),
        "feed_forward_norm": (layers, width),
        "up": (layers, width, 2, sizes.hidden) if sizes.gated else (layers, width, sizes.hidden),
        "down": (layers, sizes.hidden, width),
    }
    if sizes.experts:
        layer["router"] = (layers, width, sizes.experts)
        layer["up"] = (layers, sizes.experts, width, 2, sizes.hidden)
        layer["down"] = (layers, sizes.experts, sizes.hidden, width)
    shapes = {"embedding": (sizes.vocabulary, width), "layers": layer, "final_norm": (width,)}
    if not sizes.gated:
        shapes["positions"] = (sizes.sequence, width)
    if not sizes.tied:
        shapes["head"] = (width, sizes.vocabulary)
    return shapes


def specs_of(sizes: Sizes, split: Split, num_devices: Mapping[str, int]) -> dict[str, Any]:
    """Returns the `PartitionSpec` of each parameter: by Megatron's rules over `split.tensor`, then over `split.state`.

    Of each array the largest dimension that is free and that the axes divide is split over the axes of the state.
    """
    tensor = {"query": 2, "key_value": 3, "out": 1, "up": -1, "down": 1, "embedding": 0, "head": 1}
    num_parts = 1
    for axis in split.state:
        num_parts *= num_devices[axis]

    def spec(path: Any, shape: tuple[int, ...]) -> P:
        name = path[-1].key
        axes: list[Any] = [None] * len(shape)
        if split.tensor is not None and name in tensor:
            axes[tensor[name]] = split.tensor
        first = 1 if len(path) > 1 else 0  # layers are not split
        free = [d for d in range(first, len(shape)) if axes[d] is None and shape[d] % num_parts == 0]
        if split.state and free:
            axes[max(free, key=lambda d: shape[d])] = split.state
        return P(*axes)

    return jax.tree_util.tree_map_with_path(spec, shapes_of(sizes), is_leaf=lambda x: isinstance(x, tuple))


def loss_function(
    sizes: Sizes,
    split: Split | None,
    mesh: Mesh | AbstractMesh,
    remat: Remat,
    attention: str,
    is_unrolled: bool = False,
) -> Callable[[Any, jax.Array], jax.Array]:
    """Returns `(params, tokens [B, L + 1]) -> mean cross-entropy`.

    Args:
      sizes: of the decoder.
      split: how activations are split; None leaves it open.
      mesh: has its axes.
      remat: what is computed again.
      attention: "cudnn" for a fused kernel, "scores" for bfloat16 scores in memory and a fused softmax.
      is_unrolled: whether the scan over layers is written out when it is compiled.
    """
    tensor = None if split is None else split.tensor
    sequence = tensor if split is not None and split.is_sequence_split else None

    def kept(x: jax.Array, *axes: Any) -> jax.Array:
        if split is None:
            return x
        return lax.with_sharding_constraint(x, NamedSharding(mesh, P(split.batch, *axes)))

    def attend(x: jax.Array, w: Layer) -> jax.Array:
        query = jnp.einsum("blm,mhd->blhd", x, w["query"])
        key_value = jnp.einsum("blm,mchd->cblhd", x, w["key_value"])
        key, value = key_value[0], key_value[1]
        if sizes.gated:
            query, key = rotary(query), rotary(key)
        query = checkpoint_name(kept(query, None, tensor, None), _QUERY_KEY_VALUE)
        key, value = checkpoint_name(key, _QUERY_KEY_VALUE), checkpoint_name(value, _QUERY_KEY_VALUE)
        if attention == "cudnn":
            mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")
        else:
            mixed = attend_by_scores(query, key, value)
        mixed = checkpoint_name(kept(mixed, None, tensor, None), CONTEXT)
        return checkpoint_name(jnp.einsum("blhd,hdm->blm", mixed, w["out"]), _OUT)

    def feed_forward(x: jax.Array, w: Layer) -> jax.Array:
        if sizes.gated:
            gate, up = jnp.moveaxis(jnp.einsum("blm,mcf->blcf", x, w["up"]), 2, 0)
            hidden = jax.checkpoint(lambda gate, up: jax.nn.silu(gate) * up)(gate, up)
        else:
            hidden = jax.checkpoint(jax.nn.gelu)(x @ w["up"])
        return kept(hidden, None, tensor) @ w["down"]

    def mixture(x: jax.Array, w: Layer) -> jax.Array:
        capacity = int(2 * sizes.capacity_factor * sizes.sequence / sizes.experts)
        combine, _ = top2_gating(jax.nn.softmax((x @ w["router"]).astype(jnp.float32)), capacity)
        combine = combine.astype(x.dtype)
        dispatched = jnp.einsum("blec,blm->becm", (combine > 0).astype(x.dtype), x)
        gate, up = jnp.moveaxis(jnp.einsum("becm,emgf->becgf", kept(dispatched), w["up"]), 3, 0)
        hidden = jax.checkpoint(lambda gate, up: jax.nn.silu(gate) * up)(gate, up)
        return jnp.einsum("blec,becm->blm", combine, jnp.einsum("becf,efm->becm", kept(hidden), w["down"]))

    def layer(x: jax.Array, weights: Layer) -> tuple[jax.Array, None]:
        w = {name: weight.astype(jnp.bfloat16) for name, weight in weights.items()}
        x = kept(x + attend(normed(x, w["attention_norm"], is_gated=sizes.gated), w), sequence, None)
        widen = mixture if sizes.experts else feed_forward
        return kept(x + widen(normed(x, w["feed_forward_norm"], is_gated=sizes.gated), w), sequence, None), None

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        x = params["embedding"].astype(jnp.bfloat16)[tokens[:, :-1]]
        if not sizes.gated:
            x = x + params["positions"].astype(jnp.bfloat16)
        unroll = sizes.layers if is_unrolled else 1
        x, _ = lax.scan(rematerialised(layer, remat), kept(x, sequence, None), params["layers"], unroll=unroll)
        x = normed(x, params["final_norm"].astype(jnp.bfloat16), is_gated=sizes.gated)
        head = params["embedding"].T if sizes.tied else params["head"]
        logits = kept(x @ head.astype(jnp.bfloat16), None, tensor).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return loss


def training_step(
    loss: Callable[[Any, jax.Array], jax.Array],
    accumulation: int,
    pinned: NamedSharding | None,
    gathered: Any = None,
) -> Callable[[Any, jax.Array], Any]:
    """Returns `((params, optimiser's state), tokens) -> ((params, optimiser's state), loss)` with adamw.

    Args:
      loss: of parameters and tokens.
      accumulation: parts of the batch, whose gradients are added up in float32 one after the other.
      pinned: how the tokens of a part are split; None leaves it open.
      gathered: the shardings of the weights that all parts use; None leaves it open when they are gathered.
    """
    optimizer = optax.adamw(1e-4)

    def of_part(params: Any, tokens: jax.Array) -> Any:
        if pinned is not None:
            tokens = lax.with_sharding_constraint(tokens, pinned)
        return jax.value_and_grad(loss)(params, tokens)

    def of_batch(params: Any, tokens: jax.Array) -> Any:
        if gathered is not None:
            params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
            params = lax.with_sharding_constraint(params, gathered)
        if accumulation == 1:
            return of_part(params, tokens)
        # Consecutive rows are in different parts, so that each device has rows of all parts and none is moved.
        parts = jnp.moveaxis(tokens.reshape(-1, accumulation, tokens.shape[1]), 1, 0)

        def add(sums: Any, part: jax.Array) -> tuple[Any, None]:
            return jax.tree.map(lambda x, y: x + y.astype(x.dtype), sums, of_part(params, part)), None

        zeros = (jnp.zeros(()), jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params))
        return jax.tree.map(lambda x: x / accumulation, lax.scan(add, zeros, parts)[0])

    def step(state: Any, tokens: jax.Array) -> Any:
        params, optimizer_state = state
        value, gradients = of_batch(params, tokens)
        updates, optimizer_state = optimizer.update(gradients, optimizer_state, params)
        return (optax.apply_updates(params, updates), optimizer_state), value

    return step


def abstract_state(sizes: Sizes) -> Any:
    """Returns parameters and adamw's state as `jax.ShapeDtypeStruct`, all in float32."""
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    params = jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), shapes_of(sizes), is_leaf=is_shape)
    return params, jax.eval_shape(optax.adamw(1e-4).init, params)


def normed(x: jax.Array, scale: jax.Array, *, is_gated: bool) -> jax.Array:
    """Normalises features: by their root mean square where the decoder is gated, else by mean and variance.

    What is kept for the backward pass is the operand alone, as with the fused kernels of the runs' frameworks.
    """
    return jax.checkpoint(lambda x, scale: _normalised(x, is_gated) * scale)(x, scale)


def _normalised(x: jax.Array, gated: bool) -> jax.Array:
    wide = x.astype(jnp.float32)
    if not gated:
        wide = wide - wide.mean(axis=-1, keepdims=True)
    wide = wide * lax.rsqrt(jnp.square(wide).mean(axis=-1, keepdims=True) + 1e-6)
    return wide.astype(x.dtype)


def rematerialised(layer: Any, remat: Remat) -> Any:
    """Returns a layer whose backward pass computes again what `remat` says."""
    policies = jax.checkpoint_policies
    match remat:
        case "none":
            return layer
        case "full":
            return jax.checkpoint(layer, prevent_cse=False)
        case "products":
            return jax.checkpoint(layer, prevent_cse=False, policy=policies.dots_with_no_batch_dims_saveable)
        case "products and attention":
            policy = policies.save_from_both_policies(
                policies.dots_with_no_batch_dims_saveable, policies.save_only_these_names(CONTEXT)
            )
            return jax.checkpoint(layer, prevent_cse=False, policy=policy)
        case "projections":
            policy = policies.save_only_these_names(_QUERY_KEY_VALUE, _OUT)
            return jax.checkpoint(layer, prevent_cse=False, policy=policy)
        case "queries, keys and values":
            policy = policies.save_only_these_names(_QUERY_KEY_VALUE)
            return jax.checkpoint(layer, prevent_cse=False, policy=policy)

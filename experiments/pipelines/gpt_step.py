"""A training step of a GPT in plain JAX: a scan over stacked weights, whose layers may run again in backward."""

import argparse
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax


class GptSize(NamedTuple):
    """The size of a GPT.

    Attributes:
      layers, width, heads: of the transformer.
      words: of the vocabulary.
      length: words of an example.
    """

    layers: int
    width: int
    heads: int
    words: int = 51200
    length: int = 1024


SIZES = {
    "1.3B": GptSize(24, 2048, 32),
    "2.6B": GptSize(32, 2560, 32),
    "6.7B": GptSize(32, 4096, 32),
    "13B": GptSize(40, 5120, 40),
}
"""As in Alpa, Zheng et al. (2022), table 4."""
OPTIMIZER = optax.adamw(1e-4)


def train_step(
    state: Any, batch: Any, *, heads: int, dtype: Any = jnp.float16, remat: bool = True
) -> tuple[Any, jax.Array]:
    """Returns the state after a step of AdamW, and the loss.

    Args:
      state: weights in float32 and the optimiser's state.
      batch: words and labels, `[B, T]` each.
      heads: of the attention.
      dtype: in which products are computed.
      remat: whether each layer is computed again in the backward pass.
    """
    weights, opt_state = state
    words, labels = batch
    mask = jnp.tril(jnp.ones((words.shape[1],) * 2, bool))

    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        w = jax.tree.map(lambda a: a.astype(dtype), w)
        q, k, v = jnp.split(_norm(x, w["norm1"]) @ w["qkv"], 3, -1)
        q, k, v = (a.reshape(*a.shape[:2], heads, -1) for a in (q, k, v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
        shares = jax.nn.softmax(jnp.where(mask, scores, -1e4).astype(jnp.float32)).astype(dtype)
        x = x + jnp.einsum("bhqk,bkhd->bqhd", shares, v).reshape(x.shape) @ w["out"]
        return x + jax.nn.gelu(_norm(x, w["norm2"]) @ w["up"]) @ w["down"], None

    def loss_fn(weights: Any) -> jax.Array:
        table = weights["embedding"].astype(dtype)
        x, _ = lax.scan(jax.checkpoint(layer) if remat else layer, table[words], weights["layers"])
        logits = (_norm(x, weights["norm"].astype(dtype)) @ table.T).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, gradients = jax.value_and_grad(loss_fn)(weights)
    updates, opt_state = OPTIMIZER.update(gradients, opt_state, weights)
    return (optax.apply_updates(weights, updates), opt_state), loss


def step_of(size: GptSize, **options: Any) -> Callable[..., tuple[Any, jax.Array]]:
    """Returns `train_step` for a size, with its name, so that `search` takes it as a function of state and batch."""
    step = functools.partial(train_step, heads=size.heads, **options)
    return functools.update_wrapper(step, train_step)


def add_size_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `size_from` reads."""
    parser.add_argument("--size", choices=list(SIZES), help="of the GPT, as in Alpa's table 4")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--length", type=int, default=1024)


def size_from(options: argparse.Namespace) -> GptSize:
    """Returns the size that a command's options ask for."""
    size = SIZES[options.size] if options.size else GptSize(options.layers, options.width, options.width // 64)
    return size._replace(length=options.length)


def shapes(size: GptSize, batch_size: int) -> tuple[Any, Any]:
    """Returns the types of the arguments of `train_step`."""

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    n, d = size.layers, size.width
    layers = {"qkv": array(n, d, 3 * d), "out": array(n, d, d), "up": array(n, d, 4 * d), "down": array(n, 4 * d, d)}
    layers |= {"norm1": array(n, d), "norm2": array(n, d)}
    weights = {"embedding": array(size.words, d), "norm": array(d), "layers": layers}
    words = jax.ShapeDtypeStruct((batch_size, size.length), jnp.int32)
    return (weights, jax.eval_shape(OPTIMIZER.init, weights)), (words, words)


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    x32 = x.astype(jnp.float32)
    return (x32 * lax.rsqrt((x32**2).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype) * scale

"""Four functions whose equal layers, or points in time, run in one scan, without rematerialisation.

Of what the backward pass reads, a scan makes arrays with a leading dimension over its trips: how they are written, and
what that takes, is what these models are for. Each has the mean of squares of its last array as loss, and plain SGD.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from experiments.models.model import Model, State, gradient_step

Shape = tuple[int, ...]


def mixer(*, layers: int = 6, width: int = 1024, patches: int = 196, batch: int = 256) -> Model:
    """Makes an MLP-Mixer in float32. Source: Tolstikhin et al. (2021), without its patch embedding and its head."""
    shapes = {
        "across_up": (layers, patches, 2 * patches),
        "across_down": (layers, 2 * patches, patches),
        "up": (layers, width, 4 * width),
        "down": (layers, 4 * width, width),
    }

    def layer(x: jax.Array, w: Mapping[str, jax.Array]) -> tuple[jax.Array, None]:
        hidden = jax.nn.gelu(jnp.einsum("bpm,ph->bmh", jax.nn.standardize(x), w["across_up"]))
        x = x + jnp.einsum("bmh,hp->bpm", hidden, w["across_down"])
        return x + jax.nn.gelu(jax.nn.standardize(x) @ w["up"]) @ w["down"], None

    return _model("mixer", shapes, (batch, patches, width), lambda w, x: lax.scan(layer, x, w)[0])


def llama(*, layers: int = 4, width: int = 2048, hidden: int = 5632, batch: int = 16, length: int = 2048) -> Model:
    """Makes Llama's layers in bfloat16: grouped queries, SwiGLU, RMS norm, heads of 128; no rotary positions."""
    heads, groups = width // 128, max(width // 512, 1)
    shapes = {
        "queries": (layers, width, width),
        "keys": (layers, width, groups * 128),
        "values": (layers, width, groups * 128),
        "outputs": (layers, width, width),
        "gate": (layers, width, hidden),
        "up": (layers, width, hidden),
        "down": (layers, hidden, width),
        "scales": (layers, 2, width),
    }

    def normed(x: jax.Array, scale: jax.Array) -> jax.Array:
        square = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
        return x * lax.rsqrt(square + 1e-6).astype(x.dtype) * scale

    def layer(x: jax.Array, w: Mapping[str, jax.Array]) -> tuple[jax.Array, None]:
        h = normed(x, w["scales"][0])
        queries = (h @ w["queries"]).reshape(batch, length, heads, 128)
        keys, values = ((h @ w[name]).reshape(batch, length, groups, 128) for name in ("keys", "values"))
        seen = jax.nn.dot_product_attention(queries, keys, values, is_causal=True)
        x = x + seen.reshape(x.shape) @ w["outputs"]
        h = normed(x, w["scales"][1])
        return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"], None

    return _model("llama", shapes, (batch, length, width), lambda w, x: lax.scan(layer, x, w)[0], jnp.bfloat16)


def recurrent(*, times: int = 32, width: int = 1024, batch: int = 4096) -> Model:
    """Makes a gated recurrent unit in float32. Source: Cho et al. (2014)."""
    shapes = {"inputs": (width, 3 * width), **dict.fromkeys(("update", "reset", "new"), (width, width))}

    def run(w: Mapping[str, jax.Array], x: jax.Array) -> jax.Array:
        def unit(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            update, reset, new = jnp.split(x @ w["inputs"], 3, axis=-1)
            update, reset = jax.nn.sigmoid(update + h @ w["update"]), jax.nn.sigmoid(reset + h @ w["reset"])
            h = (1 - update) * h + update * jnp.tanh(new + (reset * h) @ w["new"])
            return h, h

        return lax.scan(unit, jnp.zeros((batch, width)), x)[1]

    return _model("recurrent", shapes, (times, batch, width), run)


def convolutions(*, layers: int = 6, channels: int = 128, image: int = 32, batch: int = 512) -> Model:
    """Makes residual layers of two 3x3 convolutions in float32. Source: He et al. (2016), without batch norm."""
    kernel = (layers, 3, 3, channels, channels)
    shapes = {"first": kernel, "second": kernel, "scales": (layers, channels)}

    def convolved(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def layer(x: jax.Array, w: Mapping[str, jax.Array]) -> tuple[jax.Array, None]:
        hidden = convolved(jax.nn.relu(x * w["scales"]), w["first"])
        return x + convolved(jax.nn.relu(hidden), w["second"]), None

    return _model("convolutions", shapes, (batch, image, image, channels), lambda w, x: lax.scan(layer, x, w)[0])


def _model(
    name: str,
    shapes: Mapping[str, Shape],
    batch_shape: Shape,
    run: Callable[[Mapping[str, jax.Array], jax.Array], jax.Array],
    dtype: Any = jnp.float32,
) -> Model:
    optimizer = optax.sgd(0.1)

    def init(key: jax.Array) -> State:
        keys = jax.random.split(key, len(shapes))
        pairs = zip(keys, shapes.items(), strict=True)
        params = {n: (0.02 * jax.random.normal(key, shape)).astype(dtype) for key, (n, shape) in pairs}
        return State(params, optimizer.init(params))

    def loss(params: Any, statistics: Any, batch: jax.Array) -> tuple[jax.Array, Any]:
        return jnp.mean(jnp.square(run(params, batch).astype(jnp.float32))), statistics

    return Model(
        name,
        gradient_step(loss, optimizer),
        init,
        lambda key: jax.random.normal(key, batch_shape).astype(dtype),
    )

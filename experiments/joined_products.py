"""What it is worth to join products that read the same operand: q, k and v of attention, gate and up of a feed-forward.

    python -m experiments.joined_products [--models "llama 8b"] [--parts 1 8] [--tokens 8192]

A decoder's layer without its attention, forward and backward, as one device of a tensor-parallel group has it, is
compiled for an H100 that need not be there (the extra `gpu-compile`): with its products apart, with weights that are
stored joined, and with weights that are joined in the step, as a rewriting of a user's function would have to. The
kernels are priced in two ways: as the timeline of the compiled program is, products at one rate, and by the law that
was fitted to measured products of H100s, for which narrow products are slower. Attention would add the same to all
three, so that what joining gains of a whole layer is less than what is printed.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

import diffshard
from cost.calibration import measured_preset
from cost.measured_rates import ProductRate
from diffshard.checks.kernel_work import achievable_rates
from diffshard.checks.timeline import Timeline, simulate
from experiments.tables import print_table
from experiments.targets import h100_mesh


class Widths(NamedTuple):
    """Widths of a decoder: of the model, of all queries, of all keys (and values), and inside the feed-forward."""

    model: int
    queries: int
    keys: int
    hidden: int

    def part(self, parts: int) -> "Widths":
        """Returns the widths on one of some tensor-parallel devices."""
        return Widths(self.model, self.queries // parts, self.keys // parts, self.hidden // parts)


# Source: the configurations that Meta published with the models.
MODELS = {"llama 8b": Widths(4096, 4096, 1024, 14336), "llama 70b": Widths(8192, 8192, 1024, 28672)}
Weights = dict[str, jax.Array]
_GROUPS = {"qkv": ("query", "key", "value"), "gate_up": ("gate", "up")}


def weight_shapes(widths: Widths) -> dict[str, tuple[int, int]]:
    """Returns the shapes of a layer's weights, each apart."""
    model, queries, keys, hidden = widths
    inner = {"query": queries, "key": keys, "value": keys, "gate": hidden, "up": hidden}
    return {name: (model, width) for name, width in inner.items()} | {"out": (queries, model), "down": (hidden, model)}


def apart(weights: Weights, group: str, x: jax.Array) -> list[jax.Array]:
    """Returns the products of a group, one by one."""
    return [x @ weights[name] for name in _GROUPS[group]]


def stored_joined(weights: Weights, group: str, x: jax.Array) -> list[jax.Array]:
    """Returns the parts of one product with a weight that is stored joined."""
    joined, queries = x @ weights[group], weights["out"].shape[0]
    ends = [queries, (joined.shape[1] + queries) // 2] if group == "qkv" else [joined.shape[1] // 2]
    return jnp.split(joined, ends, axis=-1)


def joined_in_step(weights: Weights, group: str, x: jax.Array) -> list[jax.Array]:
    """Returns the parts of one product with weights that are joined before it."""
    parts = [weights[name] for name in _GROUPS[group]]
    ends = [sum(part.shape[1] for part in parts[: i + 1]) for i in range(len(parts) - 1)]
    return jnp.split(x @ jnp.concatenate(parts, axis=1), ends, axis=-1)


Way = Callable[[Weights, str, jax.Array], list[jax.Array]]
WAYS: dict[str, Way] = {"apart": apart, "stored joined": stored_joined, "joined in the step": joined_in_step}


def layer(weights: Weights, x: jax.Array, way: Way) -> jax.Array:
    """Computes a decoder's layer whose attention is left out: each query meets the key and value of its own place."""
    query, key, value = way(weights, "qkv", normal(x))
    repeats = query.shape[1] // key.shape[1]
    x += (query * jnp.tile(jnp.tanh(key) * value, (1, repeats))) @ weights["out"]
    gate, up = way(weights, "gate_up", normal(x))
    return x + (jax.nn.silu(gate) * up) @ weights["down"]


def normal(x: jax.Array) -> jax.Array:
    """Divides each row by the root of its mean square."""
    return x * jax.lax.rsqrt(jnp.mean(x.astype(jnp.float32) ** 2, axis=-1, keepdims=True) + 1e-6).astype(x.dtype)


def gradients(weights: Weights, x: jax.Array, way: Way) -> tuple[Weights, jax.Array]:
    """Returns the gradients of a layer's weights and operand, for which the forward pass runs as well."""

    def loss(weights: Weights, x: jax.Array) -> jax.Array:
        return jnp.sum(layer(weights, x, way).astype(jnp.float32) ** 2)

    return jax.grad(loss, argnums=(0, 1))(weights, x)


def arguments(widths: Widths, way: str, tokens: int) -> tuple[dict[str, jax.ShapeDtypeStruct], jax.ShapeDtypeStruct]:
    """Returns the weights and the operand of a layer."""
    shapes = weight_shapes(widths)
    if way == "stored joined":
        for group, names in _GROUPS.items():
            sizes = [shapes.pop(name)[1] for name in names]
            shapes[group] = (widths.model, sum(sizes))
    weights = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    return weights, jax.ShapeDtypeStruct((tokens, widths.model), jnp.bfloat16)


def law_s(sizes: Sequence[tuple[int, int, int]], rate: ProductRate) -> float:
    """Returns the seconds of (rows, columns, depth) of products, each a kernel, by the law of measured ones."""
    return sum(rate.launch_s + float(rate.seconds(1, m, n, k, 2 * (m * n + m * k + n * k))) for m, n, k in sizes)


def products(widths: Widths, is_joined: bool, tokens: int) -> list[tuple[int, int, int]]:
    """Returns (rows, columns, depth) of the products of a layer's forward pass and of both in its backward pass."""
    model, queries, keys, hidden = widths
    columns = [queries + 2 * keys, 2 * hidden] if is_joined else [queries, keys, keys, hidden, hidden]
    forward = [(tokens, n, model) for n in columns] + [(tokens, model, queries), (tokens, model, hidden)]
    return [x for m, n, k in forward for x in ((m, n, k), (m, k, n), (k, n, m))]


def measure(widths: Widths, way: str, tokens: int) -> tuple[Timeline, int]:
    """Compiles a layer for one H100; returns its timeline, and how many kernels multiply."""
    mesh = h100_mesh((1,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    jitted = jax.jit(partial(gradients, way=WAYS[way]), in_shardings=sharding, out_shardings=sharding)
    text = jitted.lower(*arguments(widths, way, tokens)).compile().as_text() or ""
    return simulate(text, mesh.shape, achievable_rates(diffshard.preset("h100", {}))), product_kernels(text)


def product_kernels(hlo: str) -> int:
    """Returns how many kernels of a compiled GPU program multiply matrices."""
    entry = hlo[hlo.index("\nENTRY") :]
    return sum("gemm_fusion" in line.split(" = ")[0] or "__cublas" in line for line in entry.splitlines())


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the seconds of a layer for each model, number of devices and way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["llama 8b"])
    parser.add_argument("--parts", nargs="+", type=int, default=[1, 8], help="tensor-parallel devices")
    parser.add_argument("--tokens", type=int, default=8192, help="of a device's batch")
    options = parser.parse_args(argv)
    rate = measured_preset("h100", {}).measured.products["bfloat16"]
    rows = []
    for name in options.models:
        for parts in options.parts:
            widths = MODELS[name].part(parts)
            for way in WAYS:
                timeline, count = measure(widths, way, options.tokens)
                by_law_s = law_s(products(widths, way != "apart", options.tokens), rate)
                row = (name, str(parts), way, str(count), f"{1e3 * timeline.step_s:.3f}", f"{1e3 * by_law_s:.3f}")
                print(" | ".join(row), flush=True)
                rows.append(row)
    columns = ("model", "devices", "products", "kernels of products", "timeline ms", "products by the law ms")
    print_table(f"A layer's forward and backward pass on an H100, {options.tokens} tokens", columns, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

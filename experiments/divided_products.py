"""What it is worth to divide products by their tokens, so that one piece's collective runs beside another's product.

    python -m experiments.divided_products [--models "llama 8b"] [--devices 2 4 8] [--pieces 1 2 4] [--xla-joins]

The layer of `experiments.joined_products`, forward and backward, is written by hand for the tensor-parallel devices of
one host and compiled for H100s that need not be there (the extra `gpu-compile`). Every product with a weight is done
piece by piece, and so is the collective before or after it. The timeline plays the programs back. It prices all
products at one rate and lets collectives slow no kernel, which favours pieces; so a
column has the products alone by the law of measured ones, for which small products are slower.
"""

import argparse
import itertools
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

import diffshard
from cost.calibration import measured_preset
from diffshard.checks.kernel_work import achievable_rates
from diffshard.checks.timeline import simulate
from experiments.joined_products import MODELS, Weights, Widths, law_s, normal, product_kernels, products
from experiments.joined_products import weight_shapes as shapes_of
from experiments.schedule import AT_ONCE
from experiments.tables import print_table
from experiments.targets import h100_mesh

TOKENS = 8192
# XLA joins products that share an operand, and small collectives, which would put the pieces together again.
APART = {f"xla_gpu_{kind}_combine_threshold_bytes": 0 for kind in ("all_reduce", "all_gather", "reduce_scatter")}
APART |= {"xla_gpu_dot_merger_threshold_mb": 0, AT_ONCE: 4}


class Way(NamedTuple):
    """The collectives before products with columns of a weight and after those with rows, and how tokens lie."""

    gather: Callable[..., jax.Array]
    reduce: Callable[..., jax.Array]
    tokens: PartitionSpec


_GATHER, _SCATTER = partial(jax.lax.all_gather, tiled=True), partial(jax.lax.psum_scatter, tiled=True)
WAYS = {
    "all-reduce": Way(partial(jax.lax.pcast, to="varying"), jax.lax.psum, PartitionSpec()),
    "reduce-scatter": Way(_GATHER, _SCATTER, PartitionSpec("data")),
}


def layer(weights: Weights, x: jax.Array, way: Way) -> jax.Array:
    """Computes `experiments.joined_products.layer` for a piece of tokens with one device's part of the weights."""
    gathered = way.gather(normal(x), "data")
    query, key, value = (gathered @ weights[name] for name in ("query", "key", "value"))
    repeats = query.shape[1] // key.shape[1]
    x += way.reduce((query * jnp.tile(jnp.tanh(key) * value, (1, repeats))) @ weights["out"], "data")
    gathered = way.gather(normal(x), "data")
    hidden = jax.nn.silu(gathered @ weights["gate"]) * (gathered @ weights["up"])
    return x + way.reduce(hidden @ weights["down"], "data")


def gradients(mesh: Mesh, way: Way) -> jax.stages.Wrapped:
    """Returns a jitted function to the gradients of a layer's weights and of its pieces, `[tokens, model]` each."""

    def loss(weights: Weights, pieces: list[jax.Array]) -> jax.Array:
        losses = [jnp.sum(layer(weights, x, way).astype(jnp.float32) ** 2) for x in pieces]
        return sum(losses[1:], losses[0])

    rows, columns = PartitionSpec("data"), PartitionSpec(None, "data")
    weights = {name: rows if name in ("out", "down") else columns for name in shapes_of(Widths(1, 1, 1, 1))}
    gradient, specs = jax.grad(loss, (0, 1)), (weights, way.tokens)
    return jax.jit(jax.shard_map(gradient, mesh=mesh, in_specs=specs, out_specs=specs))


def cells(widths: Widths, mesh: Mesh, way: Way, tokens: Sequence[int], options: dict[str, Any]) -> list[float]:
    """Returns kernels of products, collectives, asynchronous ones, and ms of the step, of waits and by the law."""
    weights = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes_of(widths).items()}
    pieces = [jax.ShapeDtypeStruct((count, widths.model), jnp.bfloat16) for count in tokens]
    compiled = gradients(mesh, way).lower(weights, pieces).compile(compiler_options=options)
    hlo = compiled.as_text() or ""
    timeline = simulate(hlo, mesh.shape, achievable_rates(diffshard.preset("h100", dict(mesh.shape))))
    collectives = re.findall(r" (?:all-reduce|all-gather|reduce-scatter)(?:-start)?\(.*", hlo)
    num_async = sum("-start(" in line and '"is_sync":true' not in line for line in collectives)
    rate = measured_preset("h100", {}).measured.products["bfloat16"]
    sizes = [size for count in tokens for size in products(widths.part(mesh.size), False, count)]
    by_law_s = law_s(sizes, rate) - len(sizes) * rate.launch_s  # launches are in the timeline
    seconds = timeline.step_s, sum(timeline.waited_s.values()), by_law_s
    return [product_kernels(hlo), len(collectives), num_async, *(1e3 * value for value in seconds)]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the milliseconds of a layer for each model, number of devices, way and number of pieces."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["llama 8b"])
    parser.add_argument("--devices", nargs="+", type=int, default=[2, 4, 8], help="tensor-parallel ones of one host")
    parser.add_argument("--pieces", nargs="+", type=int, default=[1, 2, 4], help="the first is compared with")
    parser.add_argument("--xla-joins", action="store_true", help="let XLA join products and collectives")
    options = parser.parse_args(argv)
    rows = []
    for model, devices, way in itertools.product(options.models, options.devices, WAYS):
        first = None
        for count in options.pieces:
            tokens, flags = [TOKENS // count] * count, {AT_ONCE: 4} if options.xla_joins else APART
            row = cells(MODELS[model], h100_mesh((devices,)), WAYS[way], tokens, flags)
            first = first or row
            gain_ms, law_ms = first[-3] - row[-3], row[-1] - first[-1]
            gains = [f"{gain / first[-3]:.1%}" for gain in (gain_ms, gain_ms - law_ms)]
            rows.append((model, devices, way, count, *row[:-3], *(f"{value:.2f}" for value in row[-3:]), *gains))
            print(" | ".join(map(str, rows[-1])), flush=True)
    columns = ("model", "devices", "way", "pieces", "kernels of products", "collectives", "asynchronous")
    columns += ("timeline ms", "of it waits", "law ms", "gain", "gain less what the law adds")
    print_table(f"A layer's forward and backward pass on H100s, {TOKENS:,} tokens", columns, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""A decode step with a cache of keys and values: predicted, played and compiled for H100s that need not be there.

    python -m experiments.decoding [--mesh 2x4] [--layers 16] [--width 2048] [--batch 32] [--cache 2048] [--no-compile]

A step for one token of each sequence has little arithmetic and small collectives, which run one after the other in each
layer. So it shows how latencies are priced. The layers are scanned; compiling needs the extra `gpu-compile`.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType

import diffshard
from diffshard.checks.kernel_work import achievable_rates
from diffshard.checks.timeline import simulate
from experiments.host_devices import AXIS_NAMES, parse_mesh
from experiments.tables import print_table
from experiments.targets import h100_mesh

_HEAD, _VOCABULARY = 128, 32000


def decode(params: Mapping[str, Any], cache: tuple[jax.Array, jax.Array], token: jax.Array, position: jax.Array) -> Any:
    """Returns the cache with a token's keys and values, and the next tokens `[B]`, the most likely ones.

    Args:
      params: `embedding` `[V, M]`, and `layers` with the layers as their leading dimension.
      cache: keys and values, `[layers, B, S, heads, D]` each.
      token: `[B]`.
      position: of the token.
    """

    def layer(x: jax.Array, own: tuple[Any, jax.Array, jax.Array]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        w, keys, values = own
        query, key, value = (jnp.einsum("bm,mhd->bhd", x, w[name]) for name in ("query", "key", "value"))
        keys = lax.dynamic_update_slice(keys, key[:, None], (0, position, 0, 0))
        values = lax.dynamic_update_slice(values, value[:, None], (0, position, 0, 0))
        scores = jnp.einsum("bhd,bshd->bhs", query, keys).astype(jnp.float32) * query.shape[-1] ** -0.5
        seen = jnp.where(jnp.arange(keys.shape[1]) <= position, scores, -1e9)
        mixed = jnp.einsum("bhs,bshd->bhd", jax.nn.softmax(seen).astype(x.dtype), values)
        x = x + jnp.einsum("bhd,hdm->bm", mixed, w["out"])
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"], (keys, values)

    x, cache = lax.scan(layer, params["embedding"][token], (params["layers"], *cache))
    return cache, jnp.argmax(x @ params["embedding"].T, axis=-1)


def arguments_of(layers: int, width: int, batch: int, cache: int) -> tuple[Any, ...]:
    """Returns the arguments of `decode` as `jax.ShapeDtypeStruct`, in bfloat16."""
    heads = width // _HEAD

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    own = {name: array(layers, width, heads, _HEAD) for name in ("query", "key", "value")}
    own |= {"out": array(layers, heads, _HEAD, width)}
    own |= {"up": array(layers, width, 4 * width), "down": array(layers, 4 * width, width)}
    stored = array(layers, batch, cache, heads, _HEAD)
    token, position = jax.ShapeDtypeStruct((batch,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    return {"embedding": array(_VOCABULARY, width), "layers": own}, (stored, stored), token, position


def main(arguments: Sequence[str] | None = None) -> diffshard.Plan:
    """Prints the table; returns the plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", type=parse_mesh, default=(2, 4))
    for name, default in (("layers", 16), ("width", 2048), ("batch", 32), ("cache", 2048)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--no-compile", action="store_true")
    options = parser.parse_args(arguments)
    shape, names = options.mesh, AXIS_NAMES[len(options.mesh)]
    mesh = AbstractMesh(shape, names, axis_types=(AxisType.Auto,) * len(shape))
    mesh = mesh if options.no_compile else h100_mesh(shape)
    hardware = diffshard.preset("h100", dict(mesh.shape))
    args = arguments_of(options.layers, options.width, options.batch, options.cache)
    start_s = time.process_time()
    step = diffshard.search(decode, mesh, hardware=hardware, donate_argnums=1)
    plan = step.plan(*args)
    search_s, timeline = time.process_time() - start_s, plan.timeline
    assert timeline is not None
    rows = [
        ("predicted, as a sum", f"{1e3 * plan.step_s:.2f}", f"{1e3 * (plan.step_s - plan.compute_s):.2f}"),
        (
            "predicted timeline",
            f"{1e3 * timeline.seconds:.2f}",
            f"{1e3 * (timeline.seconds - timeline.computing_s):.2f}",
        ),
    ]
    if not options.no_compile:
        compiled = simulate(step.lower(*args).compile().as_text() or "", mesh.shape, achievable_rates(hardware))
        links_s = sum(seconds for stream, seconds in compiled.busy_s.items() if stream.startswith("links"))
        rows.append(("timeline of the compiled program", f"{1e3 * compiled.step_s:.2f}", f"{1e3 * links_s:.2f}"))
    print_table("A decode step", ("", "step ms", "on links ms"), rows)
    sent = [f"{c.count:.0f} x {c.kind} {c.axis}, {1e6 * c.seconds:.1f} µs" for c in plan.collectives]
    print(f"Searched in {search_s:.1f} processor seconds. Collectives: {'; '.join(sent)}.")
    return plan


if __name__ == "__main__":
    main()

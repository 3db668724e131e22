"""What a layer of experts sends: the formula of groups beside programs that XLA compiles, in MB of one device.

    python -m experiments.expert_communication --target h100

The layer is a forward and a backward pass of one layer, with as many experts on each device of a group. "layout" is the
program of `ExpertLayout.apply`; its loops run once, because there are two groups. The other programs are one `jax.jit`
of the same layer, which Shardy and XLA partition: with constraints around the experts as users write them, or with
shardings of the arguments alone. Of unequal groups there is only the first. "predicted" has what the formula of
`cost.expert_groups` charges, by its bandwidth term, for two exchanges in a layer and pass. Nothing runs; for `h100` the
extra `gpu-compile` is needed.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import diffshard
from cost.collectives import collective_sent_bytes
from diffshard.checks.collectives import collective_record, device_groups, kind_of
from diffshard.checks.hlo import parse
from experiments.models.placed_experts import feed_forward
from experiments.tables import print_table
from experiments.targets import MESHES
from search_spaces.communication.two_layers import best_experts, buffer_positions, buffer_tokens

CAPACITY_FACTOR = 2.0
_KINDS = ("all_to_all", "collective_permute", "all_gather", "reduce_scatter", "all_reduce")
_MIN_BYTES = 1024.0
"""Collectives of less are not counted: the numbers of chosen and dropped tokens."""


def layouts(mesh: Mesh, num_experts: int) -> dict[str, diffshard.experts.ExpertLayout]:
    """Makes layouts of the devices of a mesh of two axes: its rows as groups, and groups of unequal size."""
    num_groups, num_members = np.array(mesh.devices).shape
    devices = np.array(mesh.devices).ravel()

    def spread(num_members: int) -> list[tuple[int, ...]]:
        return [tuple(map(int, own)) for own in np.array_split(np.arange(num_experts), num_members)]

    named = Mesh(np.array(mesh.devices), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)
    rows = diffshard.experts.ExpertLayout(named, "expert", (tuple(range(num_members)),), tuple(spread(num_members)))
    if num_groups != 2 or num_members < 2:
        return {f"{num_groups} groups of {num_members}": rows}
    few = num_members - 1
    groups = (tuple(range(few)), tuple(range(few, len(devices))))
    line = Mesh(devices, ("expert",), axis_types=(AxisType.Auto,))
    unequal = diffshard.experts.ExpertLayout(
        line, "expert", groups, tuple(own for group in groups for own in spread(len(group)))
    )
    return {f"{num_groups} groups of {num_members}": rows, f"groups of {few} and {num_members + 1}": unequal}


def loss_of_layer(layer: Callable[..., jax.Array], params: Any, gate: jax.Array, x: jax.Array) -> jax.Array:
    """Returns a loss of a layer's results, so that it has a backward pass."""
    return jnp.square(x + layer(params, x, x @ gate)).mean()


def jit_layer(
    mesh: Mesh, num_experts: int, constrained: bool, params: Any, x: jax.Array, logits: jax.Array
) -> jax.Array:
    """Applies the layer without `shard_map`: the tokens of each device are a row of an array, and XLA sends them."""
    tokens, logits = (array.reshape(mesh.size, -1, array.shape[-1]) for array in (x, logits))
    capacity = buffer_tokens(CAPACITY_FACTOR, tokens.shape[1], 2, num_experts)
    gates, chosen = jax.vmap(partial(best_experts, num_chosen=2))(logits)
    positions = jax.vmap(partial(buffer_positions, num_experts=num_experts))(chosen)
    rows = jnp.where(positions < capacity, chosen * capacity + positions, num_experts * capacity)

    def constrain(array: jax.Array, spec: P) -> jax.Array:
        return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, spec)) if constrained else array

    def dispatch(tokens: jax.Array, rows: jax.Array) -> jax.Array:
        buffers = jnp.zeros((num_experts * capacity, tokens.shape[-1]), tokens.dtype)
        return buffers.at[rows].add(tokens[:, None], mode="drop").reshape(num_experts, capacity, -1)

    by_token, by_expert = P(("data", "expert")), P("data", "expert")
    buffers = constrain(constrain(jax.vmap(dispatch)(tokens, rows), by_token), by_expert)
    results = jax.vmap(jax.vmap(feed_forward), in_axes=(None, 0))(params, buffers)
    results = constrain(constrain(results, by_expert), by_token)
    taken = jax.vmap(lambda r, rows: r.reshape(-1, r.shape[-1]).at[rows].get(mode="fill", fill_value=0))(results, rows)
    return jnp.einsum("dtk,dtkm->dtm", gates, taken).reshape(x.shape)


def sent_mb(compiled: Any, mesh: Mesh) -> dict[str, float]:
    """Returns by kind of collective the MB that the device which sends most by this kind sends in a program."""
    sent = {kind: np.zeros(mesh.size) for kind in _KINDS}
    for computation in parse(compiled.as_text() or "").computations.values():
        for instruction in computation.instructions:
            if kind_of(instruction) is None:
                continue
            record = collective_record(instruction, dict(mesh.shape))
            if record.num_bytes > _MIN_BYTES:
                own = float(collective_sent_bytes(record.kind, record.num_bytes, record.num_devices)) / 1e6
                groups = device_groups(instruction, mesh.size)
                is_permute = record.kind == "collective_permute"
                senders = [pair[0] for pair in groups] if is_permute else list(range(mesh.size))
                sent[record.kind][senders] += own
    return {kind: float(by_device.max()) for kind, by_device in sent.items()}


def predicted_mb(
    layout: diffshard.experts.ExpertLayout, exchange_mb: float, all_reduce_mb: float
) -> tuple[float, float]:
    """Returns the MB that the formula charges: exchanges of the slowest group, and the all-reduce between groups."""
    num_groups = layout.mesh.shape.get("data", len(layout.groups))
    passes, num_exchanges = 2, 2
    exchanges = max((len(group) - 1) / len(group) for group in layout.groups) * exchange_mb
    return passes * num_exchanges * exchanges, 2 * (num_groups - 1) / num_groups * all_reduce_mb


def compile_layer(layer: Callable[..., jax.Array], mesh: Mesh, shapes: Any, specs: Any) -> Any:
    """Compiles the forward and backward pass of a layer for a mesh."""
    arguments = jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)), shapes, specs
    )
    step = jax.value_and_grad(partial(loss_of_layer, layer), argnums=(0, 1, 2))
    shardings = jax.tree.map(partial(NamedSharding, mesh), specs)
    return jax.jit(step, out_shardings=(NamedSharding(mesh, P()), shardings)).lower(*arguments).compile()


def main(arguments: Sequence[str] | None = None) -> None:
    """Compiles all programs, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=sorted(MESHES), default="host")
    parser.add_argument("--shape", type=lambda text: tuple(map(int, text.split("x"))), default=(2, 4))
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048, help="of each device")
    parser.add_argument("--width", type=int, default=512)
    options = parser.parse_args(arguments)
    num_experts, width, hidden = options.experts, options.width, 4 * options.width
    rows = []
    for name, layout in layouts(MESHES[options.target](options.shape), num_experts).items():
        mesh = layout.mesh
        assert isinstance(mesh, Mesh)
        shapes = {"up": (num_experts, width, hidden), "down": (num_experts, hidden, width)}
        params = {key: jax.ShapeDtypeStruct(shape, jnp.float32) for key, shape in shapes.items()}
        x = jax.ShapeDtypeStruct((options.tokens * mesh.size, width), jnp.float32)
        gate = jax.ShapeDtypeStruct((width, num_experts), jnp.float32)

        def placed(params: Any, x: jax.Array, logits: jax.Array, layout=layout) -> jax.Array:
            return layout.apply(feed_forward, params, x, logits, capacity_factor=CAPACITY_FACTOR).results

        specs = ({"up": layout.spec, "down": layout.spec}, P(), layout.token_spec)
        programs: dict[str, tuple[Callable[..., jax.Array], Any]] = {
            "layout": (placed, jax.eval_shape(layout.hold, params))
        }
        if len(mesh.axis_names) == 2:
            for label, constrained in (("jit, constraints", True), ("jit, arguments", False)):
                programs[label] = partial(jit_layer, mesh, num_experts, constrained), params
        capacity = buffer_tokens(CAPACITY_FACTOR, options.tokens, 2, num_experts)
        held_mb = layout.num_slots * 2 * width * hidden * 4 / 1e6
        exchange, reduction = predicted_mb(layout, num_experts * capacity * width * 4 / 1e6, held_mb)
        rows.append(
            (name, "predicted", f"{exchange:.1f}", "", "", "", f"{reduction:.1f}", f"{exchange + reduction:.1f}", "")
        )
        for label, (layer, held) in programs.items():
            start_s = time.process_time()
            sent = sent_mb(compile_layer(layer, mesh, (held, gate, x), specs), mesh)
            seconds = time.process_time() - start_s
            total = sum(sent.values())
            rows.append((name, label, *(f"{sent[kind]:.1f}" for kind in _KINDS), f"{total:.1f}", f"{seconds:.0f}"))
    print_table(
        f"MB that a device sends in a layer of {num_experts} experts, both passes, compiled for {options.target}",
        ("groups", "program", *_KINDS, "sum", "CPU s"),
        rows,
    )


if __name__ == "__main__":
    main()

"""What it costs to compare the gradients of replicas: planned steps with and without Zeno.

    python -m experiments.suspicious_overhead [--mesh 8x1] [--shares 8 32] [--timeline] [--stages 2]

A GPT training step is planned for H100s with the plain gradient and with `diffshard.robust_gradients.zeno`, whose check
batch is a share of one replica's part. The table has the predicted seconds, and with `--timeline` those of the program
that XLA compiles for absent GPUs (the extra `gpu-compile`). With `--stages` the step is cut into equal stages instead,
and the table has what these send to each other at the beginning and the end of a step.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh

import diffshard
from diffshard.checks.collectives import hlo_collectives
from diffshard.checks.kernel_work import achievable_rates
from diffshard.checks.timeline import simulate
from diffshard.checks.verify import predicted_sent_bytes
from diffshard.pipelines.cutting import cut_step, uncut_step
from diffshard.pipelines.layer_chain import layer_chain
from diffshard.pipelines.microbatches import BatchArguments
from experiments.host_devices import AXIS_NAMES, parse_mesh
from experiments.models.gpt import GPT, Sizes, next_token_loss
from experiments.tables import print_table
from experiments.targets import h100_mesh
from search_spaces.pipelines.stage_programs import staged_step

COLUMNS = ("step", "predicted ms", "over plain", "peak GiB", "sent MB", "timeline ms", "over plain", "gathered")


def steps_of(network: GPT, num_replicas: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns the training step with the plain gradient, and the one with Zeno."""
    optimizer = optax.adamw(1e-3)

    def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
        return next_token_loss(jnp.asarray(network.apply({"params": params}, tokens[:, :-1])), tokens)

    gradients_of = diffshard.robust_gradients.zeno(loss_fn, num_replicas=num_replicas, num_dropped=1, step_size=0.1)

    def updated(state: Any, gradients: Any) -> Any:
        params, optimizer_state = state
        updates, optimizer_state = optimizer.update(gradients, optimizer_state, params)
        return optax.apply_updates(params, updates), optimizer_state

    def plain_step(state: Any, batch: jax.Array) -> Any:
        loss, gradients = jax.value_and_grad(loss_fn)(state[0], batch)
        return updated(state, gradients), loss

    def zeno_step(state: Any, batch: jax.Array, check_batch: jax.Array) -> Any:
        loss, gradients, report = gradients_of(state[0], batch, check_batch)
        return updated(state, gradients), loss, report

    return plain_step, zeno_step


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="8x1", help="data x model; replicas are as many as devices along data")
    parser.add_argument(
        "--shares",
        nargs="+",
        type=int,
        default=[8, 32],
        help="a check batch is this fraction, 1/N, of a replica's part",
    )
    parser.add_argument("--per-replica", type=int, default=32, help="sequences of a replica")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--stages", type=int, default=0, help="cut the step into stages in place of planning it")
    parser.add_argument("--timeline", action="store_true", help="compile the steps for absent H100s")
    options = parser.parse_args(argv)
    shape = parse_mesh(options.mesh)
    mesh = h100_mesh(shape) if options.timeline else AbstractMesh(shape, AXIS_NAMES[len(shape)])
    sizes = Sizes(options.layers, options.width, 8, vocabulary=1024, sequence=options.sequence)
    network = GPT(sizes)
    plain_step, zeno_step = steps_of(network, shape[0])

    def init(key: jax.Array) -> Any:
        params = network.init(key, jnp.zeros((1, options.sequence), jnp.int32))["params"]
        return params, optax.adamw(1e-3).init(params)

    def tokens(count: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((count, options.sequence + 1), jnp.int32)

    state, batch = jax.eval_shape(init, jax.random.key(0)), tokens(shape[0] * options.per_replica)
    cases: list[tuple[str, Any, tuple[Any, ...]]] = [("plain", plain_step, (state, batch))]
    checks = {share: tokens(max(options.per_replica // share, 1)) for share in options.shares}
    cases += [(f"zeno, 1/{share}", zeno_step, (state, batch, check)) for share, check in checks.items()]
    if options.stages:
        rows = [[name, *_between_stages(step, args, options.stages)] for name, step, args in cases]
        head = ["step", "replicas' gradients MB", "sent at the beginning MB", "at the end MB"]
        print_table(f"GPT of {options.layers} layers of width {options.width} in {options.stages} stages", head, rows)
        return 0
    rows, first = [], None
    for name, step, args in cases:
        numbers = _measured(step, args, mesh, options.timeline)
        first = first or numbers
        rows.append(_row(name, numbers, first))
        print(*rows[-1], sep=" | ", flush=True)
    print_table(f"GPT of {options.layers} layers of width {options.width}, {options.mesh}", COLUMNS, rows)
    return 0


def _between_stages(step: Any, args: Any, num_stages: int) -> list[str]:
    """Returns the MB of summed gradients, and of what stages read of each other at the beginning and the end."""
    uncut = uncut_step(step, 4, BatchArguments((1,), ()), args, {})
    chain = layer_chain(uncut, most_layers=48)
    cut = cut_step(uncut, chain.cuts_before([len(chain) * n // num_stages for n in range(1, num_stages)]))
    staged = staged_step(cut.parts, cut.cuts)
    homes = {**dict(zip(staged.inputs, staged.homes, strict=True)), **{k: m.stage for k, m in staged.makers.items()}}
    size = {key: math.prod(aval.shape) * aval.dtype.itemsize for key, aval in staged.avals.items() if key in homes}
    sums = sum(size[a.total] for program in staged.programs.values() for a in program.accumulations)
    sent = dict.fromkeys(("begin", "finish"), 0.0)
    for label, program in staged.programs.items():
        if label.kind in sent:
            sent[label.kind] += sum(size[key] for key in program.reads if homes[key] != label.stage)
    return [f"{number / 1e6:.2f}" for number in (sums, *sent.values())]


def _measured(step: Any, args: Any, mesh: Any, with_timeline: bool) -> tuple[float, float, float, float, float]:
    """Returns predicted seconds, peak bytes, sent bytes, and of the program its seconds and largest gathered array."""
    search = diffshard.search(step, mesh, hardware="h100", donate_argnums=0)
    plan = search.plan(*args)
    sent_bytes = predicted_sent_bytes(plan.collectives, mesh.shape)
    if not with_timeline:
        return plan.step_s, plan.peak_bytes, sent_bytes, float("nan"), float("nan")
    text = search.lower(*args).compile().as_text() or ""
    timeline = simulate(text, mesh.shape, achievable_rates(diffshard.preset("h100", dict(mesh.shape))))
    gathered = [c.num_bytes for c in hlo_collectives(text, mesh.shape) if c.kind == "all_gather"]
    return plan.step_s, plan.peak_bytes, sent_bytes, timeline.step_s, max(gathered, default=0.0)


def _row(name: str, numbers: Sequence[float], first: Sequence[float]) -> tuple[str, ...]:
    step_s, peak_bytes, sent_bytes, timeline_s, gathered_bytes = numbers
    return (
        name, f"{1e3 * step_s:.3f}", f"{step_s / first[0]:.3f}", f"{peak_bytes / 2**30:.2f}", f"{sent_bytes / 1e6:.0f}",
        f"{1e3 * timeline_s:.3f}", f"{timeline_s / first[3]:.3f}", f"{gathered_bytes / 1e6:.1f} MB",
    )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())

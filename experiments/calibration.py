"""How true the cost model is: links against profiles of V100 hosts, arithmetic and whole steps against this machine.

`python -m experiments.calibration` prints the tables; `--profiles PATH` names the V100 profiles, which are skipped
where they are missing.
"""

import argparse
import csv
import gzip
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from cost.collectives import CollectiveKind, collective_s, collective_sent_bytes
from cost.compute import equation_work, roofline_s
from cost.hardware import Hardware
from cost.presets import preset
from diffshard.calibrate import calibrate, fit_latency_and_slope, median_s
from diffshard.search import search
from experiments.models import gpt, mlp, resnet
from experiments.models.model import Model
from experiments.models.model import arguments as arguments_of

PROFILES = Path(__file__).parents[2] / "shared/data/v100_collective_profiles.csv.gz"
# A call that has nothing to send takes this long there; so do calls whose groups have less than an element each.
_EMPTY_CALL_S = 20e-6


class Ring(NamedTuple):
    """Where a group's devices are: `members` in each host, `stride` apart, on so many hosts."""

    hosts: int
    members: int
    stride: int


class LinkError(NamedTuple):
    """A fit and the preset against the measured times of one collective; errors are median and 90% of |relative|."""

    ring: Ring
    kind: CollectiveKind
    num_points: int
    latency_s: float
    bytes_per_s: float
    fit_error: tuple[float, float]
    preset_error: tuple[float, float]


def read_profiles(path: Path) -> dict[tuple[Ring, CollectiveKind], np.ndarray]:
    """Measured points by ring and collective: `[points, 2]` full bytes and seconds, extrapolated ones left out."""
    series = defaultdict(list)
    with gzip.open(path, "rt") as file:
        for row in csv.DictReader(file):
            size, stride, per_host = int(row["group_size"]), int(row["stride"]), int(row["gpus_per_host"])
            if row["op"] != "dot" and size > 1:
                members = max(1, min(size, per_host // stride))
                ring = Ring(size // members, members, stride)
                itemsize = {"f16": 2, "f32": 4}[row["dtype"]]
                key = (ring, row["op"], row["num_hosts"], row["num_groups"], row["dtype"])
                series[key].append((int(row["size"]) * itemsize, float(row["seconds"])))
    points = defaultdict(list)
    for (ring, kind, *_), measured in series.items():
        points[ring, kind] += _without_extrapolated(sorted(measured))
    return {key: np.array(value) for key, value in points.items() if len(value) > 10}


def _without_extrapolated(measured: list[tuple[int, float]]) -> list[tuple[int, float]]:
    kept = []
    for i, (size, seconds) in enumerate(measured):
        doubled = i > 0 and abs(seconds / measured[i - 1][1] - 2) < 1e-9
        if size and seconds > _EMPTY_CALL_S and not doubled:
            kept.append((size, seconds))
    return kept


def v100_links(path: Path) -> list[LinkError]:
    """Fits a link to each ring and collective of the profiles and holds the preset against the same points."""
    errors = []
    for (ring, kind), points in sorted(read_profiles(path).items()):
        num_bytes, seconds = points.T
        n = ring.hosts * ring.members
        sent = collective_sent_bytes(kind, num_bytes, n)
        latency_s, slope = fit_latency_and_slope(sent, seconds)
        link = preset("v100", {"outer": n, "inner": ring.stride}).links["outer"]
        predicted = collective_s(kind, num_bytes, n, link)
        fit_error, preset_error = _relative(latency_s + slope * sent, seconds), _relative(predicted, seconds)
        errors.append(LinkError(ring, kind, len(points), latency_s, 1 / slope, fit_error, preset_error))
    return errors


def _relative(predicted: np.ndarray, measured: np.ndarray) -> tuple[float, float]:
    error = np.abs(predicted / measured - 1)
    return float(np.median(error)), float(np.quantile(error, 0.9))


def elementwise_weights(size: int, repeats: int) -> dict[str, float]:
    """Seconds of elementwise functions relative to those of a multiply-add, on arrays that stay in cache."""
    functions: dict[str, Callable[[jax.Array], jax.Array]] = {
        "div": lambda x: 1.5 / x,
        "sqrt": jnp.sqrt,
        "exp": jnp.exp,
        "log": jnp.log,
        "tanh": jnp.tanh,
        "logistic": jax.nn.sigmoid,
        "sin": jnp.sin,
        "pow": lambda x: x**1.3,
        "erf": jax.lax.erf,
        "lgamma": jax.lax.lgamma,
    }
    x = jnp.linspace(0.5, 1.5, size, dtype=jnp.float32)
    base_s = _loop_s(lambda x: x * 0.999 + 0.001, x, repeats)
    return {name: 2 * _loop_s(f, x, repeats) / base_s for name, f in functions.items()}


def _loop_s(function: Callable[[jax.Array], jax.Array], x: jax.Array, repeats: int) -> float:
    def body(_: int, x: jax.Array) -> jax.Array:
        return jnp.clip(function(x), 0.5, 1.5)

    loop = jax.jit(lambda x: jax.lax.fori_loop(0, 200, body, x))
    return median_s(lambda: loop(x), repeats)


class StepTime(NamedTuple):
    """A whole training step on one device, seconds: measured, predicted, and predicted as if nothing were fused."""

    model: str
    measured_s: float
    predicted_s: float
    unfused_s: float


def whole_steps(models: Sequence[Model], hardware: Hardware, repeats: int) -> list[StepTime]:
    """Times steps on one device against the sum of the rooflines of their equations.

    Args:
      models: what to run.
      hardware: of one device, measured: what the predictions are for.
      repeats: the time of a step is the median of so many.
    """
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("one",))
    found = []
    for model in models:
        state, batch = arguments_of(model)
        plan = search(model.step, mesh, hardware=hardware, memory_limit_bytes=np.inf, solver="exhaustive").plan(
            state, batch
        )
        jaxpr = jax.make_jaxpr(model.step)(state, batch)
        unfused_s = sum(_unfused_s(equation, hardware) for equation in jaxpr.jaxpr.eqns)
        seconds = _step_s(model, state, batch, repeats)
        found.append(StepTime(model.name, seconds, plan.compute_s, unfused_s))
    return found


def _step_s(model: Model, state: Any, batch: Any, repeats: int) -> float:
    """Seconds of a step that reuses its state's memory, as in training; new pages would cost as much again."""
    step = jax.jit(model.step, donate_argnums=0)
    states = [jax.tree.map(jnp.copy, state)]

    def call() -> jax.Array:
        new, loss = step(states.pop(), batch)
        states.append(new)
        return loss

    return median_s(call, repeats)


def _unfused_s(equation: core.JaxprEqn, hardware: Hardware) -> float:
    bodies = [p for p in equation.params.values() if isinstance(p, core.ClosedJaxpr)]
    if bodies and "scan" not in equation.primitive.name:
        return sum(_unfused_s(inner, hardware) for body in bodies for inner in body.jaxpr.eqns)
    work = equation_work(equation)
    return float(roofline_s(work.flops, work.num_bytes, work.dtype, hardware))


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints all tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profiles", type=Path, default=PROFILES)
    parser.add_argument("--size", type=int, default=8192, help="elements of an elementwise function")
    parser.add_argument("--matrix-size", type=int, default=1024)
    parser.add_argument("--width", type=int, default=256, help="of the models whose steps are timed")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args(arguments)
    if options.profiles.exists():
        print(
            "hosts members stride  collective      points  fit: latency  bandwidth  median  90%   preset: median  90%"
        )
        for e in v100_links(options.profiles):
            print(
                f"{e.ring.hosts:5} {e.ring.members:7} {e.ring.stride:6}  {e.kind:15} {e.num_points:6}   "
                f"{e.latency_s * 1e6:8.0f} µs {e.bytes_per_s / 1e9:6.2f} GB/s {e.fit_error[0]:6.0%} "
                f"{e.fit_error[1]:5.0%}           {e.preset_error[0]:6.0%} {e.preset_error[1]:5.0%}"
            )
    else:
        print(f"{options.profiles} is missing: V100 links are not compared.")
    print("\nelementwise functions, operations relative to an addition")
    for name, weight in elementwise_weights(options.size, options.repeats).items():
        print(f"  {name:10} {weight:6.1f}")
    mesh = jax.make_mesh((len(jax.devices()),), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))
    print("\nthis machine:", calibrate(mesh, matrix_size=options.matrix_size, repeats=options.repeats))
    one = jax.sharding.Mesh(jax.devices()[:1], ("one",))
    hardware = calibrate(one, dtypes=("float32",), matrix_size=options.matrix_size, repeats=options.repeats)
    print("\nstep on one device       measured   predicted   without fusion")
    for t in whole_steps(_models(options.width), hardware, options.repeats):
        print(
            f"  {t.model:20} {t.measured_s * 1e3:8.2f} ms {t.predicted_s * 1e3:8.2f} ms {t.unfused_s * 1e3:10.2f} ms"
            f"   {t.predicted_s / t.measured_s - 1:+.0%} {t.unfused_s / t.measured_s - 1:+.0%}"
        )


def _models(width: int) -> list[Model]:
    heads = max(1, width // 64)
    return [
        mlp.make(layers=6, width=2 * width, batch=4 * width),
        mlp.make(layers=6, width=4 * width, batch=width // 8),
        gpt.make(
            layers=2,
            batch=8,
            width=width,
            heads=heads,
            key_value_heads=heads,
            sequence=width // 2,
            vocabulary=8 * width,
        ),
        resnet.make(batch=max(8, width // 8)),
    ]


if __name__ == "__main__":
    main()

"""The parts of the measurement, each in a process of its own: `python -m experiments.on_gpus.parts JOB`.

A process of its own has memory of its own, so that its peak is that of one run, and may run out of it or crash without
the others. JOB is JSON; the records are written to standard output, a line each after `MARK`.
"""

import contextlib
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

import diffshard
from cost.base import Hardware
from cost.calibration import median_s
from cost.presets import hardware_of
from diffshard.checks.hlo import memory_plan
from diffshard.plans.json_values import from_json_values
from experiments import hand_plans
from experiments.host_devices import AXIS_NAMES, host_mesh, parse_mesh
from experiments.models.model import Model, abstract_arguments
from experiments.on_gpus.records import (
    FORMAT,
    Environment,
    MeasuredHardware,
    MeasuredProduct,
    MeasuredRun,
    Record,
    as_line,
)
from experiments.timeline_models import CASES

MARK = "record: "
FOUND, FOUND_BY_PRESET = "found", "found by preset"
MODELS = ("decoder", "mixture of experts", "vision transformer", "unet")
PLANS = (FOUND, FOUND_BY_PRESET, "data parallel", "fsdp", "megatron")
# Products of a layer of 4,096 with 16,384 tokens, of one with few tokens, and of sizes that fill no whole blocks.
_PRODUCTS = ((16384, 4096, 4096), (16384, 4096, 14336), (16384, 14336, 4096), (512, 4096, 4096), (4000, 1000, 3000))
_SMALL_PRODUCTS = ((256, 64, 64),)
_TRACED_STEPS = 3


@dataclass(frozen=True)
class Settings:
    """How much is measured.

    Attributes:
      mesh: such as "2x4"; empty for up to four devices along the inner axis.
      host_devices: simulated devices of this machine's processor in place of JAX's devices; 0 for none.
      size: "full" for models as wide as real ones, "small" for tests.
      matrix_size, largest_bytes, repeats: as in `diffshard.hardware.calibrate`.
      rounds, steps: how many rounds there are, and how many steps each of them is the mean of.
      search_s: the solver's time limit.
      traces: a folder for the profiler's traces; empty for none.
    """

    mesh: str = ""
    host_devices: int = 0
    size: str = "full"
    matrix_size: int = 8192
    largest_bytes: int = 2**28
    repeats: int = 10
    rounds: int = 5
    steps: int = 10
    search_s: float = 60.0
    traces: str = ""

    def make_mesh(self) -> Mesh:
        """Makes the mesh of all devices.

        Raises:
          ValueError: there are no GPUs, or `mesh` has another number of devices than there are.
        """
        if not self.host_devices and jax.devices()[0].platform == "cpu":
            raise ValueError("There is no GPU here, but a CPU. Try `--host-devices 8 --size small` without one.")
        num_devices = self.host_devices or len(jax.devices())
        inner = next(size for size in (4, 2, 1) if num_devices % size == 0)
        shape = parse_mesh(self.mesh or f"{num_devices // inner}x{inner}")
        if self.host_devices:
            return host_mesh(shape, self.host_devices)
        if math.prod(shape) != num_devices:
            raise ValueError(f"`--mesh` {self.mesh} has {math.prod(shape)} devices, but there are {num_devices}.")
        devices = np.array(jax.devices()).reshape(shape)
        return Mesh(devices, AXIS_NAMES[len(shape)], axis_types=(AxisType.Auto,) * len(shape))


def environment(settings: Settings) -> Environment:
    """Returns the devices and versions that are measured."""
    mesh = settings.make_mesh()
    device = mesh.devices.flat[0]
    versions = {name: version(name) for name in ("jax", "jaxlib")}
    versions |= {"python": platform.python_version(), "diffshard": diffshard.__version__}
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
    axes = {str(axis): size for axis, size in mesh.shape.items()}
    return Environment(FORMAT, made, versions, device.platform, device.device_kind, mesh.size, axes, asdict(settings))


def hardware(settings: Settings) -> MeasuredHardware:
    """Measures rates and links."""
    mesh = settings.make_mesh()
    preset = None
    with contextlib.suppress(ValueError):  # devices without a preset
        preset = hardware_of(mesh)
    calibrated = diffshard.hardware.calibrate(
        mesh, matrix_size=settings.matrix_size, largest_bytes=settings.largest_bytes, repeats=settings.repeats
    )
    return MeasuredHardware(calibrated, preset)


def products(settings: Settings, known: MeasuredHardware) -> Iterator[MeasuredProduct]:
    """Measures products of some shapes on all devices at the same time."""
    mesh = settings.make_mesh()
    one = AbstractMesh((1,), ("one",), axis_types=(AxisType.Auto,))
    for rows, inner, columns in _PRODUCTS if settings.size == "full" else _SMALL_PRODUCTS:
        for dtype in ("bfloat16", "float32"):
            place = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
            make = jax.jit(lambda s, dtype=dtype: jnp.ones(s, dtype), static_argnums=0, out_shardings=place)
            x, w = make((mesh.size, rows, inner)), make((mesh.size, inner, columns))
            product = jax.jit(lambda a, b: jnp.einsum("dij,djk->dik", a, b), out_shardings=place)
            seconds = median_s(lambda product=product, x=x, w=w: product(x, w), settings.repeats)
            of_one = [jax.ShapeDtypeStruct(x.shape[1:], dtype), jax.ShapeDtypeStruct(w.shape[1:], dtype)]
            predicted = {
                name: diffshard.search(jnp.matmul, one, hardware=replace(priced, links={})).plan(*of_one).step_s
                for name, priced in _prices(known).items()
            }
            yield MeasuredProduct(rows, inner, columns, dtype, seconds, predicted)


def run(settings: Settings, known: MeasuredHardware, model_name: str, plan_name: str) -> MeasuredRun:
    """Plans, compiles and runs a model's step with one plan; one that fails says why in its record."""
    mesh = settings.make_mesh()
    case = CASES[model_name]
    batch = 2 * mesh.size if settings.size == "small" else max(case.batches["2x4"] * mesh.size // 8, mesh.size)
    record = MeasuredRun(model_name, plan_name, batch, {})
    try:
        model = case.make(batch=batch, **(case.small if settings.size == "small" else case.full))
        record, step, state = _prepared(record, settings, known, model, mesh)
        return _measured(record, settings, step, state, mesh)
    except Exception as error:  # out of memory, a compiler's fault, a plan that does not apply: the row says so
        lines = f"{type(error).__name__}: {error}".strip().splitlines()
        return replace(record, error=" ".join(lines)[:500])


def _prices(known: MeasuredHardware) -> dict[str, Hardware]:
    return {"calibrated": known.calibrated} | ({"preset": known.preset} if known.preset else {})


def _prepared(
    record: MeasuredRun, settings: Settings, known: MeasuredHardware, model: Model, mesh: Mesh
) -> tuple[MeasuredRun, Callable[[Any], tuple[Any, jax.Array]], Any]:
    """Returns the record with all predictions, the compiled step `state -> (state, loss)`, and a state."""
    args, prices = abstract_arguments(model), _prices(known)
    by_hand = None if record.plan in (FOUND, FOUND_BY_PRESET) else hand_plans.HAND_PLANS[record.plan](*args, mesh)
    start_s, searched, plan = time.perf_counter(), {}, None
    searched_for = "preset" if record.plan == FOUND_BY_PRESET else "calibrated"
    if searched_for not in prices:
        raise ValueError("these devices have no preset")
    given = None if by_hand is None else by_hand.in_shardings
    for name, priced in prices.items():
        if by_hand is None and name != searched_for:
            continue
        searched[name] = diffshard.search(
            model.step, mesh, hardware=priced, in_shardings=given, donate_argnums=0, time_limit_s=settings.search_s
        )
        try:
            plan = searched[name].plan(*args)
        except diffshard.InfeasibleError:
            if by_hand is None:
                raise
            continue  # predicted not to fit: it is run all the same, to see
        record = replace(
            record,
            predicted_s={**record.predicted_s, name: plan.step_s},
            predicted_peak_bytes=plan.peak_bytes,
        )
    if by_hand is None:
        assert plan is not None
        record = replace(
            record,
            predicted_timeline_s=plan.timeline and plan.timeline.seconds,
            lower_bound_s=plan.lower_bound_s if searched_for == "calibrated" else None,
            summary=str(plan).split("\nArguments:")[0],
        )
        shardings = plan.in_shardings
        lowered = searched[searched_for].lower(*args)
    else:
        shardings = by_hand.in_shardings
        lowered = hand_plans.lower_by_hand(model.step, *args, by_hand, donate_argnums=0)
    plan_s, start_s = time.perf_counter() - start_s, time.perf_counter()
    compiled = lowered.compile()
    memory = memory_plan(compiled)
    record = replace(
        record,
        plan_s=plan_s,
        compile_s=time.perf_counter() - start_s,
        compiled_peak_bytes=None if memory is None else memory.peak,
    )
    state_key, batch_key = jax.random.split(jax.random.key(0))
    state = jax.jit(model.init, out_shardings=shardings[0])(state_key)  # no device ever has the whole state
    batch = jax.jit(model.make_batch, out_shardings=shardings[1])(batch_key)
    if by_hand is not None:
        return record, lambda state: compiled(state, batch), state
    structure, arrays = jax.tree.structure(state), jax.tree.leaves(batch)

    def step(state: Any) -> tuple[Any, jax.Array]:
        *leaves, loss = compiled(*jax.tree.leaves(state), *arrays)
        return jax.tree.unflatten(structure, leaves), loss

    return record, step, state


def _measured(record: MeasuredRun, settings: Settings, step: Callable[..., Any], state: Any, mesh: Mesh) -> MeasuredRun:
    """Returns the record with what was measured."""
    state, loss = step(state)
    loss = float(loss)
    seconds = []
    for _ in range(settings.rounds + 1):  # the first warms up
        jax.block_until_ready(state)
        start_s = time.perf_counter()
        for _ in range(settings.steps):
            state, _ = step(state)
        jax.block_until_ready(state)
        seconds.append((time.perf_counter() - start_s) / settings.steps)
    stats = [device.memory_stats() or {} for device in mesh.devices.flat]
    peaks = [own["peak_bytes_in_use"] for own in stats if "peak_bytes_in_use" in own]
    folder = None
    if settings.traces:
        folder = str(Path(settings.traces) / f"{record.model}, {record.plan}".replace(" ", "_").replace(",", ""))
        with jax.profiler.trace(folder):
            for _ in range(_TRACED_STEPS):
                state, _ = step(state)
            jax.block_until_ready(state)
    return replace(
        record,
        measured_s=tuple(seconds[1:]),
        measured_peak_bytes=float(max(peaks)) if peaks else None,
        loss=loss,
        trace=folder,
    )


def records_of(job: dict[str, Any]) -> Iterator[Record]:
    """Measures one part.

    Args:
      job: JSON values: `part`, `settings`, and for parts that need it the `hardware` that was measured before, `model`
        and `plan`.
    """
    settings = Settings(**job["settings"])
    match job["part"]:
        case "environment":
            yield environment(settings)
        case "hardware":
            yield hardware(settings)
        case "products":
            yield from products(settings, from_json_values(MeasuredHardware, job["hardware"]))
        case "run":
            yield run(settings, from_json_values(MeasuredHardware, job["hardware"]), job["model"], job["plan"])


def median_of(run: MeasuredRun) -> float:
    """Returns the median seconds of a run's step."""
    return statistics.median(run.measured_s)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the part that the only argument describes."""
    (job,) = sys.argv[1:] if arguments is None else arguments
    for record in records_of(json.loads(job)):
        print(f"{MARK}{as_line(record)}", flush=True)


if __name__ == "__main__":
    main()

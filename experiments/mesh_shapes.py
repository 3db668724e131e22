"""The shape of the mesh that a search finds, beside the usual meshes: predicted, and by compiled programs for H100s.

    python -m experiments.mesh_shapes [--models decoder unet] [--devices 8 16 32] [--compile 2] [-o rows.jsonl]

Training steps of several kinds (`experiments.timeline_models` with one layer, an MLP and a ResNet) are planned
for H100s in hosts of 8 without a mesh, `search(step, devices=16)`. The usual meshes are one axis over all devices, 2 x
n/2, and hosts x devices of a host; each has a plan of its own. With `--compile` so many of the best shapes are compiled
for H100s that need not be there (the extra `gpu-compile`), and the timeline plays the programs back. Models with a star
were planned after everything else was settled. Rows that the output file has already are not made again.
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jax.sharding import AbstractMesh, AxisType

import diffshard
from diffshard.checks.kernel_work import achievable_rates
from diffshard.checks.targets import gpu_mesh
from diffshard.checks.timeline import simulate
from diffshard.plans.printing import format_percent
from experiments.models import mlp, resnet
from experiments.models.model import Model, abstract_arguments
from experiments.tables import print_table
from experiments.timeline_models import CASES

IN_HOST = 8
COLUMNS = (
    "model", "devices", "shapes", "cut off", "found shape", "predicted ms", "usual meshes, ms", "over usual",
    "gap", "seconds", "CPU s",
)  # fmt: skip
COMPILED_COLUMNS = ("model", "devices", "shape", "predicted ms", "timeline ms")
_LAYERS = {"full": {"layers": 1}, "small": {"layers": 1}}
_PER_DEVICE = {"mlp": 4096, "few rows": 256, "resnet": 64}


def _of_case(name: str, batch_share: float = 1.0) -> Callable[[int, str], Model]:
    case = CASES[name]

    def make(devices: int, sizes: str) -> Model:
        of_size = case.full if sizes == "full" else case.small
        few_layers = _LAYERS[sizes] if "layers" in of_size else {}
        batch = int(case.batches["2x4"] * devices * batch_share) // 8
        return case.make(batch=batch, **{**of_size, **few_layers})

    return make


def _mlp(devices: int, sizes: str) -> Model:
    is_full = sizes == "full"
    return mlp.make(layers=4, width=8192 if is_full else 64, batch=(_PER_DEVICE["mlp"] if is_full else 8) * devices)


def _mlp_of_few_rows(devices: int, sizes: str) -> Model:
    is_full = sizes == "full"
    return mlp.make(
        layers=4, width=16384 if is_full else 64, batch=(_PER_DEVICE["few rows"] if is_full else 8) * devices
    )


def _resnet(devices: int, sizes: str) -> Model:
    if sizes == "full":
        return resnet.make(width=64, stages=4, blocks=2, image=64, classes=1000, batch=_PER_DEVICE["resnet"] * devices)
    return resnet.make(stages=1, batch=4 * devices)


MODELS: dict[str, Callable[[int, str], Model]] = {
    "mlp": _mlp,
    "mlp, few rows": _mlp_of_few_rows,
    "decoder": _of_case("decoder"),
    "decoder, few sequences": _of_case("decoder", batch_share=0.25),  # one for two devices
    "encoder-decoder": _of_case("encoder-decoder"),
    "mixture of experts": _of_case("mixture of experts"),
    "resnet": _resnet,
    "unet": _of_case("unet"),
    "vision transformer *": _of_case("vision transformer"),
    "contrastive *": _of_case("contrastive"),
}


class Row(NamedTuple):
    """The plans that were found for a model on a number of devices.

    Attributes:
      model, devices: what was planned.
      shapes: each shape's axes, step time (None where it was cut off), bound and status, the best first.
      usual: predicted step time by usual mesh, as "2x8".
      step_s, gap: of the found plan.
      search_s, cpu_s: of the search, by the clock and of the processor.
      compiled: axes, predicted step and the timeline's step of shapes that were compiled.
    """

    model: str
    devices: int
    shapes: Sequence[Any]
    usual: Mapping[str, float]
    step_s: float
    gap: float
    search_s: float
    cpu_s: float
    compiled: Sequence[Any]

    @property
    def over_usual(self) -> float:
        """The found plan's predicted time over that of the best usual mesh."""
        return self.step_s / min(self.usual.values())


def usual_meshes(devices: int) -> dict[str, tuple[int, ...]]:
    """Returns the meshes that people take: n, 2 x n/2, and hosts x devices of a host."""
    meshes = [(devices,), (2, devices // 2)]
    if devices > IN_HOST:
        meshes.append((devices // IN_HOST, IN_HOST))
    return {"x".join(map(str, sizes)): sizes for sizes in meshes}


def plan_on(model: Model, axes: Mapping[str, int], time_limit_s: float | None) -> diffshard.Plan:
    """Plans a model's step for H100s on one mesh."""
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    step = diffshard.search(model.step, mesh, hardware="h100", donate_argnums=0, time_limit_s=time_limit_s)
    return step.plan(*abstract_arguments(model))


def timeline_s(model: Model, plan: diffshard.Plan) -> float:
    """Compiles a plan's program for H100s, and returns how long a step takes by its timeline."""
    mesh = gpu_mesh(plan.mesh_axes)
    step = diffshard.search(model.step, mesh, hardware=plan.hardware, donate_argnums=0, start=plan)
    compiled = step.lower(*abstract_arguments(model)).compile()
    return simulate(compiled.as_text() or "", mesh.shape, achievable_rates(plan.hardware)).step_s


def run(name: str, devices: int, sizes: str, num_compiled: int, time_limit_s: float | None) -> Row:
    """Searches the shape for a model, and plans it on the usual meshes."""
    model = MODELS[name](devices, sizes)
    start_s, cpu_s = time.perf_counter(), time.process_time()
    step = diffshard.search(
        model.step, devices=devices, hardware="h100", donate_argnums=0, time_limit_s=time_limit_s
    )  # fmt: skip
    plan = step.plan(*abstract_arguments(model))
    search_s, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_s
    known = {tuple(s.mesh_axes.values()): s.step_s for s in plan.shapes if s.step_s is not None}
    usual = {}
    for text, axis_sizes in usual_meshes(devices).items():
        axes = {f"axis{i}": size for i, size in enumerate(axis_sizes)}
        usual[text] = known.get(axis_sizes) or plan_on(model, axes, time_limit_s).step_s
    compiled = []
    for shape in sorted(plan.shapes, key=lambda s: s.step_s or s.lower_bound_s)[:num_compiled]:
        own = plan if shape.mesh_axes == plan.mesh_axes else plan_on(model, shape.mesh_axes, time_limit_s)
        compiled.append([dict(shape.mesh_axes), own.step_s, timeline_s(model, own)])
    shapes = [[dict(s.mesh_axes), s.step_s, s.lower_bound_s, s.status] for s in plan.shapes]
    return Row(name, devices, shapes, usual, plan.step_s, plan.gap, search_s, cpu_s, compiled)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table of found shapes, and one of compiled programs if there are any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--devices", nargs="+", type=int, default=[8, 16, 32])
    parser.add_argument("--sizes", choices=("full", "small"), default="full")
    parser.add_argument("--compile", type=int, default=0, metavar="N", help="compile so many of the best shapes")
    parser.add_argument("--time-limit", type=float, help="seconds of the solver for all shapes; default: none")
    parser.add_argument("-o", "--output", type=Path, help="also add each row to this file, and keep those it has")
    options = parser.parse_args(argv)
    lines = options.output.read_text().splitlines() if options.output and options.output.exists() else []
    known = {(row.model, row.devices): row for row in (Row(**json.loads(line)) for line in lines)}
    rows = []
    for devices in options.devices:
        for name in options.models:
            row = known.get((name, devices))
            if row is None:
                row = run(name, devices, options.sizes, options.compile, options.time_limit)
                print(*cells(row), sep="  ", flush=True)
                if options.output:
                    with options.output.open("a") as file:
                        file.write(json.dumps(row._asdict()) + "\n")
            rows.append(row)
    print_table("The mesh's shape, searched for H100s", COLUMNS, map(cells, rows))
    compiled = [
        (row.model, row.devices, _shape_text(axes), f"{1e3 * predicted:.2f}", f"{1e3 * played:.2f}")
        for row in rows for axes, predicted, played in row.compiled
    ]  # fmt: skip
    if compiled:
        print_table("Compiled for H100s", COMPILED_COLUMNS, compiled)
    return 0


def cells(row: Row) -> tuple[object, ...]:
    """Returns the cells of a row of the table."""
    usual = ", ".join(f"{text}: {1e3 * seconds:.2f}" for text, seconds in row.usual.items())
    num_cut_off = sum(status == "cut off" for *_, status in row.shapes)
    return (
        row.model, row.devices, len(row.shapes), num_cut_off, _shape_text(row.shapes[0][0]), f"{1e3 * row.step_s:.2f}",
        usual, f"{row.over_usual:.4f}", format_percent(row.gap), f"{row.search_s:.0f}", f"{row.cpu_s:.0f}",
    )  # fmt: skip


def _shape_text(axes: Mapping[str, int]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in axes.items())


if __name__ == "__main__":
    raise SystemExit(main())

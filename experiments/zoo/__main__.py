"""Models as other people write them: planned, trained for a few steps with the plan, and compared with one device.

    python -m experiments.zoo [--models t5 vit] [--mesh 2x4] [--steps 3]

Each model is planned twice: for H100s, where a model as small as these is best left nearly whole, and for slow devices
with the links of H100s, for which it is split as a large one. Both plans run on host devices. `pip install -e ".[zoo]"`
brings the models' packages; a model whose package is missing has a row that says so.
"""

import argparse
import traceback
from collections.abc import Sequence
from importlib import metadata
from typing import NamedTuple

from jax.sharding import Mesh

from cost.presets import preset
from diffshard import Hardware
from experiments.host_devices import host_mesh, parse_mesh
from experiments.tables import print_table
from experiments.zoo.base import ZooModel
from experiments.zoo.catalogue import MODELS
from experiments.zoo.running import ZooRun, run, slow_devices, state_share, work_share

COLUMNS = (
    "model",
    "devices",
    "operations",
    "planning",
    "gap",
    "loss differs",
    "state differs",
    "by rounding",
    "",
    "verdict",
    "state held",
    "work done",
    "notes",
)


class Row(NamedTuple):
    """A row of the table.

    Attributes:
      cells: what is printed, without the notes.
      notes: of the plan.
      failed: whether results differ, or the model fails for another reason than a missing package.
    """

    cells: tuple[str, ...]
    notes: tuple[str, ...] = ()
    failed: bool = False


def row_of(name: str, devices: str, result: ZooRun | Exception) -> Row:
    """Returns the row of a run, or of the error that it ended with."""
    name = f"{name} (held out)" if MODELS[name].held_out else name
    if isinstance(result, Exception):
        kind = "not installed" if isinstance(result, ImportError) else f"FAILS: {type(result).__name__}"
        cells = (name, devices, *("",) * 7, kind, "", "")
        return Row(cells, (str(result).splitlines()[0],), not isinstance(result, ImportError))
    plan, difference = result.plan, result.difference
    cells = (
        name,
        devices,
        str(sum(operation.kind == "operation" for operation in plan.operations)),
        f"{result.planning_s:.1f} s",
        f"{plan.gap:.2%}",
        f"{difference.loss:.0e}",
        f"{difference.state:.0e}",
        f"{result.noise.loss:.0e}",
        f"{result.noise.state:.0e}",
        result.verdict,
        f"{state_share(plan, result.num_state):.1%}",
        f"{work_share(plan):.1%}",
    )
    return Row(cells, plan.notes, result.verdict == "DIFFERS")


def run_models(names: Sequence[str], mesh_text: str, devices: Sequence[str], steps: int, limit_s: float) -> list[Row]:
    """Runs models, each on all kinds of devices, and returns their rows."""
    mesh = host_mesh(parse_mesh(mesh_text))
    hardware = {"h100": preset("h100", dict(mesh.shape)), "slow": slow_devices(preset("h100", dict(mesh.shape)))}
    rows = []
    for name in names:
        for kind in devices:
            result = _result(MODELS[name], mesh, hardware[kind], steps, limit_s)
            rows.append(row_of(name, kind, result))
            if isinstance(result, ImportError):
                break
    return rows


def _result(model: ZooModel, mesh: Mesh, hardware: Hardware, steps: int, limit_s: float) -> ZooRun | Exception:
    try:
        return run(model, mesh, hardware, steps=steps, time_limit_s=limit_s)
    except Exception as error:  # what fails is what the table is for
        if not isinstance(error, ImportError):
            traceback.print_exc()
        return error


def versions(names: Sequence[str]) -> str:
    """Returns the versions of the packages that models need, as far as they are installed."""
    packages = dict.fromkeys(("jax", "flax", "optax", *(p for name in names for p in MODELS[name].packages)))
    return ", ".join(f"{package} {_version(package)}" for package in packages)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "(not installed)"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; 1 if any result differs or any model fails for another reason than a missing package."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL")
    parser.add_argument("--mesh", default="2x4")
    parser.add_argument("--devices", nargs="+", choices=("h100", "slow"), default=["h100", "slow"])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--time-limit", type=float, default=20.0, help="seconds of the solver for each plan")
    options = parser.parse_args(argv)

    rows = run_models(options.models, options.mesh, options.devices, options.steps, options.time_limit)
    numbers = {note: i for i, note in enumerate(dict.fromkeys(note for row in rows for note in row.notes), 1)}
    title = f"The zoo: {options.steps} steps with the plan, mesh {options.mesh}, against one device"
    print_table(title, COLUMNS, [(*row.cells, " ".join(str(numbers[note]) for note in row.notes)) for row in rows])
    print(*(f"{number}. {note}" for note, number in numbers.items()), versions(options.models), sep="\n")
    return int(any(row.failed for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())

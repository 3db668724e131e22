"""Predicted seconds of computing against those of the compiled GPU programs.

    python -m experiments.compute_prediction [--models decoder gpt] [--plans found fsdp]

Each model is planned for H100s that need not be there, and its plan is compiled as an explicit program for each device
(the extra `gpu-compile`). `diffshard.checks.timeline` says how long the program's compute stream is busy: every kernel
by roofline, at the rates of the preset. The prediction is `plan.compute_s`. Models with a star are held out: the rules
of `search_spaces/sharding/kernels.py` were found on the other ones.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from flax import linen as nn

import diffshard
from diffshard.checks.kernel_work import achievable_rates
from diffshard.checks.timeline import COMPUTE, simulate
from experiments import hand_plans
from experiments.host_devices import parse_mesh
from experiments.models import convnet, decoder, dlrm, gpt, mlp, moe, resnet, scanned_layers
from experiments.models.model import Model, abstract_arguments
from experiments.tables import print_table
from experiments.targets import MESHES
from experiments.timeline import achievable
from experiments.timeline_models import CASES as TIMELINE_CASES

_GPT: dict[str, Any] = {"batch": 32, "width": 2048, "heads": 16, "vocabulary": 16384, "sequence": 1024}
_TABLES = (1_000_000, 200_000, 50_000, 5_000, 999, 64, 24, 3)
CASES: dict[str, tuple[Callable[[], Model], tuple[str, ...]]] = {
    "decoder": (lambda: decoder.make(batch=32, **TIMELINE_CASES["decoder"].full), ("2x4", "4x8")),
    "gpt": (lambda: gpt.make(layers=2, **_GPT), ("2x4",)),
    "gpt, scanned, remat": (
        lambda: gpt.make(layers=4, block=nn.remat(gpt.Block), stack=gpt.scanned, **_GPT),
        ("4x8",),
    ),
    "gpt, scanned": (lambda: gpt.make(layers=4, stack=gpt.scanned, **_GPT), ("8",)),
    "mlp": (lambda: mlp.make(layers=4, width=8192, batch=8192), ("2x4",)),
    "dlrm": (lambda: dlrm.make(rows=_TABLES, width=64, batch=16384), ("8",)),
    "convnet": (lambda: convnet.make(layers=3, channels=128, image=128, batch=256), ("2x4",)),
    "moe*": (lambda: moe.make(layers=2, **{**_GPT, "width": 1024}), ("2x4", "4x8")),
    "resnet*": (lambda: resnet.make(width=64, image=64, batch=512), ("8", "2x4")),
    "mixer, scanned*": (scanned_layers.mixer, ("8",)),
    "llama, scanned*": (scanned_layers.llama, ("8",)),
    "gated recurrent unit*": (scanned_layers.recurrent, ("8",)),
    "convolutions, scanned*": (scanned_layers.convolutions, ("8",)),
    "tiny": (lambda: mlp.make(layers=2, width=64, batch=64), ("2x4",)),
}
"""Models, and the meshes that they are planned for; a star marks those that no rule was made on."""
FOUND = "found"
PLANS: dict[str, Any] = {FOUND: None, "fsdp": hand_plans.fsdp, "data parallel": hand_plans.data_parallel}


class ComputingTimes(NamedTuple):
    """A plan's seconds of computing in one step, predicted and of the compiled program."""

    model: str
    mesh: str
    plan: str
    predicted_s: float
    compiled_s: float

    @property
    def error(self) -> float:
        """The prediction's relative error."""
        return self.predicted_s / self.compiled_s - 1


def compare(name: str, mesh_text: str, plan_name: str, time_limit_s: float) -> ComputingTimes:
    """Plans and compiles one model, as found or with a baseline's shardings of state and batch."""
    model, mesh = CASES[name][0](), MESHES["h100"](parse_mesh(mesh_text))
    args = abstract_arguments(model)
    by_hand = PLANS[plan_name](*args, mesh) if PLANS[plan_name] else None
    step = diffshard.search(
        model.step, mesh, hardware=achievable(mesh), time_limit_s=time_limit_s, donate_argnums=0, executor="program",
        in_shardings=by_hand.in_shardings if by_hand else None,
    )  # fmt: skip
    plan = step.plan(*args)
    hlo = step.lower(*args).compile().as_text() or ""
    timeline = simulate(hlo, mesh.shape, achievable_rates(plan.hardware))
    return ComputingTimes(name, mesh_text, plan_name, plan.compute_s, timeline.busy_s[COMPUTE])


def rows(models: Sequence[str], plans: Sequence[str], time_limit_s: float) -> Iterator[ComputingTimes]:
    """Compares plans on all meshes of the models, and prints each comparison as soon as it is made."""
    for name in models:
        for mesh_text in CASES[name][1]:
            for plan_name in plans if "x" in mesh_text else [FOUND]:
                row = compare(name, mesh_text, plan_name, time_limit_s)
                print(*cells(row), sep="  ", flush=True)
                yield row


def cells(row: ComputingTimes) -> tuple[str, ...]:
    """Formats a row."""
    seconds = (f"{1e3 * row.predicted_s:.2f}", f"{1e3 * row.compiled_s:.2f}")
    return (row.model, row.mesh, row.plan, *seconds, f"{100 * row.error:+.0f}%")


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    published = [name for name in CASES if name != "tiny"]
    parser.add_argument("--models", nargs="+", choices=CASES, default=published, metavar="MODEL")
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=list(PLANS))
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds of the solver for each plan")
    options = parser.parse_args(argv)
    times = list(rows(options.models, options.plans, options.time_limit))
    columns = ("model", "mesh", "plan", "predicted ms", "compiled ms", "error")
    print_table("Seconds of computing", columns, map(cells, times))
    print(f"largest error {100 * max(abs(row.error) for row in times):.0f}%")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

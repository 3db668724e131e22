"""How true the cost model is: predicted collectives and memory against Shardy, XLA's program and its memory plan.

    python -m experiments.truth [--target h100|host] [--models gpt moe] [--meshes 8 2x4] [--hardware h100 dear]

The target h100 compiles for H100s that need not be there (`pip install '.[gpu-compile]'`). Reduce-scatters,
rematerialisation and memory are judged there; host devices are for rough counts. With the preset of an H100, plans of
models of this size are mostly data parallel. So each model is also planned for hardware with slow arithmetic, where
plans split operations in several ways.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from flax import linen as nn
from jax.sharding import Mesh

import diffshard
from diffshard import Hardware
from diffshard.checks.hlo import memory_plan
from diffshard.checks.verify import ComparedBytes, Verification, format_error, relative_error, verify
from experiments.equal_results import slow_arithmetic
from experiments.host_devices import parse_mesh
from experiments.models import dlrm, gpt, mlp, moe, resnet
from experiments.models.model import Model, abstract_arguments
from experiments.tables import print_table
from experiments.targets import MESHES as TARGETS

# Sizes as they are trained: on matrices too small for an H100's multiprocessors XLA splits the sums of products, which
# takes several times the result's memory. Nothing is run, so large costs no more than small.
_GPT = partial(gpt.make, batch=32, layers=4, width=1024, heads=16, key_value_heads=16, vocabulary=16384, sequence=1024)
MODELS: dict[str, Callable[[], Model]] = {
    "mlp": lambda: mlp.make(layers=6, width=2048, batch=8192),
    "gpt": _GPT,
    "gpt-scanned": partial(_GPT, stack=gpt.scanned),
    "gpt-remat": partial(_GPT, block=nn.remat(gpt.Block)),
    "gpt-scanned-remat": partial(_GPT, stack=gpt.scanned, block=nn.remat(gpt.Block)),
    # Fewer sequences than devices: something besides the batch has to be split.
    "gpt-narrow": partial(_GPT, batch=2, layers=2),
    "gpt-grouped": partial(_GPT, layers=2, key_value_heads=4),
    "moe": lambda: moe.make(
        batch=32, layers=2, width=1024, heads=16, key_value_heads=16, vocabulary=16384, sequence=1024
    ),
    "resnet": lambda: resnet.make(width=64, image=64, batch=512),
    "dlrm": lambda: dlrm.make(rows=(1_000_000, 200_000, 50_000, 5_000, 999, 64, 24, 3), width=64, batch=16384),
}
MESHES = ("8", "2x4", "2x2x2")
HARDWARE: dict[str, Callable[[Mesh], Hardware]] = {
    "h100": lambda mesh: diffshard.preset("h100", dict(mesh.shape)),
    "dear": slow_arithmetic,
}
COLLECTIVE_TOLERANCE, MEMORY_TOLERANCE = 0.10, 0.20
# Kinds of collectives below this share of a step's bytes reduce scalars, of losses and norms; their errors say nothing.
SMALL_SHARE = 0.01
# XLA's latency hiding scheduler computes weight gradients last, and keeps what they read until then, as long as the
# device has memory to spare. Without this scheduler XLA orders operations so that they need little memory.
IN_ORDER = {"xla_disable_hlo_passes": "latency-hiding-scheduler"}


class CheckedPlan(NamedTuple):
    """A model's plan for a mesh and hardware, and what the compilers make of it.

    Attributes:
      predicted_collectives: how many collectives the plan has in one step; XLA combines some of them.
      in_order_bytes: XLA's peak without the latency hiding scheduler; None unless the peak is beyond its tolerance.
      step_s, gap: the plan's prediction.
      search_s, compile_s: how long the search and the compiler took.
    """

    model: str
    mesh: str
    hardware: str
    verification: Verification
    predicted_collectives: float
    in_order_bytes: float | None
    step_s: float
    gap: float
    search_s: float
    compile_s: float

    @property
    def name(self) -> str:
        """Model, mesh and hardware in one string."""
        return f"{self.model} {self.mesh} {self.hardware}"


def check(
    name: str, mesh: Mesh, mesh_text: str, hardware: str, *, solver: str | None, time_limit_s: float
) -> CheckedPlan:
    """Plans a model's step with its state donated, compiles it, and compares prediction and program."""
    model = MODELS[name]()
    step = diffshard.search(
        model.step,
        mesh,
        hardware=HARDWARE[hardware](mesh),
        solver=solver,
        time_limit_s=time_limit_s,
        donate_argnums=0,
    )
    start = time.perf_counter()
    plan = step.plan(*abstract_arguments(model))
    searched = time.perf_counter()
    lowered = step.lower(*abstract_arguments(model))
    verification = verify(lowered, mesh.shape, plan.collectives, plan.peak_bytes)
    compile_s = time.perf_counter() - searched
    memory, in_order = verification.memory, None
    if memory and abs(memory.error) > MEMORY_TOLERANCE and mesh.devices.flat[0].platform != "cpu":
        in_order_plan = memory_plan(lowered.compile(compiler_options=IN_ORDER))
        in_order = None if in_order_plan is None else in_order_plan.peak
    count = sum(c.count for c in plan.collectives)
    return CheckedPlan(
        name, mesh_text, hardware, verification, count, in_order, plan.step_s, plan.gap, searched - start, compile_s
    )


def substantial(rows: Sequence[ComparedBytes]) -> list[ComparedBytes]:
    """Returns the rows with more than a small share of all bytes, predicted or compiled."""
    predicted, compiled = sum(r.predicted for r in rows), sum(r.compiled for r in rows)
    return [r for r in rows if r.predicted > SMALL_SHARE * predicted or r.compiled > SMALL_SHARE * compiled]


def sent_error(verification: Verification) -> float:
    """Returns the relative error of the bytes that a device sends along all axes."""
    return relative_error(sum(r.predicted for r in verification.sent), sum(r.compiled for r in verification.sent))


def worst(rows: Iterable[ComparedBytes]) -> ComparedBytes | None:
    """Returns the row with the largest error, None if there are no rows."""
    return max(rows, key=lambda row: abs(row.error), default=None)


def cells(result: CheckedPlan) -> tuple[object, ...]:
    """Returns the cells of a result's row in the table."""
    verification, memory = result.verification, result.verification.memory
    sent = np.sum([(s.predicted, s.shardy, s.compiled) for s in verification.sent] or [(0, 0, 0)], axis=0)
    row = worst(substantial(verification.collectives))
    return (
        result.model,
        result.mesh,
        result.hardware,
        *(f"{num_bytes / 1e6:.1f}" for num_bytes in sent),
        format_error(sent_error(verification)),
        f"{format_error(row.error)} {row.kind} {row.axis}" if row else "",
        f"{result.predicted_collectives:.0f} → {verification.num_collectives:.0f}",
        f"{memory.predicted / 1e6:.0f}" if memory else "",
        f"{memory.compiled / 1e6:.0f}" if memory else "",
        format_error(memory.error) if memory else "",
        format_error(relative_error(memory.predicted, result.in_order_bytes))
        if memory and result.in_order_bytes
        else "",
    )


COLUMNS = (
    "model",
    "mesh",
    "hardware",
    "sent MB: predicted",
    "Shardy",
    "XLA",
    "error",
    "worst kind and axis",
    "collectives → combined",
    "peak MB: predicted",
    "XLA",
    "error",
    "in order",
)


def summary(results: Sequence[CheckedPlan]) -> list[tuple[str, list[tuple[str, float]], float]]:
    """Returns the name of each measure, the names and errors of all its rows, and its tolerance."""
    kinds, axes, memory = [], [], []
    for result in results:
        verification = result.verification
        kinds += [(f"{result.name}: {r.kind} {r.axis}", r.error) for r in substantial(verification.collectives)]
        axes += [(f"{result.name}: {r.axis}", r.error) for r in substantial(verification.sent)]
        if verification.memory:
            memory.append((result.name, verification.memory.error))
    return [
        ("collective bytes by kind and axis", kinds, COLLECTIVE_TOLERANCE),
        ("bytes sent by axis", axes, COLLECTIVE_TOLERANCE),
        ("peak memory", memory, MEMORY_TOLERANCE),
    ]


def print_summary(results: Sequence[CheckedPlan]) -> None:
    """Prints median and worst error of each measure, and every row beyond its tolerance."""
    rows = []
    for name, errors, tolerance in summary(results):
        if not errors:
            continue
        sizes = np.abs([e for _, e in errors])
        outside = sum(sizes > tolerance)
        worst_name, worst_error = max(errors, key=lambda e: abs(e[1]))
        rows.append(
            (
                name,
                len(errors),
                f"{100 * np.median(sizes):.1f}%",
                f"{format_error(worst_error)} ({worst_name})",
                f"{outside} beyond {tolerance:.0%}",
            )
        )
    print_table("Summary", ("measure", "rows", "median error", "worst", "outside"), rows)
    for name, errors, tolerance in summary(results):
        for row, error in errors:
            if abs(error) > tolerance:
                print(f"beyond {tolerance:.0%}, {name}: {row} {format_error(error)}")


def as_json(results: Sequence[CheckedPlan]) -> str:
    """Returns all numbers as JSON, for other tables."""
    return json.dumps(
        [
            {
                **{k: v for k, v in result._asdict().items() if k != "verification"},
                "rows": [vars(r) for r in result.verification.collectives],
                "sent": [vars(r) for r in result.verification.sent],
                "memory": {"predicted": memory.predicted, **memory.plan._asdict()} if memory else None,
                "compiled_collectives": result.verification.num_collectives,
            }
            for result, memory in ((result, result.verification.memory) for result in results)
        ],
        indent=1,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table, the summary and the rows beyond the tolerances."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=TARGETS, default="h100")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--meshes", nargs="+", default=list(MESHES))
    parser.add_argument("--hardware", nargs="+", choices=HARDWARE, default=list(HARDWARE))
    parser.add_argument("--solver", default=None, help="as in diffshard.search; the default is diffshard's")
    parser.add_argument("--time-limit", type=float, default=20.0, help="seconds of the solver for each plan")
    parser.add_argument("-o", "--output", type=Path, help="also write all numbers to this JSON file")
    options = parser.parse_args(argv)

    results = []
    for name in options.models:
        for mesh_text in options.meshes:
            mesh = TARGETS[options.target](parse_mesh(mesh_text))
            for hardware in options.hardware:
                result = check(name, mesh, mesh_text, hardware, solver=options.solver, time_limit_s=options.time_limit)
                results.append(result)
                print(*cells(result), f"{result.search_s:.0f}+{result.compile_s:.0f} s", sep="  ", flush=True)
    print_table(f"Predictions against XLA for {options.target}", COLUMNS, map(cells, results))
    print_summary(results)
    if options.output:
        options.output.write_text(as_json(results) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Found plans against experts' by the time that their compiled programs take on the GPUs.

    python -m experiments.timeline [--meshes 2x4 4x8] [--batch 32] [--traces FOLDER]

A Llama-like decoder is planned, its step is compiled for H100s that need not be there (the extra `gpu-compile`), and
`diffshard.checks.timeline` plays the scheduled program back: matrix products at 70% of the datasheet's rate, memory at
80%, NVLink at 360 GB/s and InfiniBand at 45 GB/s for each GPU. The prediction for an expert is that of the best plan
with the expert's shardings of state and batch. The published rows are 2x4 with a batch of 16, 4x8 with 32 and 8x8 with
64 sequences, with 60 seconds for the solver: with less, plans that are predicted alike differ by 15% in the timeline.
"""

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

import diffshard
from diffshard.checks.achievable_rates import H100_HOST, achievable_rates
from diffshard.checks.timeline import COMPUTE, Timeline, simulate, write_perfetto
from diffshard.checks.verify import Verification, relative_error, verify
from diffshard.experts.base import DoesNotApplyError
from experiments import experts
from experiments.host_devices import parse_mesh
from experiments.models import decoder
from experiments.models.model import Model, abstract_arguments
from experiments.tables import print_table
from experiments.targets import MESHES

SIZES: dict[str, dict[str, Any]] = {
    "full": {
        "layers": 4, "width": 4096, "heads": 32, "key_value_heads": 8, "hidden": 14336, "vocabulary": 32768,
        "sequence": 2048,
    },
    "small": {
        "layers": 1, "width": 64, "heads": 8, "key_value_heads": 4, "hidden": 128, "vocabulary": 256, "sequence": 32
    },
}  # fmt: skip
PUBLISHED = ("data parallel", "fsdp", "megatron", "megatron fsdp", "hybrid fsdp")
FOUND = "found"
# Waits below this are left out of the table, whose times have one digit of a millisecond.
SHORT_WAIT_S = 5e-5


def achievable(mesh: Mesh) -> diffshard.Hardware:
    """Returns H100s with the links at whose rates the timeline runs, for plans whose cost knows them."""
    links = {}
    stride = 1
    for axis, size in reversed(list(mesh.shape.items())):
        links[axis] = H100_HOST.link(size, stride)
        stride *= size
    return replace(diffshard.preset("h100", {}), name="H100-80GB, achievable links", links=links)


HARDWARE: dict[str, Callable[[Mesh], diffshard.Hardware]] = {
    "datasheet": lambda mesh: diffshard.preset("h100", dict(mesh.shape)),
    "achievable": achievable,
}


class TimedPlan(NamedTuple):
    """A plan with its compiled program.

    Attributes:
      mesh: such as "4x8".
      name: `FOUND`, or the expert's name.
      predicted_s: of a step; NaN where no plan has the expert's shardings and fits the memory.
      verification: predicted and compiled bytes.
      timeline: the compiled program played back.
      search_s, compile_s: how long they took.
    """

    mesh: str
    name: str
    predicted_s: float
    verification: Verification
    timeline: Timeline
    search_s: float
    compile_s: float


def time_plan(model: Model, mesh: Mesh, name: str, hardware: diffshard.Hardware, time_limit_s: float) -> TimedPlan:
    """Plans, compiles and plays back the found plan or an expert's."""
    args = abstract_arguments(model)
    by_hand = None if name == FOUND else experts.EXPERTS[name](*args, mesh)
    step = diffshard.search(
        model.step, mesh, hardware=hardware, time_limit_s=time_limit_s, donate_argnums=0,
        in_shardings=by_hand.in_shardings if by_hand else None,
    )  # fmt: skip
    start = time.perf_counter()
    try:
        plan = step.plan(*args)
    except diffshard.InfeasibleError:
        plan = None
    searched = time.perf_counter()
    lowered = experts.lower_by_hand(model.step, *args, by_hand, donate_argnums=0) if by_hand else step.lower(*args)
    compiled = lowered.compile()
    compile_s = time.perf_counter() - searched
    timeline = simulate(
        compiled.as_text() or "", mesh.shape, achievable_rates(diffshard.preset("h100", dict(mesh.shape)))
    )
    predicted = (plan.collectives, plan.peak_bytes) if plan else ((), float("nan"))
    verification = verify(lowered, mesh.shape, *predicted, compiled=compiled)
    mesh_text = "x".join(map(str, mesh.shape.values()))
    predicted_s = plan.step_s if plan else float("nan")
    return TimedPlan(mesh_text, name, predicted_s, verification, timeline, searched - start, compile_s)


def divides(model: Model, mesh: Mesh, name: str) -> bool:
    """Tells whether an expert's plan splits the model's batch evenly; a found plan always does."""
    if name == FOUND:
        return True
    try:
        experts.EXPERTS[name](*abstract_arguments(model), mesh)
    except DoesNotApplyError:
        return False
    return True


def waited_s(timeline: Timeline) -> dict[str, float]:
    """Returns seconds that the compute stream waits for each kind of collective, the longest first."""
    total: dict[str, float] = defaultdict(float)
    for (kind, _), seconds in timeline.waited_s.items():
        total[kind] += seconds
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def over_best_expert(rows: Sequence[TimedPlan]) -> float:
    """Returns the found plan's time over the best expert's; NaN without both."""
    found = [row.timeline.step_s for row in rows if row.name == FOUND]
    by_hand = [row.timeline.step_s for row in rows if row.name != FOUND]
    return found[0] / min(by_hand) if found and by_hand else float("nan")


def ranking(rows: Sequence[TimedPlan]) -> float:
    """Returns Kendall's tau of predicted and simulated times; NaN below two plans with a prediction."""
    pairs = [(row.predicted_s, row.timeline.step_s) for row in rows if np.isfinite(row.predicted_s)]
    if len(pairs) < 2:
        return float("nan")
    predicted, played = (np.sign(np.subtract.outer(times, times)) for times in zip(*pairs, strict=True))
    return float(np.sum(predicted * played) / (len(pairs) * (len(pairs) - 1)))


def sent_bytes(row: TimedPlan) -> tuple[float, float]:
    """Returns bytes that a device sends in a step, predicted and compiled."""
    sent = row.verification.sent
    return sum(r.predicted for r in sent), sum(r.compiled for r in sent)


COLUMNS = (
    "mesh", "plan", "predicted", "timeline", "error", "computing", "waiting, ms",
    "sent GB: predicted", "compiled", "error", "peak GiB: predicted", "compiled", "error",
)  # fmt: skip


def cells(row: TimedPlan) -> tuple[object, ...]:
    """Formats a row."""
    timeline, memory = row.timeline, row.verification.memory
    predicted, compiled = sent_bytes(row)
    waits = "\n".join(f"{kind} {1e3 * s:.1f}" for kind, s in waited_s(timeline).items() if s >= SHORT_WAIT_S)
    return (
        row.mesh,
        row.name,
        f"{1e3 * row.predicted_s:.1f} ms",
        f"{1e3 * timeline.step_s:.1f} ms",
        percent(relative_error(row.predicted_s, timeline.step_s)),
        f"{1e3 * timeline.busy_s.get(COMPUTE, 0.0):.1f} ms",
        waits,
        f"{predicted / 1e9:.2f}",
        f"{compiled / 1e9:.2f}",
        percent(relative_error(predicted, compiled)),
        f"{memory.predicted / 2**30:.1f}" if memory else "",
        f"{memory.compiled / 2**30:.1f}" if memory else "",
        percent(memory.error) if memory else "",
    )


def percent(error: float) -> str:
    """Formats a relative error; inf means that the program has no such bytes."""
    return "new" if np.isinf(error) else f"{100 * error:+.0f}%"


def as_json(rows: Sequence[TimedPlan]) -> str:
    """Writes everything measured but the spans."""
    documents = []
    for row in rows:
        predicted, compiled = sent_bytes(row)
        memory = row.verification.memory
        documents.append({
            "mesh": row.mesh, "plan": row.name, "predicted_s": row.predicted_s, "timeline_s": row.timeline.step_s,
            "busy_s": row.timeline.busy_s, "waited_s": {" ".join(k): s for k, s in row.timeline.waited_s.items()},
            "sent_bytes": [predicted, compiled], "peak_bytes": [memory.predicted, memory.compiled] if memory else [],
            "collectives": [vars(compared) for compared in row.verification.collectives],
            "notes": row.timeline.notes, "search_s": row.search_s, "compile_s": row.compile_s,
        })  # fmt: skip
    return json.dumps(documents, indent=1)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table, and for each mesh the found plan over the best expert's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--meshes", nargs="+", default=["2x4", "4x8"], help="data x model, in hosts of 8")
    parser.add_argument("--batch", type=int, default=32, help="sequences in a batch")
    parser.add_argument("--sizes", choices=SIZES, default="full")
    parser.add_argument("--experts", nargs="*", choices=experts.EXPERTS, default=list(PUBLISHED))
    parser.add_argument("--hardware", choices=HARDWARE, default="datasheet", help="the rates that plans are made for")
    parser.add_argument("--target", choices=MESHES, default="h100", help="what the programs are compiled for")
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds of the solver for each plan")
    parser.add_argument("--traces", type=Path, help="a folder for a trace of each plan, for ui.perfetto.dev")
    parser.add_argument("-o", "--output", type=Path, help="also write all numbers to this JSON file")
    options = parser.parse_args(argv)
    model = decoder.make(batch=options.batch, **SIZES[options.sizes])
    rows = [row for mesh_text in options.meshes for row in time_plans(model, mesh_text, options)]
    title = f"{model.name}, batch {options.batch}, plans for {options.hardware} rates, compiled for {options.target}"
    print_table(title, COLUMNS, map(cells, rows))
    for mesh_text in options.meshes:
        of_mesh = [row for row in rows if row.mesh == mesh_text]
        ratio, tau = over_best_expert(of_mesh), ranking(of_mesh)
        print(f"{mesh_text}: found / best expert {ratio:.2f}, Kendall's tau of the prediction {tau:.2f}")
    if options.output:
        options.output.write_text(as_json(rows) + "\n")
    return 0


def time_plans(model: Model, mesh_text: str, options: argparse.Namespace) -> Iterator[TimedPlan]:
    """Times all plans on one mesh, and prints and traces each as soon as it is there."""
    mesh = MESHES[options.target](parse_mesh(mesh_text))
    hardware = HARDWARE[options.hardware](mesh)
    for name in (FOUND, *options.experts):
        if not divides(model, mesh, name):
            print(f"{mesh_text} {name} is left out: its plan does not split a batch of {options.batch} evenly")
            continue
        row = time_plan(model, mesh, name, hardware, options.time_limit)
        one_line = [str(cell).replace("\n", ", ") for cell in cells(row)]
        print(*one_line, f"{row.search_s:.0f}+{row.compile_s:.0f} s", *row.timeline.notes, sep="  ", flush=True)
        if options.traces:
            options.traces.mkdir(parents=True, exist_ok=True)
            write_perfetto(row.timeline, options.traces / f"{mesh_text} {name}.json")
        yield row


if __name__ == "__main__":
    raise SystemExit(main())

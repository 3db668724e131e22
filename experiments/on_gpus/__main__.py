"""Measures kernels, links and training steps on the GPUs of this machine, beside what is predicted for them.

    python -m experiments.on_gpus --dry-run
    python -m experiments.on_gpus [--output on_gpus.jsonl] [--traces FOLDER] [--models decoder] [--plans found fsdp]
    python -m experiments.on_gpus --compare on_gpus.jsonl
    python -m experiments.on_gpus --host-devices 8 --size small

First it says what it will do. Each part runs in a process of its own; one that fails or runs out of memory or time
leaves a line that says so. Records are written as they come, so that the command can be stopped, and goes on where it
was when it is started again with the same file. The file is what a bug report needs: attach it.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from diffshard.child_processes import python_command, python_environment
from diffshard.plans.json_values import to_json_values
from experiments.host_devices import parse_mesh
from experiments.on_gpus.parts import MARK, MODELS, PLANS, Settings, median_of, records_of
from experiments.on_gpus.records import (
    Environment,
    FailedPart,
    MeasuredHardware,
    MeasuredProduct,
    MeasuredRun,
    Record,
    RecordsError,
    as_line,
    from_line,
    read,
)
from experiments.on_gpus.report import print_report

EXPECTED_MINUTES = {"environment": 0.5, "hardware": 3.0, "products": 2.0, "run": 2.0}
"""What each part is guessed to take on 8 GPUs: compiling four layers for them takes under a minute on a CPU, planning a
quarter. No GPU has run it; the limit of each part is what can be relied on."""
_SMALL = {"matrix_size": 128, "largest_bytes": 2**15, "repeats": 2, "rounds": 2, "steps": 1, "search_s": 30.0}
Measure = Callable[[dict[str, Any], float], Iterator[Record]]


@dataclass(frozen=True)
class Part:
    """A part of the measurement: `kind` is a key of `EXPECTED_MINUTES`; runs have a model and a plan."""

    kind: str
    model: str = ""
    plan: str = ""

    @property
    def name(self) -> str:
        """The name in messages."""
        return f"run of {self.model}, {self.plan}" if self.kind == "run" else self.kind

    def is_in(self, records: Sequence[Record]) -> bool:
        """Whether a file has this part, without a failure."""
        if self.kind == "run":
            runs = [r for r in records if isinstance(r, MeasuredRun) and (r.model, r.plan) == (self.model, self.plan)]
            return bool(runs) and not runs[-1].error
        of_kind = {"environment": Environment, "hardware": MeasuredHardware, "products": MeasuredProduct}[self.kind]
        return any(isinstance(record, of_kind) for record in records)


def parts_of(models: Sequence[str], plans: Sequence[str]) -> list[Part]:
    """Returns all parts, in order."""
    return [*(Part(kind) for kind in ("environment", "hardware", "products")),
            *(Part("run", model, plan) for model in models for plan in plans)]  # fmt: skip


def announcement(parts: Sequence[Part], settings: Settings, output: Path, limit_minutes: float) -> str:
    """Says what will be done, and how long that takes."""
    devices = (
        f"{settings.host_devices} simulated devices of this processor" if settings.host_devices else "all GPUs here"
    )
    runs = [part for part in parts if part.kind == "run"]
    models, plans = (list(dict.fromkeys(getattr(run, name) for run in runs)) for name in ("model", "plan"))
    guess = sum(EXPECTED_MINUTES[part.kind] for part in parts)
    traces = f" and traces into {settings.traces}" if settings.traces else ""
    size, most_minutes = settings.matrix_size, limit_minutes * len(parts)
    return "\n".join(
        [
            f"This measures on {devices}, one part after the other, each in a process of its own:",
            f"  1. products of {size} x {size}, memory and links (`calibrate`), and products by shape",
            f"  2. {len(runs)} runs of a training step, in {settings.rounds} rounds of {settings.steps} steps each",
            f"     models: {', '.join(models)}",
            f"     plans: {', '.join(plans)}",
            f"Weights and data are random, and nothing is downloaded. It writes {output}{traces}, and nothing else.",
            f"It takes about {guess:.0f} minutes on 8 GPUs (a guess, because no GPU has run it yet), and at most",
            f"{most_minutes:.0f}: a part is stopped after {limit_minutes:g} minutes. It uses all memory of the GPUs,",
            "so that nothing else should run on them. Ctrl-C stops it; started again it goes on.",
        ]
    )


def in_a_process(job: dict[str, Any], limit_s: float) -> Iterator[Record]:
    """Measures a part in a process of its own; one that dies or takes too long has one record that says so."""
    environment = python_environment()
    if job["settings"]["host_devices"]:
        environment["JAX_PLATFORMS"] = "cpu"
    command = python_command("-m", "experiments.on_gpus.parts", json.dumps(job))
    try:
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        yield failure(job, f"stopped after {limit_s / 60:g} minutes")
        return
    for line in ended.stdout.splitlines():
        if line.startswith(MARK):
            yield from_line(line.removeprefix(MARK))
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
        yield failure(job, f"the process ended with {ended.returncode}: {last}"[:500])


def in_this_process(job: dict[str, Any], limit_s: float) -> Iterator[Record]:
    """Measures a part here; peaks of memory are then those of all runs so far, and nothing is stopped."""
    del limit_s
    try:
        yield from records_of(job)
    except Exception as error:
        yield failure(job, f"{type(error).__name__}: {error}"[:500])


def failure(job: dict[str, Any], why: str) -> Record:
    """Returns the record of a part that did not end as it should."""
    if job["part"] == "run":
        return MeasuredRun(job["model"], job["plan"], 0, {}, error=why)
    return FailedPart(job["part"], why)


def measure(parts: Sequence[Part], settings: Settings, output: Path, limit_s: float, how: Measure) -> list[Record]:
    """Measures all parts that a file does not have yet, and returns all of its records."""
    records = read(output) if output.exists() else []
    for number, part in enumerate(parts, 1):
        if part.is_in(records):
            print(f"{number} of {len(parts)}: {part.name}: already in {output}", flush=True)
            continue
        hardware = next((r for r in records if isinstance(r, MeasuredHardware)), None)
        if hardware is None and part.kind in ("products", "run"):
            print(f"{number} of {len(parts)}: {part.name}: left out, because the hardware was not measured", flush=True)
            continue
        job = {"part": part.kind, "settings": asdict(settings), "model": part.model, "plan": part.plan}
        job["hardware"] = to_json_values(hardware)
        start_s, result = time.perf_counter(), ""
        for record in how(job, limit_s):
            records.append(record)
            with output.open("a", encoding="utf-8") as file:
                file.write(as_line(record) + "\n")
            error = getattr(record, "error", "")
            result = f" FAILED: {error}" if error else ""
            if isinstance(record, MeasuredRun) and record.measured_s:
                result = f" {1e3 * median_of(record):.3g} ms a step"
        print(f"{number} of {len(parts)}: {part.name}:{result} ({time.perf_counter() - start_s:.0f} s)", flush=True)
    return records


def main(arguments: Sequence[str] | None = None, how: Measure = in_a_process) -> int:
    """Measures and prints the comparison; 1 where a part failed or a file cannot be read."""
    options = _options(arguments)
    if options.compare:
        try:
            print_report(read(options.compare))
        except (RecordsError, OSError) as error:
            print(error, file=sys.stderr)
            return 1
        return 0
    settings = Settings(
        mesh=options.mesh, host_devices=options.host_devices, size=options.size,
        traces=os.path.abspath(options.traces) if options.traces else "", **(_SMALL if options.size == "small" else {}),
    )  # fmt: skip
    parts = parts_of(options.models, options.plans)
    print(announcement(parts, settings, options.output, options.limit), flush=True)
    if why := _unwritable(options.output):
        print(f"`--output` {options.output} cannot be written: {why}. Give another one.", file=sys.stderr)
        return 1
    if options.dry_run:
        return 0
    try:
        records = measure(parts, settings, options.output, 60 * options.limit, how)
    except RecordsError as error:
        print(f"{error}\nGive another `--output`.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\nStopped. The same command goes on, with what is in {options.output}.", file=sys.stderr)
        return 130
    print_report(records)
    print(f"Wrote {options.output}. `python -m experiments.on_gpus --compare {options.output}` prints this again.")
    return int(not all(part.is_in(records) for part in parts))


def _unwritable(output: Path) -> str:
    """Returns why a file cannot be written, before anything is measured; empty where it can be."""
    if not output.parent.is_dir():
        return f"there is no folder {output.parent}"
    if output.exists() and not output.is_file():
        return "it is no file"
    written = output if output.exists() else output.parent
    return "" if os.access(written, os.W_OK) else f"{written} is read-only"


def _positive_minutes(text: str) -> float:
    minutes = float(text)
    if not 0 < minutes < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number of minutes, not {text}")
    return minutes


def _number_of_devices(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"must be a number of devices, or 0 for the GPUs that are here, not {text}")
    return number


def _mesh(text: str) -> str:
    try:
        return text and "x".join(map(str, parse_mesh(text)))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.on_gpus", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry-run", action="store_true", help="only says what would be done")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="prints predicted against measured of a file")
    parser.add_argument("--output", type=Path, default=Path("on_gpus.jsonl"), help="the file of records")
    parser.add_argument("--traces", default="", metavar="FOLDER", help="also writes the profiler's traces there")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=list(PLANS))
    parser.add_argument(
        "--mesh", type=_mesh, default="", help='such as "2x4"; up to four devices along the inner axis by default'
    )
    parser.add_argument("--limit", type=_positive_minutes, default=15.0, help="minutes after which a part is stopped")
    parser.add_argument("--size", choices=("full", "small"), default="full")
    parser.add_argument(
        "--host-devices", type=_number_of_devices, default=0, help="simulated devices of this processor, for a trial"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())

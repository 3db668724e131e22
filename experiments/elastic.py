"""Kills one of several processes in the middle of a training and goes on with the others, then with more again.

    python -m experiments.elastic [--processes 4] [--devices 2] [--steps 14] [--kill-after 7] [--interval 3]

A small GPT trains with a checkpoint every few steps. One process gets SIGKILL. The others are started again without it,
go on from the last checkpoint on a smaller mesh, and later all of them on the old one. Losses are set beside those of a
training that nothing interrupted. A second table shows what a process reads and holds while it restores a large state,
a third what a search gains by beginning with the plan of the checkpoint.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jax.sharding import AbstractMesh, AxisType

import diffshard
from experiments.job import Job
from experiments.models import gpt
from experiments.models.model import Model, abstract_arguments
from experiments.tables import print_table

_WORKER = "experiments.elastic_worker"
_TIMEOUT_S = 900.0
MOST_DIFFERENCE = 1e-5
"""Relative difference of losses that is rounding: sums over devices have another order on another mesh."""
_FAST_TO_COMPILE = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"


class Killed(NamedTuple):
    """A job of which one process was killed.

    Attributes:
      reports: of the first process.
      noticed_s: seconds until all others had ended or reported an error.
      exit_notices: how each of the others ended.
    """

    reports: list[dict[str, Any]]
    noticed_s: float
    exit_notices: list[str]


class Elastic(NamedTuple):
    """The record of an interrupted training.

    Attributes:
      losses: of each step, as the processes made them last.
      num_lost: steps that were made twice.
      killed: the job that lost a process.
      jobs: reports of the first process of each job that went on, by the number of processes.
    """

    losses: dict[int, float]
    num_lost: int
    killed: Killed
    jobs: list[tuple[int, list[dict[str, Any]]]]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the trainings and prints the tables; 1 if a loss differs by more than rounding."""
    options = _options(argv)
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FAST_TO_COMPILE}".strip()
    sizes = {"layers": 1, "width": 48, "heads": 6, "key_value_heads": 6, "vocabulary": 48, "sequence": 16, "batch": 24}
    settings = {"sizes": sizes, "until": options.steps, "save_interval_steps": options.interval}
    with tempfile.TemporaryDirectory() as folder:
        job = Jobs(Path(folder), options.devices)
        expected = losses_of(job.run(settings, options.processes)[0])
        elastic = interrupt(job, settings, options.processes, options.kill_after)
        is_equal = print_losses(expected, elastic)
        print_killed(elastic)
        print_memory(job, options.processes)
    print_planning()
    return 0 if is_equal else 1


class Jobs:
    """Starts one job after the other, each with a folder of its own for what it prints."""

    def __init__(self, folder: Path, devices_each: int):
        self.folder, self.devices_each, self._count = folder, devices_each, 0

    def start(self, settings: Mapping[str, Any], num_processes: int, directory: str | None = None) -> Job:
        """Starts processes that train with checkpoints in a directory; None takes a new one."""
        self._count += 1
        own = self.folder / f"job_{self._count}"
        settings = {**settings, "directory": str(self.folder / (directory or f"checkpoints_{self._count}"))}
        return Job(_WORKER, settings, num_processes=num_processes, devices_each=self.devices_each, folder=own)

    def run(self, settings: Mapping[str, Any], num_processes: int, directory: str | None = None) -> list[list[Any]]:
        """Runs processes to their end; returns the reports of each."""
        with self.start(settings, num_processes, directory) as job:
            job.finish(_TIMEOUT_S)
        return [job.reports(i) for i in range(num_processes)]

    def run_and_kill(self, settings: Mapping[str, Any], num_processes: int, directory: str, after: int) -> Killed:
        """Runs processes, kills the last one when it has made a step, and watches the others."""
        last = num_processes - 1
        with self.start(settings, num_processes, directory) as job:
            if not job.wait_for(lambda: after in losses_of(job.reports(last)), _TIMEOUT_S):
                raise RuntimeError(f"Step {after} was not reached in {_TIMEOUT_S} s: {job.reports(last)}")
            job.kill(last)
            began = time.perf_counter()
            job.wait_for(lambda: not job.running(), 120)
            noticed_s = time.perf_counter() - began
            exit_notices = []
            for i in range(last):
                texts = [r["text"] for r in job.reports(i) if r["event"] == "error"]
                status = job.processes[i].poll()
                exit_notices.append(
                    texts[0] if texts else "still running" if status is None else f"ended with {status}"
                )
        return Killed(job.reports(0), noticed_s, exit_notices)


def interrupt(jobs: Jobs, settings: Mapping[str, Any], num_processes: int, kill_after: int) -> Elastic:
    """Trains, kills a process, goes on with one process less for a while, and then with all until the end."""
    directory = "interrupted"
    killed = jobs.run_and_kill(settings, num_processes, directory, kill_after)
    losses = losses_of(killed.reports)
    made = max(losses) + 1
    middle = (made + settings["until"]) // 2
    fewer = jobs.run({**settings, "until": middle}, num_processes - 1, directory)[0]
    more = jobs.run(settings, num_processes, directory)[0]
    num_lost = made - planned(fewer)["num_steps"]
    return Elastic(
        {**losses, **losses_of(fewer), **losses_of(more)}, num_lost, killed,
        [(num_processes - 1, fewer), (num_processes, more)],
    )  # fmt: skip


def losses_of(reports: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Returns the loss of each step that was reported."""
    return {report["number"]: report["loss"] for report in reports if report["event"] == "step"}


def planned(reports: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Returns the report of planning."""
    return next(report for report in reports if report["event"] == "planned")


def restored(reports: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Returns the report of restoring."""
    return next(report for report in reports if report["event"] == "restored")


def print_losses(expected: Mapping[int, float], elastic: Elastic) -> bool:
    """Prints both losses of each step; returns whether all are equal to rounding."""
    runs: dict[int, list[str]] = {}
    for number in losses_of(elastic.killed.reports):
        runs.setdefault(number, []).append("before")
    for count, reports in elastic.jobs:
        for number in losses_of(reports):
            runs.setdefault(number, []).append(f"{count} processes")
    rows, is_equal = [], True
    for number, loss in expected.items():
        own = elastic.losses[number]
        difference = abs(own - loss) / abs(loss)
        is_equal = is_equal and difference <= MOST_DIFFERENCE
        rows.append([number, f"{loss:.6f}", f"{own:.6f}", f"{difference:.1e}", ", then ".join(runs[number])])
    print_table("Loss of each step", ["step", "uninterrupted", "elastic", "difference", "made by"], rows)
    return is_equal


def print_killed(elastic: Elastic) -> None:
    """Prints what the death of a process did, and what going on took."""
    print(f"Steps lost: {elastic.num_lost}. All others had ended {elastic.killed.noticed_s:.1f} s after the kill:")
    for number, notice in enumerate(elastic.killed.exit_notices):
        print(f"  process {number}: {notice}")
    rows = [
        [count, planned(r)["num_steps"], f"{planned(r)['seconds']:.1f}", f"{restored(r)['seconds']:.2f}"]
        for count, r in elastic.jobs
    ]
    print_table("Going on", ["processes", "from step", "planning s", "restoring s"], rows)


def print_memory(jobs: Jobs, num_processes: int) -> None:
    """Prints what each process reads and holds while it restores a state of hundreds of MiB."""
    settings = {"sizes": None, "until": 1, "save_interval_steps": 1}
    jobs.run(settings, num_processes, "wide")
    rows = []
    for count in (num_processes, num_processes - 1):
        reports = jobs.run({**settings, "until": 1}, count, "wide")
        for number, own in enumerate(map(restored, reports)):
            sizes = [f"{own[name] / 2**20:.0f}" for name in ("total_bytes", "local_bytes", "read_bytes", "grown_bytes")]
            rows.append([f"{number} of {count}", *sizes, f"{own['seconds']:.2f}"])
    print_table(
        "Restoring a large state, MiB", ["process", "state", "own part", "read", "memory grown by", "seconds"], rows
    )


def print_planning() -> None:
    """Prints how long searches take, and what they find, with and without the plan of another mesh."""
    models = [
        gpt.make(batch=24, layers=12, width=768, heads=12, key_value_heads=12, vocabulary=3072, sequence=512),
        gpt.make(
            batch=24, stack=gpt.scanned, layers=24, width=1536, heads=24, key_value_heads=24, vocabulary=3072,
            sequence=512,
        ),
    ]  # fmt: skip
    rows = []
    for model in models:
        first, _ = _search(model, (4, 2))
        changes = [((4, 2), "h100", "nothing"), ((3, 2), "h100", "6 devices"), ((6, 2), "h100", "12 devices")]
        for shape, hardware, change in [*changes, ((4, 2), "a100", "slower devices")]:
            cold, cold_s = _search(model, shape, hardware=hardware)
            warm, warm_s = _search(model, shape, hardware=hardware, start=first)
            times = f"{cold_s:.1f}", f"{warm_s:.1f}", f"{1e3 * cold.step_s:.3f}", f"{1e3 * warm.step_s:.3f}"
            rows.append([model.name, change, *times, warm.status])
    columns = ["model", "change", "cold CPU s", "warm CPU s", "cold step ms", "warm step ms", "warm search"]
    print_table("Planning again without and with the old plan, which is for 4x2 H100s", columns, rows)


def _search(model: Model, shape: tuple[int, int], **options: Any) -> tuple[diffshard.Plan, float]:
    """Returns a plan and the seconds of processor time that finding it took."""
    mesh = AbstractMesh(shape, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    began = time.process_time()
    step = diffshard.search(model.step, mesh, **{"hardware": "h100", "progress": "none", **options})
    return step.plan(*abstract_arguments(model)), time.process_time() - began


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--devices", type=int, default=2, help="of each process")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--kill-after", type=int, default=7, help="the step after which a process is killed")
    parser.add_argument("--interval", type=int, default=3, help="steps from one checkpoint to the next")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())

"""Steps compiled for a target in processes of their own, so that a crash or a hang of a compiler loses one step only.

A step travels as `jax.export` writes it. The process compiles it between the same shardings and with the same donated
arguments, and returns the program's text and its memory; nothing is run.

`python -m diffshard.checks.compilation FOLDER` is that process. The folder has `job.pickle`, a `Job`; the process
writes `program.hlo`, the compiled text, and then `memory.json`. The parent reads what XLA says on stderr.
"""

import contextlib
import json
import math
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from jax import export

from diffshard.checks.hlo import MemoryPlan, memory_plan
from diffshard.checks.targets import Target
from diffshard.child_processes import python_command, python_environment

JOB, HLO, MEMORY, STDERR = "job.pickle", "program.hlo", "memory.json", "stderr"


@dataclass(frozen=True)
class Job:
    """A step that a process compiles.

    Attributes:
      step: a step of flat arguments as `jax.export` writes it.
      donate_argnums: positions of arguments whose memory may be used for results.
      mesh_axes: devices along each axis of the mesh.
    """

    step: bytes
    donate_argnums: tuple[int, ...]
    mesh_axes: dict[str, int]
    target: Target
    compiler_options: dict[str, Any] = field(default_factory=dict)


def compile_job(job: Job, folder: Path) -> None:
    """Compiles a job and writes the results into a folder."""
    mesh = job.target.mesh(job.mesh_axes)
    step = export.deserialize(bytearray(job.step))
    run = jax.jit(
        lambda *arrays: step.call(*arrays),
        in_shardings=tuple(step.in_shardings_jax(mesh)),
        out_shardings=list(step.out_shardings_jax(mesh)),
        donate_argnums=job.donate_argnums or None,
        compiler_options=job.compiler_options,
    )
    compiled = run.lower(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in step.in_avals)).compile()
    (folder / HLO).write_text(compiled.as_text() or "", encoding="utf-8")
    memory = memory_plan(compiled)
    (folder / MEMORY).write_text(json.dumps(memory and memory._asdict()), encoding="utf-8")


def main(arguments: Sequence[str]) -> None:
    """Compiles the job in the folder that the only argument names."""
    folder = Path(arguments[0])
    compile_job(pickle.loads((folder / JOB).read_bytes()), folder)


_POLL_S = 0.05
_LAST_CHARACTERS = 400  # of what a failed process said: its last lines name the cause
_INVOLUNTARY = "Involuntary full rematerialization"


@dataclass(frozen=True)
class CompiledStep:
    """A step as XLA compiled it, for one device.

    Attributes:
      memory: XLA's plan of memory; None where the backend has none.
      num_involuntary: arrays that XLA's partitioner replicated because it found no way between two shardings.
      compile_s: seconds that the process took.
    """

    hlo: str
    memory: MemoryPlan | None
    num_involuntary: int
    compile_s: float

    @property
    def peak_bytes(self) -> float | None:
        """The peak of XLA's plan of memory; None where the backend has none."""
        return None if self.memory is None else self.memory.peak


def compile_steps(jobs: Mapping[str, Job], *, timeout_s: float) -> dict[str, CompiledStep | str]:
    """Compiles jobs in processes of their own: as many at a time as there are processors, four at most.

    Args:
      timeout_s: seconds after which a process is ended.

    Returns:
      For each name the compiled step, or a sentence that says why there is none.
    """
    num_processes = max(1, min(4, os.cpu_count() or 1))
    results: dict[str, CompiledStep | str] = {}
    with contextlib.ExitStack() as folders:
        names_left, processes = list(jobs), {}
        try:
            while names_left or processes:
                while names_left and len(processes) < num_processes:
                    name = names_left.pop(0)
                    folder = folders.enter_context(tempfile.TemporaryDirectory(prefix="diffshard-"))
                    processes[name] = _Process(jobs[name], Path(folder), timeout_s)
                for name in [name for name, process in processes.items() if process.has_ended()]:
                    results[name] = processes.pop(name).result()
                time.sleep(_POLL_S)
        finally:
            for process in processes.values():
                process.end()
    return {name: results[name] for name in jobs}


class _Process:
    """A running compilation."""

    def __init__(self, job: Job, folder: Path, timeout_s: float) -> None:
        self.folder, self.timeout_s, self.start_s = folder, timeout_s, time.perf_counter()
        (folder / JOB).write_bytes(pickle.dumps(job))
        environment = {
            **python_environment(),
            **job.target.environment(math.prod(job.mesh_axes.values())),
            "TF_CPP_MIN_LOG_LEVEL": "1",  # warnings, which say where the partitioner gave up
        }
        if cache := jax.config.values.get("jax_compilation_cache_dir"):
            environment["JAX_COMPILATION_CACHE_DIR"] = str(cache)
        with (folder / STDERR).open("wb") as stderr:
            self.process = subprocess.Popen(
                python_command("-m", "diffshard.checks.compilation", str(folder)),
                env=environment, stdout=subprocess.DEVNULL, stderr=stderr, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        self.is_late = False

    def has_ended(self) -> bool:
        """Returns whether the process is over; ends it when its time is up."""
        if self.process.poll() is None and time.perf_counter() - self.start_s > self.timeout_s:
            self.is_late = True
            self.end()
        return self.process.poll() is not None

    def end(self) -> None:
        """Kills the process and waits for it."""
        self.process.kill()
        self.process.wait()

    def result(self) -> CompiledStep | str:
        """Returns the step that an ended process has compiled, or a sentence that says why there is none."""
        output = (self.folder / STDERR).read_text(encoding="utf-8", errors="replace")
        if self.is_late:
            return f"The compiler was stopped after {self.timeout_s:g} s."
        if self.process.returncode < 0:
            return f"The compiler crashed with signal {-self.process.returncode}: {_last_line(output)}"
        if self.process.returncode:
            return f"The compiler failed: {_last_line(output)}"
        hlo = (self.folder / HLO).read_text(encoding="utf-8")
        sizes = json.loads((self.folder / MEMORY).read_text(encoding="utf-8"))
        memory = None if sizes is None else MemoryPlan(**sizes)
        return CompiledStep(hlo, memory, output.count(_INVOLUNTARY), time.perf_counter() - self.start_s)


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.strip().splitlines() if line.strip()]
    return (lines[-1] if lines else "it said nothing")[-_LAST_CHARACTERS:]


if __name__ == "__main__":
    main(sys.argv[1:])

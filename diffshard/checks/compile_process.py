"""The process that compiles one exported step for a target: `python -m diffshard.checks.compile_process FOLDER`.

It is a process of its own because XLA's compilers may crash or hang. The folder has `job.pickle`, a `Job`; the process
writes `program.hlo`, the compiled program's text, and then `memory.json`. The parent reads what XLA says on stderr.
"""

import json
import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from jax import export

from diffshard.checks.memory_plan import memory_plan
from diffshard.checks.targets import Target

JOB, HLO, MEMORY = "job.pickle", "program.hlo", "memory.json"


@dataclass(frozen=True)
class Job:
    """What a process compiles.

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


if __name__ == "__main__":
    main(sys.argv[1:])

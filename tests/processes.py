"""Runs a program in several processes that are one job of `jax.distributed`, on this machine."""

import os
import socket
import time
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

from tests.forked_programs import start_program

ROOT = Path(__file__).resolve().parents[1]
GRACE_S = 20.0
"""Seconds that the other processes get after one has failed: those that notice it end by themselves."""
_START = """
import os

import jax

jax.config.update("jax_num_cpu_devices", int(os.environ["DEVICES_EACH"]))
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(
    coordinator_address=os.environ["COORDINATOR"],
    num_processes=int(os.environ["NUM_PROCESSES"]),
    process_id=int(os.environ["PROCESS"]),
)
process = jax.process_index()
"""
"""What runs before the program in every process."""


class Output(NamedTuple):
    """What a process wrote, and its exit status, which is negative if it was killed."""

    status: int
    stdout: str
    stderr: str


def run_processes(
    script: str,
    num_processes: int,
    folder: Path,
    *,
    devices_each: int = 4,
    timeout_s: float = 120.0,
    check: bool = True,
    environment: Mapping[str, str] | None = None,
) -> list[Output]:
    """Runs a program in every process of a job, and returns what each wrote.

    >>> outputs = run_processes("print(process, jax.device_count())", 2, tmp_path)

    Args:
      script: Python, after `jax.distributed.initialize`; has `jax`, `os` and the number of its process as `process`.
      num_processes: processes of the job.
      folder: an empty folder, where the program and what it writes are kept; it runs there.
      devices_each: CPU devices of each process.
      timeout_s: seconds after which all are killed.
      check: whether all have to end well.
      environment: further environment variables.

    Raises:
      AssertionError: a process failed (with `check`), or did not end in time; has the end of each one's stderr.
    """
    program = folder / "program.py"
    program.write_text(_START + script, encoding="utf-8")
    own = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": _without_device_count(os.environ.get("XLA_FLAGS", "")),
        "JAX_PLATFORMS": "cpu",
        "COORDINATOR": f"localhost:{_free_port()}",
        "NUM_PROCESSES": str(num_processes),
        "DEVICES_EACH": str(devices_each),
        **(environment or {}),
    }
    files = [(folder / f"{i}.out", folder / f"{i}.err") for i in range(num_processes)]
    processes: list[BaseProcess] = []
    try:
        for i, (out, err) in enumerate(files):
            environment_of = {**own, "PROCESS": str(i)}
            processes.append(
                start_program(program, folder=folder, environment=environment_of, stdout=out, stderr=err, number=i)
            )
        is_in_time = _wait(processes, timeout_s, is_patient=not check)
    finally:
        for process in processes:
            process.kill()
            process.join()
    outputs = [
        Output(process.exitcode or 0, _text(out), _text(err))
        for process, (out, err) in zip(processes, files, strict=True)
    ]
    assert is_in_time, f"The processes did not end in {timeout_s} s.\n{_errors(outputs)}"
    assert not check or all(output.status == 0 for output in outputs), _errors(outputs)
    return outputs


def _wait(processes: Sequence[BaseProcess], timeout_s: float, *, is_patient: bool) -> bool:
    """Waits until all have ended, or one has failed and the others had time to notice; False where time is over."""
    end = time.monotonic() + timeout_s
    has_failed = False
    while any(process.exitcode is None for process in processes):
        if time.monotonic() > end:
            return has_failed
        if not (is_patient or has_failed) and any(process.exitcode for process in processes):
            has_failed, end = True, min(end, time.monotonic() + GRACE_S)
        time.sleep(0.05)
    return True


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def _without_device_count(flags: str) -> str:
    """Returns XLA's flags without the number of host devices, which the program sets itself."""
    return " ".join(flag for flag in flags.split() if not flag.startswith("--xla_force_host_platform_device_count"))


def _text(file: Path) -> str:
    """Returns the text that a process wrote; "" where it ended before it opened the file."""
    return file.read_text(encoding="utf-8") if file.exists() else ""


def _errors(outputs: Sequence[Output]) -> str:
    return "\n".join(
        f"--- process {i}, status {output.status} ---\n{output.stdout[-2000:]}\n{output.stderr[-4000:]}"
        for i, output in enumerate(outputs)
    )

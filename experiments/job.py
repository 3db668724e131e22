"""Several processes on this machine that are one job of `jax.distributed`, each with a few CPU devices."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

_POLL_S = 0.02
_DEVICE_COUNT = "--xla_force_host_platform_device_count"


class Job:
    """Processes that run one module; they print one JSON value a line, and are killed when the context ends.

    Args:
      module: what `python -m` runs; it calls `join`, and reads the values with which it is run from `settings`.
      settings: JSON values.
      num_processes: processes of the job.
      devices_each: CPU devices of each.
      folder: for what the processes print.
    """

    def __init__(
        self, module: str, settings: Mapping[str, Any], *, num_processes: int, devices_each: int, folder: Path
    ):
        folder.mkdir(parents=True)
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": " ".join(f for f in os.environ.get("XLA_FLAGS", "").split() if _DEVICE_COUNT not in f),
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).resolve().parents[1]), *sys.path]),
            "JOB": json.dumps([f"localhost:{_free_port()}", num_processes, devices_each, settings]),
        }
        self._outputs = [folder / f"{i}.jsonl" for i in range(num_processes)]
        self._errors = [folder / f"{i}.err" for i in range(num_processes)]
        self.processes = []
        for i in range(num_processes):
            with self._outputs[i].open("w") as output, self._errors[i].open("w") as errors:
                command = [sys.executable, "-m", module]
                own = {**environment, "PROCESS": str(i)}
                self.processes.append(subprocess.Popen(command, env=own, stdout=output, stderr=errors))

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def reports(self, process: int) -> list[dict[str, Any]]:
        """Returns the reports that a process has printed."""
        lines = self._outputs[process].read_text().split("\n")[:-1]  # the last one may not be whole yet
        return [json.loads(line) for line in lines if line.startswith("{")]

    def wait_for(self, is_reached: Callable[[], bool], timeout_s: float) -> bool:
        """Waits until something is true or the time is over; returns whether it is true."""
        end = time.monotonic() + timeout_s
        while not (reached := is_reached()) and time.monotonic() < end:
            time.sleep(_POLL_S)
        return reached

    def finish(self, timeout_s: float) -> None:
        """Waits until all processes have ended.

        Raises:
          RuntimeError: one failed, or the time is over; has the end of its standard error.
        """
        self.wait_for(lambda: any(p.poll() for p in self.processes) or not self.running(), timeout_s)
        for number, process in enumerate(self.processes):
            if process.poll() != 0:
                errors = self._errors[number].read_text()[-3000:]
                raise RuntimeError(f"Process {number} ended with {process.poll()}: {errors}")

    def running(self) -> list[int]:
        """Returns the numbers of the processes that run."""
        return [i for i, process in enumerate(self.processes) if process.poll() is None]

    def kill(self, process: int) -> None:
        """Ends a process with SIGKILL, which it cannot notice."""
        self.processes[process].send_signal(signal.SIGKILL)
        self.processes[process].wait()


def join() -> tuple[Any, int, int]:
    """Joins the job of which this process is one; returns its settings, the processes and the devices of each."""
    import jax

    coordinator, num_processes, devices_each, settings = json.loads(os.environ["JOB"])
    jax.config.update("jax_num_cpu_devices", devices_each)
    if num_processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(coordinator, num_processes, int(os.environ["PROCESS"]), heartbeat_timeout_seconds=10)
    return settings, num_processes, devices_each


def report(**values: Any) -> None:
    """Prints values for `Job.reports`."""
    print(json.dumps(values), flush=True)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]

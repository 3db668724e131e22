"""HiGHS in a process of its own as an iterator of answers, which can be left at any moment."""

import contextlib
import math
import pickle
import queue
import subprocess
import threading
from collections.abc import Generator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from diffshard.child_processes import python_command, python_environment
from diffshard.solving.solvers._programme import Programme

POLL_INTERVAL_S = 0.05
"""Seconds between two looks at HiGHS's answers; chosen by hand."""
Answer = tuple[np.ndarray | None, float]


class HighsProcess:
    """A process that solves one programme after the other; it starts at once, while programmes are built."""

    def __init__(self):
        command = python_command(str(Path(__file__).with_name("_highs.py")))
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=python_environment())
        self._told: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        for thread in self._threads:
            thread.join()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        self._process.wait()

    def answers(self, programme: Programme, options: dict[str, Any]) -> Generator[Answer]:
        """Yields HiGHS's answers, values and a bound, until it ends; (None, -inf) while there is none."""
        rows = programme.rows.indptr, programme.rows.indices, programme.rows.data
        message = programme._asdict() | {"rows": rows, "options": options}
        thread = threading.Thread(target=self._talk, args=(message,))
        self._threads.append(thread)
        thread.start()
        while True:
            try:
                answer = self._told.get(timeout=POLL_INTERVAL_S)
            except queue.Empty:
                yield None, -math.inf
                continue
            if answer is None:
                break
            yield answer
        thread.join()
        if code := self._process.poll():
            raise RuntimeError(f"HiGHS ended with exit code {code}; take 'gradient', or a smaller problem.")

    def _talk(self, message: dict[str, Any]) -> None:
        """Sends a programme, and puts the answers into the queue; the last one is None."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            pickle.dump(message, stdin)
            stdin.flush()
            while (answer := pickle.load(stdout)) is not None:
                self._told.put(answer)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=1.0)  # so that its exit code is there
        self._told.put(None)

"""How a search goes, as text and as a live line on a terminal.

The line appears once a search has lasted two seconds, and is gone when it ends. Nothing is written where a line cannot
be taken back: to files, in notebooks, on continuous integration.
"""

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, TextIO

from rich.console import Console
from rich.status import Status

from diffshard.plans.printing import format_s

ProgressDisplay = Literal["terminal", "none"]
"""Where a search shows how it goes, unless it is given a `Progress` function: on a terminal, or nowhere."""
DELAY_S = 2.0
"""Seconds that a search may last before it shows anything: a shorter one would only flicker."""


def state_text(seconds: float, cost: float, lower_bound: float, format_cost: Callable[[float], str]) -> str:
    """Writes how far a search is: `3.1 s, best 526 ms, lower bound 520 ms, gap 1.14%`.

    Args:
      cost: of the best choice; inf where none is feasible yet.
    """
    best = f"best {format_cost(cost)}" if math.isfinite(cost) else "nothing feasible yet"
    bound = f", lower bound {format_cost(lower_bound)}" if math.isfinite(lower_bound) else ""
    gap = f", gap {(cost - lower_bound) / abs(cost):.2%}" if bound and math.isfinite(cost) and cost else ""
    return f"{seconds:.1f} s, {best}{bound}{gap}"


class LiveLine:
    """The line of a search on the terminal: `step` says what it does, `progress` how far its solver is.

    Args:
      what: what is being done, such as "searching step".
      status: the line on the terminal; None shows nothing.
      format_cost: writes a cost with its unit.
    """

    def __init__(self, what: str, status: Status | None, format_cost: Callable[[float], str] = format_s):
        self._what, self._status, self._format_cost = what, status, format_cost
        self._start = time.perf_counter()

    def step(self, name: str) -> None:
        """Shows what the search does next, such as "tracing"."""
        if self._status is not None:
            self._status.update(f"{self._what}: {name}")

    def progress(self, seconds: float, cost: float, lower_bound: float) -> None:
        """Shows how far the solver is, as a `diffshard.base.Progress`; the line has the seconds of the whole search."""
        if self._status is not None:
            elapsed_s = time.perf_counter() - self._start
            self._status.update(f"{self._what}: {state_text(elapsed_s, cost, lower_bound, self._format_cost)}")


@contextmanager
def live_line(
    what: str, display: ProgressDisplay, *, stream: TextIO | None = None, delay_s: float = DELAY_S
) -> Iterator[LiveLine]:
    """Gives a line that appears on a terminal after a delay, and takes it away at the end.

    Args:
      what: what is being done, such as "searching step".
      stream: where it is shown; None is stderr.
      delay_s: seconds until it appears.
    """
    out = sys.stderr if stream is None else stream
    console = Console(file=out)
    if display == "none" or not _takes_live_lines(console, out):
        yield LiveLine(what, None)
        return
    status = Status(what, console=console)
    timer = threading.Timer(delay_s, status.start)
    timer.daemon = True
    timer.start()
    try:
        yield LiveLine(what, status)
    finally:
        timer.cancel()
        timer.join()  # it may be starting the line just now
        status.stop()


def _takes_live_lines(console: Console, stream: TextIO) -> bool:
    """Returns whether a line can be erased again; rich alone takes a file for a terminal where colours are forced."""
    return stream.isatty() and console.is_terminal and not console.is_dumb_terminal and not os.environ.get("CI")

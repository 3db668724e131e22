"""What the command tells on stderr: how a search goes, which files were written, what failed."""

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console

from diffshard.base import Progress
from diffshard.live_progress import state_text

_MIN_SECONDS_BETWEEN_LINES = 0.5  # plain lines go to logs, which hundreds of improvements would only fill


class FailedError(Exception):
    """Work that could not be done; the message says all that a user needs."""


@contextmanager
def writing(option: str, path: str) -> Iterator[None]:
    """Says that a file was written.

    Raises:
      FailedError: the file cannot be written; the message has its name and the reason.
    """
    try:
        yield
    except OSError as error:
        raise FailedError(f"{option} {path}: {error.strerror or error}") from None
    print(f"wrote {path}", file=sys.stderr)


@contextmanager
def show_progress(what: str, format_cost: Callable[[float], str], stream: TextIO | None = None) -> Iterator[Progress]:
    """Gives a `progress` function that shows the best cost and the bound, on a terminal in one live line.

    Args:
      what: what is being done, such as "searching step".
      format_cost: writes a cost with its unit.
      stream: where progress is shown; None is stderr.
    """
    out = sys.stderr if stream is None else stream
    if out.isatty():
        with Console(file=out).status(what) as status:

            def live(seconds: float, cost: float, lower_bound: float) -> None:
                status.update(f"{what}: {state_text(seconds, cost, lower_bound, format_cost)}")

            yield live
        return
    print(what, file=out, flush=True)
    last_s, last_line = -math.inf, ""

    def print_line(seconds: float, cost: float, lower_bound: float) -> None:
        nonlocal last_s, last_line
        last_line = f"  {state_text(seconds, cost, lower_bound, format_cost)}"
        if time.perf_counter() - last_s >= _MIN_SECONDS_BETWEEN_LINES:
            print(last_line, file=out, flush=True)
            last_s, last_line = time.perf_counter(), ""

    yield print_line
    if last_line:
        print(last_line, file=out, flush=True)

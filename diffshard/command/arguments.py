"""Words of the command line as values, and what the command tells on stderr.

Wrong words are refused before any work is done. Stderr says how a search goes, which files were written, what failed.
"""

import argparse
import importlib
import inspect
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from diffshard.base import Progress
from diffshard.comparison.checked_search import Check, checks_of
from diffshard.live_progress import LiveLine, state_text
from diffshard.solving.solve import solver_names

_UNITS = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {f"{prefix}b": size for prefix, size in _UNITS.items() if prefix not in ("", "b")}
_UNITS |= {f"{prefix}ib": 2 ** (10 * i) for i, prefix in enumerate("kmgt", start=1)}


_MOST_UNITS = 4096
"""A size without a unit up to this is likely meant in some: no device has so few bytes."""


class UsageError(Exception):
    """A word of the command line that is wrong; the message says what it must be."""


def mesh_axes(text: str) -> dict[str, int]:
    """Reads the axes of a mesh in order, such as `data=2,model=4`."""
    axes: dict[str, int] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*([A-Za-z_]\w*)=(\d+)\s*", part)
        if not match or int(match.group(2)) < 1:
            raise argparse.ArgumentTypeError(f"{part!r} is not AXIS=N with a positive number, as in data=2,model=4")
        if match.group(1) in axes:
            raise argparse.ArgumentTypeError(f"the axis {match.group(1)!r} is there twice")
        axes[match.group(1)] = int(match.group(2))
    return axes


def num_bytes(text: str) -> float:
    """Reads a number of bytes, such as `80GiB`, `16GB` or `1000000`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([A-Za-z]*)\s*", text)
    if not match or match.group(2).lower() not in _UNITS or float(match.group(1)) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive size such as 80GiB, 16GB or 1000000")
    if not match.group(2) and float(match.group(1)) <= _MOST_UNITS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is that many bytes: did you mean {text.strip()}GiB? {text.strip()}B for bytes"
        )
    return float(match.group(1)) * _UNITS[match.group(2).lower()]


def positive_seconds(text: str) -> float:
    """Reads a positive, finite number of seconds."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return value


def arguments(text: str) -> tuple[int | str, ...]:
    """Reads positions and names of arguments, such as `0,2` or `0,config`."""
    if not re.fullmatch(r"(\d+|[A-Za-z_]\w*)(,(\d+|[A-Za-z_]\w*))*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of argument numbers or names such as 0 or 0,config")
    return tuple(int(part) if part.isdigit() else part for part in text.split(","))


def checks(text: str) -> tuple[Check, ...]:
    """Reads the names of checks, joined by commas: a compiler, numbers, or both."""
    names: Any = tuple(text.split(","))
    try:
        checks_of(names)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).replace("`check`", "it")) from None
    return names


def axis_rules(text: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Reads logical axis rules such as `embed=data,mlp=data+model,heads=`; an empty text has none."""
    rules = []
    for part in text.split(",") if text else ():
        match = re.fullmatch(r"\s*([^=\s]+)=((?:\w+(?:\+\w+)*)?)\s*", part)
        if not match:
            raise argparse.ArgumentTypeError(f"{part!r} is not NAME=AXIS[+AXIS...], as in embed=data,mlp=data+model")
        rules.append((match.group(1), tuple(match.group(2).split("+")) if match.group(2) else ()))
    return tuple(rules)


_OPTIONS = {
    "memory_limit_bytes": "--memory-limit", "in_shardings": "--in-shardings", "time_limit_s": "--time-limit",
    "logical_axis_rules": "--logical-axis-rules", "donate_argnums": "--donate", "donate_argnames": "--donate",
    "static_argnums": "--static", "static_argnames": "--static", "hardware": "--hardware", "mesh": "--mesh",
    "solver": "--solver", "key": "--seed", "executor": "--executor", "check": "--check", "target": "--target",
    "devices": "--devices", "remat": "--remat", "state": "--state", "pipeline": "--pipeline", "cache": "--cache",
}  # fmt: skip


def with_options(message: str) -> str:
    """Names the options of the command line in a message that names arguments of `diffshard.search`."""

    def option(match: re.Match[str]) -> str:
        if match[1] not in _OPTIONS:
            return match[0]
        return f"`{_OPTIONS[match[1]]}{f' {match[3]}' if match[3] else ''}`{match[2] or ''}"

    return re.sub(r"`(\w+)(?:(\[[^`]*\])|=\"?([\w.]+)\"?)?`", option, message)


def named_value(option: str, text: str) -> Any:
    """Imports the value that MODULE:NAME names; a function is called without arguments.

    Raises:
      UsageError: there is no such module or name, or the function needs arguments.
    """
    value = _imported(option, text)
    if not callable(value):
        return value
    check_needs_nothing(option, value)
    return value()


def check_needs_nothing(option: str, function: Callable[..., Any]) -> None:
    """Checks that a function can be called without arguments."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # built-in functions have no signature
        return
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if needed:
        raise UsageError(
            f"{option}: {getattr(function, '__name__', 'the function')} is called without arguments, but needs "
            f"{', '.join(needed)}"
        )


def named_function(option: str, text: str) -> Callable[..., Any]:
    """Imports the function that MODULE:FUNCTION names, from the working directory first, as `python -m` does."""
    value = _imported(option, text)
    if not callable(value):
        raise UsageError(f"{option}: {text} is {type(value).__name__}, not a function")
    return value


def _imported(option: str, text: str) -> Any:
    module_name, colon, path = text.partition(":")
    if not (module_name and colon and path):
        raise UsageError(f"{option} must be MODULE:FUNCTION, not {text!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        value: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # an import inside the user's module: its own traceback says more
        raise UsageError(f"{option}: there is no module {error.name!r} here or among those installed") from None
    for part in path.split("."):
        if not hasattr(value, part):
            raise UsageError(f"{option}: {module_name} has no {path!r}")
        value = getattr(value, part)
    return value


def check_writable(option: str, path: str | None) -> None:
    """Checks that a result can be written, before minutes are spent on it."""
    folder = os.path.dirname(os.path.abspath(path)) if path else None
    if folder and (not os.path.isdir(folder) or not os.access(folder, os.W_OK) or os.path.isdir(path or "")):
        raise UsageError(f"{option} {path}: not a file in a folder that can be written to")


def check_solver(name: str | None) -> None:
    """Checks the name of a solver; None is the default one."""
    if name is not None and name not in solver_names():
        raise UsageError(f"--solver must be one of {', '.join(solver_names())}, not {name!r}")


_MIN_SECONDS_BETWEEN_LINES = 0.5  # plain lines go to logs, which hundreds of improvements would only fill


class FailedError(Exception):
    """Work that could not be done; the message says all that a user needs."""


@contextmanager
def writing(option: str, path: str) -> Iterator[None]:
    """Says that a file was written."""
    try:
        yield
    except OSError as error:
        raise FailedError(f"{option} {path}: {error.strerror or error}") from None
    print(f"wrote {path}", file=sys.stderr)


@contextmanager
def show_progress(what: str, format_cost: Callable[[float], str]) -> Iterator[Progress]:
    """Gives a `progress` function that shows the best cost and the bound, on a terminal in one live line.

    The seconds shown are those since this call: a search of several problems reports the seconds of each. Where lines
    cannot be taken back, as in a log, only what changed is written.

    Args:
      what: what is being done, such as "searching step".
    """
    out, start = sys.stderr, time.perf_counter()
    if out.isatty():
        with Console(file=out).status(what) as status:
            yield LiveLine(what, status, format_cost).progress
        return
    print(what, file=out, flush=True)
    last_s, last_line, last_state = -math.inf, "", None

    def print_line(_: float, cost: float, lower_bound: float) -> None:
        nonlocal last_s, last_line, last_state
        now = time.perf_counter()
        if (cost, lower_bound) != last_state:
            last_line, last_state = f"  {state_text(now - start, cost, lower_bound, format_cost)}", (cost, lower_bound)
        if last_line and now - last_s >= _MIN_SECONDS_BETWEEN_LINES:
            print(last_line, file=out, flush=True)
            last_s, last_line = now, ""

    yield print_line
    if last_line:
        print(last_line, file=out, flush=True)

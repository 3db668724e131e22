"""Words of the command line as values; wrong ones are refused before any work is done."""

import argparse
import importlib
import math
import os
import re
import sys
from collections.abc import Callable
from typing import Any

from diffshard.solving.solve import solver_names

_UNITS = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {f"{prefix}b": size for prefix, size in _UNITS.items() if prefix not in ("", "b")}
_UNITS |= {f"{prefix}ib": 2 ** (10 * i) for i, prefix in enumerate("kmgt", start=1)}


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


def indices(text: str) -> tuple[int, ...]:
    """Reads positions of arguments, such as `0,2`."""
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of argument numbers such as 0 or 0,2")
    return tuple(int(part) for part in text.split(","))


def named_function(option: str, text: str) -> Callable[..., Any]:
    """Imports the function that MODULE:FUNCTION names, from the working directory first, as `python -m` does.

    Raises:
      UsageError: there is no such module or function, or it cannot be called.
    """
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
    if not callable(value):
        raise UsageError(f"{option}: {text} is {type(value).__name__}, not a function")
    return value


def check_writable(option: str, path: str | None) -> None:
    """Checks that a result can be written, before minutes are spent on it.

    Raises:
      UsageError: the path is not that of a file in a folder that can be written to.
    """
    folder = os.path.dirname(os.path.abspath(path)) if path else None
    if folder and (not os.path.isdir(folder) or not os.access(folder, os.W_OK) or os.path.isdir(path or "")):
        raise UsageError(f"{option} {path}: not a file in a folder that can be written to")


def check_solver(name: str | None) -> None:
    """Checks the name of a solver; None is the default one.

    Raises:
      UsageError: there is no such solver; says which there are.
    """
    if name is not None and name not in solver_names():
        raise UsageError(f"--solver must be one of {', '.join(solver_names())}, not {name!r}")

"""Where an equation comes from in the user's code, for notes that a user should be able to act on."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax.extend import core, source_info_util

_LIBRARIES = ("jax", "flax", "optax", "equinox", "haiku", "chex")  # what models are written with
_OWN_FOLDER = Path(__file__).resolve().parents[1]
_ENTRY = f"{_OWN_FOLDER / 'diffshard'}{os.sep}"
_INSIDE = (  # code of ours that runs between a line of the user and an operation
    f"{_OWN_FOLDER / 'search_spaces'}{os.sep}",
    f"{_OWN_FOLDER / 'cost'}{os.sep}",
    str(_OWN_FOLDER / "diffshard" / "sharding_search" / "module_scopes.py"),  # around each call of a module
)


def user_source(equation: core.JaxprEqn, callers: Sequence[core.JaxprEqn] = ()) -> str:
    """Returns file, line and function of the user's code that an equation comes from: `net.py:12 (Net.__call__)`.

    That is the innermost line outside the libraries that models are written with; where there is none, the innermost
    line outside JAX. JAX traces a function of a library once and keeps it, so that its equations may name no user, or
    another one: then those that call it are asked.
    """
    inside_out = (equation, *reversed(callers))
    lines = (_user_line(e) for e in inside_out)
    summaries = (source_info_util.summarize(e.source_info) for e in inside_out)
    return next(filter(None, (*lines, *summaries)), "")


def _user_line(equation: core.JaxprEqn) -> str:
    """Returns the innermost line outside the libraries, empty if there is none."""
    traceback: Any = equation.source_info.traceback
    folders = tuple(
        f"{os.path.dirname(module.__file__)}{os.sep}"
        for name in _LIBRARIES
        if (module := sys.modules.get(name)) is not None and module.__file__
    )
    for frame in traceback.frames if traceback is not None else ():
        if frame.file_name.startswith((*_INSIDE, *folders, "<")):
            continue
        if frame.file_name.startswith(_ENTRY):
            break  # further out is the call of the search, not of the function that it is about
        return f"{frame.file_name}:{frame.line_num} ({frame.function_name})"
    return ""


def function_source(fn: Any) -> str:
    """Returns file, line and name of a function's definition; its name alone where Python does not know them."""
    inner = fn
    while (deeper := getattr(inner, "__wrapped__", None) or getattr(inner, "func", None)) is not None:
        inner = deeper
    code = getattr(inner, "__code__", None) or getattr(vars(type(inner)).get("__call__"), "__code__", None)
    name = getattr(inner, "__name__", None) or type(inner).__name__
    return name if code is None else f"{code.co_filename}:{code.co_firstlineno} ({name})"

"""Errors that one process of a job tells the others, as JSON values: no bytes of another process are ever run as code.

An error comes back with its own type if that is one of Python's or of these packages; of others only the text does.
"""

import builtins
import json
import sys
from typing import Any

from diffshard.base import ProcessesError

_OWN_PACKAGES = ("cost", "diffshard", "search_spaces")


def packed_error(error: BaseException) -> dict[str, Any]:
    """Returns an error as JSON values."""
    kind = type(error)
    packed = {"text": f"{kind.__name__}: {error}"}
    if not isinstance(error, Exception):  # an interrupt is for one process
        return packed
    file = [error.filename] if isinstance(error, OSError) and error.filename is not None else []
    whole = {
        **packed,
        "module": kind.__module__,
        "name": kind.__qualname__,
        "arguments": [*error.args, *file],
        "fields": vars(error),
    }
    try:
        return json.loads(json.dumps(whole, allow_nan=False))
    except (TypeError, ValueError):  # it has something else than texts and numbers
        return packed


def error_of(packed: dict[str, Any], process: int) -> Exception:
    """Returns the error that another process has packed."""
    kind = _class_of(packed.get("module", ""), packed.get("name", ""))
    try:
        assert kind is not None
        error = kind(*packed["arguments"])
        vars(error).update(packed["fields"])
        error.add_note(f"This error is that of process {process}.")
    except Exception:
        return ProcessesError(f"Process {process} failed with {packed['text']}")
    return error


def _class_of(module: str, name: str) -> type[Exception] | None:
    """Returns the class of an error by its name; None if it is not one of those that are known here."""
    if module != builtins.__name__ and module.partition(".")[0] not in _OWN_PACKAGES:
        return None
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) and issubclass(found, Exception) else None

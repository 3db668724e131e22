"""What decoded choices mean, so that two can be compared: values by their arrays, functions by what they keep."""

import functools
import inspect
from typing import Any

import jax
import numpy as np


def parts_of(function: Any) -> Any:
    """What tells a function from others: its fields, what a closure keeps, what a partial or a method is bound to."""
    function = inspect.unwrap(function)  # under `jax.jit`
    if isinstance(function, functools.partial):
        return [parts_of(function.func), function.args, function.keywords]
    if not inspect.isfunction(function):
        return [
            getattr(function, "__dict__", {}),
            getattr(function, "__func__", None),
            getattr(function, "__self__", None),
        ]
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    kept = [parts_of(cell) if inspect.isfunction(cell) and cell is not function else cell for cell in cells]
    return [function.__code__, function.__defaults__, function.__kwdefaults__, kept]


def equal(first: Any, second: Any) -> bool:
    """Whether two meanings, as pytrees, have the same structure and equal leaves."""
    if jax.tree.structure(first) != jax.tree.structure(second):
        return False
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return all(a is b or np.array_equal(a, b) for a, b in pairs)

"""Numbers that users give: of Python, numpy or JAX, and no booleans."""

import operator
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def as_real(number: Any) -> float | None:
    """A real scalar as a float; None for anything else."""
    if isinstance(number, bool | np.bool):
        return None
    if isinstance(number, Real):
        return float(number)
    is_scalar = isinstance(number, np.generic | np.ndarray | jax.Array) and number.ndim == 0
    if is_scalar and any(jnp.issubdtype(number.dtype, kind) for kind in (jnp.floating, jnp.integer)):
        return float(number)
    return None


def as_whole(number: Any) -> int | None:
    """An integer scalar as an int; None for anything else."""
    if isinstance(number, bool | np.bool):
        return None
    try:
        return operator.index(number)
    except TypeError:
        return None

"""How a problem is solved: the same four options for each front end that makes one, stated and checked once.

A front end takes `**options: Unpack[SolveOptions]`, and hands them to `diffshard.solve` whole.
"""

from collections.abc import Mapping
from typing import Any, TypedDict

import jax

from cost.real_numbers import is_positive
from diffshard.base import Progress, Solver
from diffshard.solving.solve import check_key, resolve


class SolveOptions(TypedDict, total=False):
    """Options that front ends share with `diffshard.solve`; each may be left out.

    Attributes:
      solver: the name of a solver, or a function that follows `diffshard.solvers.Solver`; None takes the front end's.
      time_limit_s: wall-clock seconds for the solver; None lets it end by its own rule.
      key: a JAX random key or a seed; None is seed 0.
      progress: called as `progress(seconds, cost, lower_bound)` at each improvement.
    """

    solver: str | Solver | None
    time_limit_s: float | None
    key: jax.Array | int | None
    progress: Progress | None


def checked_solve_options(options: Mapping[str, Any]) -> SolveOptions:
    """Returns all four options, None for those that were left out; also where no solver will be asked."""
    names = SolveOptions.__annotations__
    if unknown := [name for name in options if name not in names]:
        raise TypeError(f"`{unknown[0]}` is no argument; those for the solver are {', '.join(names)}.")
    checked: Any = {name: options.get(name) for name in names}
    if checked["solver"] is not None:
        resolve(checked["solver"])
    check_key(checked["key"])
    if (limit := checked["time_limit_s"]) is not None and not is_positive(limit):
        raise ValueError(f"`time_limit_s` must be positive or None, got {limit!r}.")
    if (progress := checked["progress"]) is not None and not callable(progress):
        raise TypeError(f"`progress` must be a function of seconds, cost and bound, or None, not {progress!r}.")
    return checked

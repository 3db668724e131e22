"""What a reduction returns, and how reductions follow one another."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from cost.base import Problem


class Reduction(NamedTuple):
    """A smaller problem with the same optimum, less a constant.

    For every choice c of `problem`: cost of `expand(c)` in the original <= cost of c + `constant`, with the same memory
    excess or less; and the optima are equal. So lower bounds and choices both carry over.

    Attributes:
      problem: the smaller problem.
      constant: what every choice costs beyond its cost in `problem`.
      expand: from a choice of `problem` to one of the original, `[V']` to `[V]`.
    """

    problem: Problem
    constant: float
    expand: Callable[[np.ndarray], np.ndarray]


def unchanged(problem: Problem) -> Reduction:
    """The problem as it is."""
    return Reduction(problem, 0.0, lambda choice: choice)


def chain(first: Problem | Reduction, steps: tuple[Callable[[Problem], Reduction], ...]) -> Reduction:
    """One reduction after the other, as one; the first may have been made already."""
    done = unchanged(first) if isinstance(first, Problem) else first
    for step in steps:
        done = _after(done, step(done.problem))
    return done


def _after(first: Reduction, second: Reduction) -> Reduction:
    return Reduction(
        second.problem, first.constant + second.constant, lambda choice: first.expand(second.expand(choice))
    )

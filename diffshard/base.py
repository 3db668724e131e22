"""The vocabulary of the engine: what a solver is and gives, and the errors that users see."""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import jax
import numpy as np

from cost.base import Problem

Progress = Callable[[float, float, float], None]
"""Called as `progress(seconds, cost, lower_bound)` whenever either improves; `cost` is inf before a feasible choice."""

CLOSED = 1e-7
"""Relative gap from which on a choice counts as optimal, and a solver may stop."""


class Proposal(NamedTuple):
    """What a solver has found: a choice `[V]`, a lower bound on every feasible choice's cost, both, or neither."""

    choice: np.ndarray | None = None
    lower_bound: float = -math.inf


class Solver(Protocol):
    """The one method of a solver.

    Args:
      problem: valid and, unless `solve` was told otherwise, presolved: hardly any forbidden entries, no parallel edges.
      time_limit_s: seconds from now, by which the solver must have ended. The loop looks at the clock only between
        two yields: it stops whoever yields often and must wait for whoever does not. None means that the solver ends
        by its own rule, which must then be deterministic.
      key: a JAX random key; equal keys and no time limit give equal proposals.
    """

    def __call__(self, problem: Problem, *, time_limit_s: float | None, key: jax.Array) -> Iterator[Proposal]:
        """Yields whatever it finds, best last or not."""
        ...


class Solution(NamedTuple):
    """The best choice found, priced exactly on the problem as it was given.

    Attributes:
      choice: `[V]` strategy indices.
      cost: the exact cost of `choice`.
      lower_bound: no feasible choice costs less; -inf where the solver has no bound, inf where even the least usages
        exceed the limit.
      gap: (cost - lower_bound) / |cost|: how much cheaper the best possible choice can be at most; inf if not feasible.
      feasible: whether `choice` fits the memory and holds nothing forbidden.
      excess: by how much the memory limit is exceeded, 0 if it is not.
      history: (seconds, cost, lower_bound) at each improvement.
      status: "optimal" (the gap is at most `CLOSED`), "finished", "time limit", "interrupted", or "infeasible".
    """

    choice: np.ndarray
    cost: float
    lower_bound: float
    gap: float
    feasible: bool
    excess: float
    history: tuple[tuple[float, float, float], ...]
    status: str


class InfeasibleError(ValueError):
    """No choice keeps the memory limit, or every choice is forbidden."""


class PlanError(ValueError):
    """A plan does not fit what it is applied to, or its file cannot be read."""


def seeded(key: jax.Array) -> np.random.Generator:
    """A NumPy generator from a JAX key, for the ragged parts that are faster in NumPy."""
    return np.random.default_rng(np.asarray(jax.random.key_data(key)).ravel())

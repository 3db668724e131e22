"""The vocabulary of the engine: what a solver is and yields, what solving returns, and the errors that users see.

Letters for sizes: V nodes.

All parts of a search share its `Deadline`.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from cost.base import Problem
from cost.real_numbers import real_number
from search_spaces.base import Choice

Progress = Callable[[float, float, float], None]
"""A function that is called as `progress(seconds, cost, lower_bound)` whenever the cost or the bound improves.

Seconds are since the start; the cost is inf until there is a feasible choice.
"""

OPTIMAL_GAP = 1e-7
"""Relative gap up to which a choice counts as optimal and a solver may stop; well above the rounding of sums."""


class Proposal(NamedTuple):
    """A yield of a solver: a choice, a lower bound, both, or neither where it only lets the loop look at the clock.

    Attributes:
      choice: `[V]` strategy indices, feasible or not; None for no new one.
      lower_bound: no feasible choice costs less, up to the rounding of float64 sums, by which the loop lowers it; -inf
        for no bound, inf where there is no feasible choice.
    """

    choice: np.ndarray | None = None
    lower_bound: float = -math.inf


class Solver(Protocol):
    """A generator of proposals for a problem.

    The loop of `diffshard.solve` prices every proposed choice exactly and keeps the best, so that a solver need not.
    """

    def __call__(self, problem: Problem, *, time_limit_s: float | None, key: jax.Array) -> Iterator[Proposal]:
        """Yields proposals, in any order, for as long as the solver likes.

        Args:
          problem: valid and, unless `solve` was told otherwise, presolved: hardly any forbidden entries, no parallel
            edges.
          time_limit_s: seconds from now by which the solver should have ended. The loop looks at the clock only between
            two yields: it stops a solver that yields often and has to wait for one that does not. None means that the
            solver ends by its own rule, which must then be deterministic.
          key: a JAX random key; equal keys and no time limit give equal proposals.
        """
        ...


class Solution(NamedTuple):
    """The best choice that was proposed, priced exactly on the problem as it was given.

    Attributes:
      choice: `[V]` strategy indices, as search spaces take them.
      cost: the exact cost of `choice`.
      lower_bound: no feasible choice costs less; -inf where the solver has no bound, inf where it is proven that
        there is no feasible choice.
      gap: (cost - lower_bound) / |cost|: how much cheaper the best possible choice can be at most; inf if not feasible.
      feasible: whether `choice` fits the memory and holds nothing forbidden.
      excess: by how much the memory limit is exceeded, 0 if it is not.
      history: (seconds, cost, lower_bound) at each improvement, as `Progress` is called.
      status: "optimal" (the gap is at most `OPTIMAL_GAP`), "infeasible" (proven: there is no feasible choice),
        "finished" (the solver ended by its own rule, with a feasible choice or without), "time limit", or "interrupted"
        (by Ctrl-C).
    """

    choice: Choice
    cost: float
    lower_bound: float
    gap: float
    feasible: bool
    excess: float
    history: tuple[tuple[float, float, float], ...]
    status: str


class InfeasibleError(ValueError):
    """No choice keeps the memory limit, or every choice is forbidden.

    Args:
      text: says which limit, and what would do.

    Attributes:
      is_proven: whether there is no such choice, rather than none that was found.
    """

    def __init__(self, text: str = "", *, is_proven: bool = False):
        super().__init__(text)
        self.is_proven = is_proven


def printable(text: str) -> str:
    r"""Returns a text in which characters that a terminal obeys, rather than shows, are written as `\x1b`.

    Names in files may be anybody's. Ends of lines stay, and so do fixed spaces.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\u00a0" else c.encode("unicode_escape").decode() for c in text)


class FileError(ValueError):
    """An error whose text may have names from a file, and is safe to print all the same."""

    def __init__(self, text: str = ""):
        super().__init__(printable(text))


class PlanError(FileError):
    """A plan does not fit what it is applied to, or its file cannot be read."""


def checked_mesh(mesh: Any, axes: Mapping[str, int] | None = None, name: str = "mesh") -> Mesh | AbstractMesh:
    """Returns an argument that is a mesh of JAX, of devices or abstract.

    Args:
      axes: of a plan, which the mesh must have in the same order; None for any.
      name: of the argument.

    Raises:
      TypeError: it is no mesh.
      PlanError: it has other axes than the plan's.
    """
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f"`{name}` must be a jax.sharding.Mesh or an AbstractMesh, not {mesh!r}.")
    # Of axes in another order, parts over several axes would come out in another order than specs say.
    if axes is not None and list(mesh.shape.items()) != list(axes.items()):
        raise PlanError(f"`{name}` has the axes {dict(mesh.shape)}; the plan was made for {dict(axes)}.")
    return mesh


class NumbersError(RuntimeError):
    """A planned function computes other numbers than the same function run another way."""


class ProcessesError(RuntimeError):
    """The processes of a job ask for different things, or one of them failed or did not come."""


_LEAST_TIME_S = 1e-3
"""Seconds that a solver is given where those before it have used them all, so that its limit stays positive."""


class Deadline(NamedTuple):
    """When a search has to end.

    Attributes:
      limit_s: wall-clock seconds that it may take; None lets it end by its own rule.
    """

    limit_s: float | None
    begin_s: float

    @classmethod
    def from_now(cls, limit_s: Any) -> "Deadline":
        """Returns the deadline of a search that begins now; the limit is a positive number or None."""
        return cls(real_number(limit_s), time.perf_counter())

    @property
    def elapsed_s(self) -> float:
        """Seconds since the search began."""
        return time.perf_counter() - self.begin_s

    def remaining_s(self, share: float = 1.0) -> float | None:
        """Returns a share of the seconds that are left, a millisecond at least; None without a limit."""
        return None if self.limit_s is None else max(share * (self.limit_s - self.elapsed_s), _LEAST_TIME_S)

    def part(self, share: float) -> "Deadline":
        """Returns the deadline of a part that begins now and has a share of the seconds that are left."""
        return Deadline(self.remaining_s(share), time.perf_counter())

    def is_over(self, share: float = 1.0) -> bool:
        """Returns whether a share of the time limit has passed."""
        return self.limit_s is not None and self.elapsed_s >= share * self.limit_s - _LEAST_TIME_S

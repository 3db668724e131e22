"""The vocabulary of phases: what they share, how far they are, and what a climb and a phase are.

Letters for sizes: V nodes, T times, D devices.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax
import numpy as np

from cost.base import Problem
from diffshard.solving.dual.ascent import Ascent
from diffshard.solving.flat import Flat
from diffshard.solving.moves.polish import Polish

NO_BOUND = -math.inf
"""What a phase yields after a move that gives no lower bound."""


class Start(NamedTuple):
    """Where forest moves can begin.

    Attributes:
      choice: `[V]`.
      memory: `[T, D]` the prices of memory that go with it.
    """

    choice: np.ndarray
    memory: np.ndarray


class Clock:
    """How much of the time limit is over; without a limit, phases go by what they have done."""

    def __init__(self, time_limit_s: float | None):
        self._start, self.time_limit_s = time.perf_counter(), time_limit_s

    def elapsed_share(self) -> float:
        """Returns the share of the time limit that is over, 0 without a limit."""
        return 0.0 if self.time_limit_s is None else (time.perf_counter() - self._start) / self.time_limit_s

    def progress(self, num_planned: int, end_share: float, least_share: float = 0.0) -> Callable[[int], float]:
        """Returns a function from what is done to 0 at this moment and 1 at the end.

        Args:
          num_planned: what there is to do without a time limit.
          end_share: where the end is in the time limit.
          least_share: of the time limit, how far from this moment the end is where that end is past.
        """
        if self.time_limit_s is None:
            return lambda num_done: num_done / num_planned
        begin_share = self.elapsed_share()
        if begin_share >= end_share:
            end_share = begin_share + least_share
        return lambda num_done: (self.elapsed_share() - begin_share) / max(end_share - begin_share, 1e-9)


@dataclass
class Search:
    """One run of the search, mutable: phases change `polish`, which holds the choice under improvement.

    Attributes:
      polish: the choice under improvement, the best so far, and the random numbers.
      starts: choices read off the dual during the climb, the last and best first.
      bound: on the cost of every feasible choice, from the climb.
      key: a JAX random key for phases that run a solver of their own.
    """

    problem: Problem
    ascent: Ascent
    polish: Polish
    starts: tuple[Start, ...]
    bound: float
    clock: Clock
    key: jax.Array

    @property
    def flat(self) -> Flat:
        """The problem as flat arrays."""
        return self.polish.flat

    @property
    def cost_per_node(self) -> float:
        """The size of the bound per node: the unit of all temperatures."""
        return max(abs(self.bound), 1e-30) / len(self.flat.sizes)


class Climb(Protocol):
    """What raises the dual's bound before there is a choice."""

    def init(self, flat: Flat) -> Ascent:
        """Returns the dual before the first sweep."""
        ...

    def __call__(self, ascent: Ascent, clock: Clock) -> Iterator[Start]:
        """Climbs, and yields at least one start; the last one is of the climbed dual."""
        ...


class Phase(Protocol):
    """What improves the choice of a search."""

    def __call__(self, search: Search) -> Iterator[float]:
        """Improves `search.polish`, and yields a lower bound, or `NO_BOUND`, after each move.

        A phase yields often, since the search looks at the clock between two yields.
        """
        ...

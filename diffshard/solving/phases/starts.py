"""Tree moves from several starts read off the dual, the best of which goes on.

Tree moves come down to a local optimum near their start. Duals of slightly different problems, with noise on the
costs and other prices of memory, round to starts far enough from each other to reach different ones.

The ascent rounds the dual at several moments: the rounding of an early, hot dual and that of the last one are good
choices in different ways. One more start is the problem in which equal layers take equal strategies: single moves and
forests change one layer at a time and pay for the difference to its neighbours, and the quotient changes all of them at
once.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax
import numpy as np

from cost.base import Problem, is_forbidden
from diffshard.base import Solver
from diffshard.solving.csr import CSRProblem, first_least
from diffshard.solving.dual.ascent import Ascent, PriceStep, step_along_excess
from diffshard.solving.form import merge_classes, repeated_classes
from diffshard.solving.loop import run_solver
from diffshard.solving.moves.tree_moves import Polish

NO_BOUND = -math.inf
"""What a phase yields after a move that gives no lower bound."""


class Start(NamedTuple):
    """Where tree moves can begin.

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
      starts: choices read off the dual during the ascent, the last and best first.
      bound: on the cost of every feasible choice, from the ascent.
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
    def csr(self) -> CSRProblem:
        """The problem in compressed sparse rows."""
        return self.polish.csr

    @property
    def cost_per_node(self) -> float:
        """The size of the bound per node: the unit of all temperatures."""
        return max(abs(self.bound), 1e-30) / len(self.csr.sizes)


class AscentPhase(Protocol):
    """A phase that raises the dual's bound before there is a choice."""

    def init(self, csr: CSRProblem) -> Ascent:
        """Returns the dual before the first sweep."""
        ...

    def __call__(self, ascent: Ascent, clock: Clock) -> Iterator[Start]:
        """Raises the bound, and yields at least one start; the last one is of the dual after the last sweep."""
        ...


Phase = Callable[[Search], Iterator[float]]
"""What improves the choice of a search, `search.polish`: it yields a lower bound, or `NO_BOUND`, after each move. It
yields often, since the search looks at the clock between two yields."""


@dataclass(frozen=True)
class DualAscent:
    """An ascent that rounds the dual on its way; all numbers were chosen by hand on the contest's instances.

    Attributes:
      num_sweeps: without a time limit.
      end_share: of the time limit, when the ascent ends.
      first_start: how far the ascent is when the first start is read off.
      start_interval: how much further it is at each next one.
      stall_sweeps: where no memory can run out, the ascent ends when the bound rose by at most `stall_rise` in so many.
      stall_rise: as a share of the bound.
      least_sweeps: made however short the time is, as a dual at its first messages has no good choices, and before the
        ascent can stall.
      price_step: how prices answer to the relaxed choice.
    """

    num_sweeps: int = 400
    most_sweeps: int = 3000
    end_share: float = 0.3
    first_start: float = 0.4
    start_interval: float = 0.15
    stall_sweeps: int = 39
    stall_rise: float = 1e-5
    least_sweeps: int = 60
    price_step: PriceStep = step_along_excess

    def init(self, csr: CSRProblem) -> Ascent:
        """Returns the dual at zero messages and the first prices."""
        return Ascent(csr, price_step=self.price_step)

    def __call__(self, ascent: Ascent, clock: Clock) -> Iterator[Start]:
        """Raises the bound; yields starts on the way and one at the end."""
        bounds: list[float] = []
        next_start = self.first_start
        progress = clock.progress(self.num_sweeps, self.end_share)
        for i in itertools.count():
            # Whichever of the two ends the ascent, the temperature must have fallen by then.
            share = min(max(progress(i), i / self.most_sweeps), i / self.least_sweeps)
            if share >= 1:
                break
            ascent.step(share)
            bounds.append(ascent.bound)
            if not ascent.csr.base.size and self._stalls(bounds):
                break
            if share >= next_start:
                next_start += self.start_interval
                yield _read_off(ascent)
        yield _read_off(ascent)

    def _stalls(self, bounds: list[float]) -> bool:
        if len(bounds) <= self.least_sweeps:
            return False
        return bounds[-1] - bounds[-1 - self.stall_sweeps] <= self.stall_rise * abs(bounds[-1])


def _read_off(ascent: Ascent) -> Start:
    return Start(first_least(ascent.absorbed_cost, ascent.csr.sizes), ascent.prices.memory)


_SETTLING_RATE, _SETTLING_GROWTH = 0.1, 1.05
"""By what share prices rise in the first settling move, and how much faster in each next one; chosen by hand on
generated layers of 1,000 and 10,000 nodes."""
MOST_ASCENT_STARTS = 3
"""Starts of the ascent that are tried, the last ones; chosen by hand on the contest's instances."""


@dataclass(frozen=True)
class DualStarts:
    """Starts off the ascent, then off perturbed duals; all numbers were chosen by hand on the contest's instances.

    Attributes:
      num_starts: without a time limit.
      num_settling_moves: at most, after a start with no move that fits the memory, until one fits: prices then only
        rise. On a large problem some of many times is always exceeded at prices that fall again.
      end_share: of the time limit, when the phase ends.
      least_share: of the time limit, that the phase has where the ascent lasted beyond that end.
      most_noise: of a perturbed dual's costs, in the bound's cost per node.
    """

    num_starts: int = 8
    num_moves: int = 60
    num_settling_moves: int = 60
    end_share: float = 0.6
    least_share: float = 0.12
    num_sweeps: int = 80
    most_noise: float = 0.03

    def __call__(self, search: Search) -> Iterator[float]:
        """Tries start after start until the time or the number is reached; has no bound."""
        progress = search.clock.progress(self.num_starts, self.end_share, self.least_share)
        trial = 0
        while progress(trial) < 1:
            start = search.starts[trial] if trial < len(search.starts) else self._perturb(search)
            has_fitted = False
            for _ in moves_from(search, start, self.num_moves):
                has_fitted |= search.polish.fits
                yield NO_BOUND
                if progress(trial) >= 1:
                    return
            for _ in settling_moves(search, 0 if has_fitted else self.num_settling_moves):
                yield NO_BOUND
                if progress(trial) >= 1:
                    return
            trial += 1

    def _perturb(self, search: Search) -> Start:
        rng = search.polish.rng
        noise = self.most_noise * search.cost_per_node * rng.random() ** 3  # mostly little
        costs, memory = search.ascent.perturbed_costs(rng, self.num_sweeps, noise)
        return Start(first_least(costs, search.csr.sizes), memory)


def moves_from(search: Search, start: Start, num_moves: int) -> Iterator[float]:
    """Makes tree moves from a start; prices of memory answer half as much in the second half."""
    search.polish.begin(start.choice, start.memory)
    for i in range(num_moves):
        search.polish.anneal(0.0, 0.1 if i < num_moves // 2 else 0.05)
        yield NO_BOUND


def settling_moves(search: Search, num_moves: int) -> Iterator[float]:
    """Makes tree moves at prices that rise where the memory is exceeded and never fall, until the choice fits."""
    polish = search.polish
    for i in range(num_moves):
        is_exceeded = polish.offer(polish.choice)
        if not is_exceeded.any():
            return
        polish.reprice(is_exceeded, _SETTLING_RATE * _SETTLING_GROWTH**i, 0.0)
        polish.move(polish.pool.draw())
        yield NO_BOUND
    if num_moves:
        polish.offer(polish.choice)


@dataclass(frozen=True)
class QuotientStart:
    """Tree moves from the best choice that treats equal nodes alike.

    Attributes:
      solver: finds this choice on the quotient of the problem.
      time_share: of the time limit, for the quotient; chosen by hand on the contest's instances.
      num_moves: tree moves from the choice; chosen by hand on the same.
    """

    solver: Solver
    time_share: float = 0.1
    num_moves: int = 60

    def __call__(self, search: Search) -> Iterator[float]:
        """Solves the quotient and goes on from its choice; has no bound, since the quotient's says nothing here."""
        yield NO_BOUND  # the rounding may be the optimum already
        limit_s = search.clock.time_limit_s
        quotient_limit_s = None if limit_s is None else self.time_share * limit_s
        choice = best_equal_choice(search.problem, self.solver, search.key, quotient_limit_s)
        if choice is None:
            return
        search.polish.begin(choice, search.ascent.best[1].memory)
        for _ in range(self.num_moves):
            search.polish.anneal(0.0, 0.1)
            yield NO_BOUND


def best_equal_choice(
    problem: Problem, solver: Solver, key: jax.Array, time_limit_s: float | None
) -> np.ndarray | None:
    """Returns a choice `[V]` in which equal nodes take equal strategies, as good as the solver finds one.

    Args:
      key: a JAX random key.
      time_limit_s: seconds for the quotient; None lets the solver end by its own rule.

    Returns:
      The choice, which may exceed the memory: a start to be improved. None where few nodes are equal, or where the
      members of a class exclude each other's strategies.

    Raises:
      KeyboardInterrupt: Ctrl-C was pressed while the quotient was solved; it means to stop the whole search.
    """
    node_class = repeated_classes(problem)
    if node_class is None:
        return None
    solution = run_solver(merge_classes(problem, node_class), solver, time_limit_s=time_limit_s, key=key)
    if solution.status == "interrupted":
        raise KeyboardInterrupt
    return None if is_forbidden(np.asarray(solution.cost)) else np.asarray(solution.choice)[node_class]

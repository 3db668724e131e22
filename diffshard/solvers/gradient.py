"""The default: climbs the smoothed dual along its marginals, rounds, then improves by forest moves and neighbourhoods.

1. The dual: messages and prices, whose gradient are the softmax weights of the relaxed choice, while the temperature
   falls. Its value at temperature 0 is a lower bound.
2. Rounding: choices read off the dual at several moments, each polished by exact moves of random forests at prices
   that keep the memory; the best goes on, annealed.
3. Improvement: disjoint neighbourhoods are perturbed and polished at once, each accepted by itself. Where devices do
   different work, the largest load joins everything, and Metropolis walks take this part.

A problem of few choices is enumerated instead.
"""

import math
import time
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np

from cost.problem import Problem, num_strategies
from diffshard.ascent import Ascent
from diffshard.flat import Flat, flatten, with_ceiling
from diffshard.neighbourhoods import perturb, split
from diffshard.polish import Polish, rounded
from diffshard.replicas import Replicas
from diffshard.solve import Proposal, seeded
from diffshard.solvers import exhaustive

_FEW = 1 << 16  # choices
_CLOSED = 1e-7  # relative gap at which nothing is left to win
_STARTS = 4
_BALL = 50  # nodes
_WHOLE = 500  # nodes up to which the whole graph is one neighbourhood
_WALKS = 16
_TELL = 10  # moves
_MOVES = 8  # of a neighbourhood, each time


class Effort(NamedTuple):
    """How much to do: shares of the time limit or, without one, how often.

    Attributes:
      sweeps: at most, of the dual.
      trials: forest moves for each start.
      anneals: forest moves from the best start.
      rounds: perturbations of all neighbourhoods, at most.
      patience: rounds without improvement after which it ends.
      steps: of each Metropolis walk, for each node.
      shares: where in the time limit the sweeps, the trials and the annealing end.
    """

    sweeps: int = 400
    trials: int = 120
    anneals: int = 300
    rounds: int = 600
    patience: int = 60
    steps: int = 200
    shares: tuple[float, float, float] = (0.3, 0.5, 0.75)


_EFFORT = Effort()


def solve(
    problem: Problem, *, time_limit_s: float | None = None, key: jax.Array, effort: Effort = _EFFORT
) -> Iterator[Proposal]:
    """Yields the dual's bound and better and better choices until its effort or the time is spent or the gap closed."""
    if math.prod(num_strategies(problem).tolist()) <= _FEW:
        yield from exhaustive.solve(problem)
        return
    rng, flat = seeded(key), with_ceiling(flatten(problem))
    clock = _Clock(time_limit_s)
    ascent = Ascent(flat)
    starts: list[np.ndarray] = []
    for choice in _climb(ascent, clock, effort):
        starts.append(choice)
        yield Proposal(choice)
    bound = ascent.certified()
    yield Proposal(lower_bound=bound)
    search = None
    for polish in _try(flat, rng, ascent, starts, clock, effort):
        search = polish if search is None or _rank(polish) < _rank(search) else search
        yield Proposal(search.best)
    assert search is not None  # there is always a start
    improve = _walk if flat.load.shape[1] else _improve
    told = math.inf
    for i, better in enumerate(improve(search, clock, effort, max(abs(bound), 1e-30) / len(flat.sizes))):
        del better
        if i % _TELL == 0 and search.best_cost < told:  # telling costs about as much as a move
            told = search.best_cost
            yield Proposal(search.best)
        else:
            yield Proposal()
        if search.best_excess == 0 and search.best_cost - bound <= _CLOSED * abs(search.best_cost):
            break
    yield Proposal(search.best)


class _Clock:
    """How far a phase is: by time where there is a limit, else by count."""

    def __init__(self, time_limit_s: float | None):
        self._start, self._limit = time.perf_counter(), time_limit_s
        self._from = 0.0
        self.limited = time_limit_s is not None

    def used(self) -> float:
        return 0.0 if self._limit is None else (time.perf_counter() - self._start) / self._limit

    def begin(self) -> None:
        self._from = self.used()

    def progress(self, done: int, planned: int, share: float) -> float:
        """From 0 to 1 since `begin`, towards a share of the limit or a planned count."""
        if self._limit is None:
            return done / planned
        return (self.used() - self._from) / max(share - self._from, 1e-9)


def _climb(ascent: Ascent, clock: _Clock, effort: Effort) -> Iterator[np.ndarray]:
    """Sweeps until the bound stalls; yields roundings from the second half and the last."""
    limited = bool(ascent.flat.base.size)
    clock.begin()
    recent: list[float] = []
    for i in range(effort.sweeps):
        done = max(clock.progress(i, effort.sweeps, effort.shares[0]), i / effort.sweeps)
        if done >= 1:
            break
        ascent.step(done)
        recent.append(ascent.bound)
        stalled = i >= 60 and recent[-1] - recent[-40] <= 1e-5 * abs(recent[-1])
        if stalled and not limited:
            break
        if i % (effort.sweeps // (2 * _STARTS)) == effort.sweeps // (2 * _STARTS) - 1 and done > 0.4:
            yield rounded(ascent.flat, ascent.absorbed)
    yield rounded(ascent.flat, ascent.absorbed)


def _try(
    flat: Flat, rng: np.random.Generator, ascent: Ascent, starts: list[np.ndarray], clock: _Clock, effort: Effort
) -> Iterator[Polish]:
    clock.begin()
    starts = starts[-_STARTS:]
    for k, start in enumerate(reversed(starts)):
        polish = Polish(flat, rng, start, ascent.best[1], ascent.bound)
        for i in range(effort.trials):
            if clock.progress(k * effort.trials + i, len(starts) * effort.trials, effort.shares[1]) >= (k + 1) / len(
                starts
            ):
                break
            polish.anneal(0.0, 0.1)
        yield polish
        if clock.used() > effort.shares[1]:
            break


def _rank(polish: Polish) -> tuple[float, float]:
    return polish.best_excess, polish.best_cost


def _improve(search: Polish, clock: _Clock, effort: Effort, scale: float) -> Iterator[bool]:
    """Anneals, then perturbs neighbourhoods; yields whether the best became better."""
    flat, before = search.flat, _rank(search)
    clock.begin()
    search.choice = search.best.copy()
    done, i = 0.0, 0
    while (done := clock.progress(i, effort.anneals, effort.shares[2])) < 1:
        search.anneal(0.1 * scale * 0.01**done if done < 0.85 else 0.0, 0.1 ** (1 + done))
        yield _rank(search) < before
        before, i = _rank(search), i + 1
    clock.begin()
    i, last, partition = 0, 0, None
    while clock.progress(i, effort.rounds, 1.0) < 1 and (clock.limited or i - last < effort.patience):
        if partition is None or i % 6 == 0:
            size = _BALL * np.exp(0.7 * search.rng.normal())
            partition = split(flat, search.rng, 1 if len(flat.sizes) <= _WHOLE else round(len(flat.sizes) / size))
        perturb(search, partition, _MOVES, 0.1 * scale, 1.0 if len(flat.sizes) <= _WHOLE else 0.3)
        i += 1
        if _rank(search) < before:
            last = i
        yield last == i
        before = _rank(search)


def _walk(search: Polish, clock: _Clock, effort: Effort, scale: float) -> Iterator[bool]:
    """Metropolis walks, half of them from the best, half from random choices; yields whether the best became better."""
    flat, count = search.flat, len(search.flat.sizes)
    starts = search.rng.integers(flat.sizes, size=(_WALKS, count))
    starts[: _WALKS // 2] = search.best
    walks = Replicas(flat, search.rng, starts)
    clock.begin()
    done, step = 0.0, 0
    while done < 1:
        walks.step(scale * 0.0001**done)
        step += 1
        done = clock.progress(step, effort.steps * count, 1.0)
        if step % 100 == 0 or done >= 1:
            before = _rank(search)
            if walks.best is not None:
                search.offer(walks.best)
            yield _rank(search) < before

"""The default: climbs the smoothed dual along its marginals, rounds, then improves by forest moves and neighbourhoods.

1. The dual: messages and prices, whose gradient are the softmax weights of the relaxed choice, while the temperature
   falls. Its value at temperature 0 is a lower bound.
2. Rounding: choices read off the dual at several moments, each polished by exact moves of random forests at prices
   that keep the memory; the best goes on, annealed.
3. Improvement: disjoint neighbourhoods are perturbed and polished at once, each accepted by itself. Where devices do
   different work, the largest load joins everything, and Metropolis walks take this part.

A problem of few choices is enumerated instead.
"""

import itertools
import math
import time
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np

from cost.problem import Problem, num_strategies
from diffshard.engine.ascent import Ascent
from diffshard.engine.flat import flatten, with_ceiling
from diffshard.engine.neighbourhoods import perturb, split
from diffshard.engine.polish import Polish, rounded
from diffshard.engine.replicas import Replicas
from diffshard.solve import Proposal, seeded
from diffshard.solvers import exhaustive

_FEW = 1 << 16  # choices
_CLOSED = 1e-7  # relative gap at which nothing is left to win
_STARTS = 4
_MOST_SWEEPS = 3000
_SWEEPS = 80  # of a perturbed dual
_NOISE = 0.03  # of the bound for each node, at most
_BALL = 50  # nodes
_WHOLE = 500  # nodes up to which the whole graph is one neighbourhood
_WALKS = 16
_TELL = 10  # moves
_MOVES = 8  # of a neighbourhood, each time


class Effort(NamedTuple):
    """How much to do: shares of the time limit or, without one, how often.

    Attributes:
      sweeps: of the dual, at most.
      trials: starts, read off the dual at several moments and off perturbed duals.
      moves: forest moves from each start.
      anneals: forest moves from the best.
      rounds: perturbations of all neighbourhoods, at most.
      patience: rounds without improvement after which it ends.
      steps: of each Metropolis walk, for each node.
      shares: where in the time limit the sweeps, the trials and the annealing end.
    """

    sweeps: int = 400
    trials: int = 8
    moves: int = 60
    anneals: int = 300
    rounds: int = 600
    patience: int = 60
    steps: int = 200
    shares: tuple[float, float, float] = (0.3, 0.6, 0.75)


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
    starts: list[tuple[np.ndarray, np.ndarray]] = []
    for start in _climb(ascent, clock, effort):
        starts.append(start)
        yield Proposal(start[0])
    bound = ascent.certified()
    yield Proposal(lower_bound=bound)
    search = Polish(flat, rng, starts[-1][0], ascent.best[1], bound)
    scale = max(abs(bound), 1e-30) / len(flat.sizes)
    phases = [_try(search, ascent, starts[:-_STARTS:-1], clock, effort, scale)]
    phases += (
        [_walk(search, clock, effort, scale)] if flat.load.shape[1] else _improvements(search, clock, effort, scale)
    )
    told = math.inf
    for i, _ in enumerate(itertools.chain(*phases)):
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


def _climb(ascent: Ascent, clock: _Clock, effort: Effort) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Sweeps until the time or the bound stalls; yields roundings and their memory prices, and the last."""
    flat, recent, told = ascent.flat, [], 0.4
    clock.begin()
    for i in range(_MOST_SWEEPS if clock.limited else effort.sweeps):
        done = clock.progress(i, effort.sweeps, effort.shares[0])
        if done >= 1:
            break
        ascent.step(done)
        recent.append(ascent.bound)
        stalled = i >= 60 and recent[-1] - recent[-40] <= 1e-5 * abs(recent[-1])
        if stalled and not flat.base.size:
            break
        if done >= told:
            told += 0.6 / _STARTS
            yield rounded(flat, ascent.absorbed), ascent.prices.memory
    yield rounded(flat, ascent.absorbed), ascent.prices.memory


def _try(
    search: Polish,
    ascent: Ascent,
    starts: list[tuple[np.ndarray, np.ndarray]],
    clock: _Clock,
    effort: Effort,
    scale: float,
) -> Iterator[None]:
    """Forest moves from each start, and then from roundings of perturbed duals."""
    clock.begin()
    trial = 0
    while clock.progress(trial, effort.trials, effort.shares[1]) < 1:
        if trial < len(starts):
            choice, memory = starts[trial]
        else:
            noise = _NOISE * scale * search.rng.random() ** 3
            absorbed, memory = ascent.perturbed(search.rng, _SWEEPS, noise)
            choice = rounded(search.flat, absorbed)
        search.begin(choice, memory)
        for i in range(effort.moves):
            search.anneal(0.0, 0.1 if i < effort.moves // 2 else 0.05)
            yield
            if clock.used() > effort.shares[1]:
                return
        trial += 1


def _rank(polish: Polish) -> tuple[float, float]:
    return polish.best_excess, polish.best_cost


def _improvements(search: Polish, clock: _Clock, effort: Effort, scale: float) -> list[Iterator[None]]:
    return [_anneal(search, clock, effort, scale), _perturb(search, clock, effort, scale)]


def _anneal(search: Polish, clock: _Clock, effort: Effort, scale: float) -> Iterator[None]:
    """Forest moves with noise that dies away."""
    clock.begin()
    search.begin(search.best.copy(), search.best_memory)
    i = 0
    while (done := clock.progress(i, effort.anneals, effort.shares[2])) < 1:
        search.anneal(0.1 * scale * 0.01**done if done < 0.85 else 0.0, 0.1 ** (1 + done))
        yield
        i += 1


def _perturb(search: Polish, clock: _Clock, effort: Effort, scale: float) -> Iterator[None]:
    """Neighbourhoods, perturbed again and again."""
    flat, small = search.flat, len(search.flat.sizes) <= _WHOLE
    clock.begin()
    i, last, partition = 0, 0, None
    while clock.progress(i, effort.rounds, 1.0) < 1 and (clock.limited or i - last < effort.patience):
        if partition is None or i % 6 == 0:
            size = _BALL * np.exp(0.7 * search.rng.normal())
            partition = split(flat, search.rng, 1 if small else round(len(flat.sizes) / size))
        before = _rank(search)
        perturb(search, partition, _MOVES, 0.1 * scale, 1.0 if small else 0.3)
        i += 1
        if _rank(search) < before:
            last = i
        yield


def _walk(search: Polish, clock: _Clock, effort: Effort, scale: float) -> Iterator[None]:
    """Metropolis walks, half of them from the best, half from random choices."""
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
            if walks.best is not None:
                search.offer(walks.best)
            yield

"""The default: climbs the smoothed dual along its marginals, rounds, then improves by forest moves and neighbourhoods.

1. The dual: messages and prices, whose gradient are the softmax weights of the relaxed choice, while the temperature
   falls. Its value at temperature 0 is a lower bound.
2. Rounding: choices read off the dual at several moments, each polished by exact moves of random forests at prices
   that keep the memory; the best goes on, annealed.
   One more start is the problem in which equal layers take equal strategies, solved first.
3. Improvement: disjoint neighbourhoods are perturbed and polished at once, each accepted by itself. Metropolis walks
   under parallel tempering join in where the graph is small, and take this part where devices do different work: the
   largest load joins everything.
4. Branch and bound on the dual, for as long as improvement runs and beside it, where the graph is small: it closes what
   memory and loads leave between the choice and the bound, and its branches are new starts.

A problem of few choices is enumerated instead.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from cost.base import Problem, num_strategies
from diffshard.base import CLOSED, Proposal, seeded
from diffshard.solving.dual.ascent import Ascent
from diffshard.solving.dual.branching import Branching
from diffshard.solving.flat import flatten, with_ceiling
from diffshard.solving.moves.neighbourhoods import perturb, split
from diffshard.solving.moves.polish import Polish, rounded
from diffshard.solving.moves.replicas import Replicas
from diffshard.solving.moves.tied import tied_start
from diffshard.solving.solvers import exhaustive

Start = tuple[np.ndarray, np.ndarray]
"""A choice `[V]` and prices of memory `[T, D]` to go on from."""

_FEW = 1 << 16  # choices
_STARTS = 4
_TIED = 0.1  # of the time limit
_MOST_SWEEPS = 3000
_SWEEPS = 80  # of a perturbed dual
_NOISE = 0.03  # of the bound for each node, at most
_BALL = 50  # nodes
_WHOLE = 500  # nodes up to which the whole graph is one neighbourhood
_SMALL = 0.1, 0.15, 0.2  # where the phases end then
_WALKS = 32
_LADDER = 3e-5, 3e-2  # the walks' temperatures, of the bound for each node
_LOADED = 1e-4, 1.0  # where loads join everything
_WALKED = 10  # steps between two exchanges
_TELL = 10  # moves
_WORTH = 40, 0.01  # so many branches must close so much of the gap, or it ends
_IDLE = 4.0  # how much more the time of a phase counts that found nothing in the last half of it
_BRANCH_MOVES = 10
_MOVES = 8  # of a neighbourhood, each time


PARTS = ("dual", "prices", "tying", "starts", "forests", "annealing", "neighbourhoods", "walks", "branches")
"""What `Effort.without` can leave out."""


class Effort(NamedTuple):
    """How much to do: shares of the time limit or, without one, how often.

    Attributes:
      sweeps: of the dual, at most.
      trials: starts, read off the dual at several moments and off perturbed duals.
      moves: forest moves from each start.
      anneals: forest moves from the best.
      rounds: perturbations of all neighbourhoods, at most.
      branches: of the dual, at most.
      patience: rounds without improvement after which it ends.
      steps: of each Metropolis walk, for each node; a fifth where no loads join everything.
      shares: where in the time limit the sweeps, the trials and the annealing end.
      without: parts left out, of `PARTS`, to see what they are worth; the others get their time.
    """

    sweeps: int = 400
    trials: int = 8
    moves: int = 60
    anneals: int = 300
    rounds: int = 600
    branches: int = 300
    patience: int = 60
    steps: int = 200
    shares: tuple[float, float, float] = (0.3, 0.6, 0.75)
    without: frozenset[str] = frozenset()


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
    ascent = Ascent(flat, prices="prices" not in effort.without)
    starts: list[Start] = []
    for start in _climb(ascent, clock, effort):
        starts.append(start)
        yield Proposal(start[0])
    bound = ascent.certified()
    yield Proposal(lower_bound=bound)
    search = Polish(flat, rng, starts[-1][0], ascent.best[1], bound, edges="forests" not in effort.without)
    tied = () if "tying" in effort.without else _tie(problem, search, ascent, key, time_limit_s, effort)
    phases = itertools.chain(tied, _phases(search, ascent, starts[:-_STARTS:-1], bound, clock, effort))
    told = math.inf
    for i, found in enumerate(phases):
        bound = max(bound, found)
        if i % _TELL == 0 and search.best_cost < told:  # telling costs about as much as a move
            told = search.best_cost
            yield Proposal(search.best, bound)
        else:
            yield Proposal(lower_bound=bound)
        if search.best_excess == 0 and search.best_cost - bound <= CLOSED * abs(search.best_cost):
            break
    yield Proposal(search.best, bound)


class _Clock:
    """How far a phase is: by time where there is a limit, else by count."""

    def __init__(self, time_limit_s: float | None):
        self._start, self._limit = time.perf_counter(), time_limit_s
        self.limited = time_limit_s is not None

    def used(self) -> float:
        return 0.0 if self._limit is None else (time.perf_counter() - self._start) / self._limit

    def phase(self, planned: int, share: float) -> Callable[[int], float]:
        """From now on, maps what is done to 0 to 1: towards a share of the limit or a planned count."""
        begun = self.used()
        if self._limit is None:
            return lambda done: done / planned
        return lambda done: (self.used() - begun) / max(share - begun, 1e-9)


def _phases(
    search: Polish,
    ascent: Ascent,
    starts: list[Start],
    bound: float,
    clock: _Clock,
    effort: Effort,
) -> Iterator[float]:
    """What follows the climb, as one; each part yields lower bounds, -inf where it has none."""
    flat, without = search.flat, effort.without
    scale = max(abs(bound), 1e-30) / len(flat.sizes)
    small, loads = len(flat.sizes) <= _WHOLE, bool(flat.load.shape[1])
    if small:
        effort = effort._replace(shares=tuple(min(pair) for pair in zip(effort.shares, _SMALL, strict=True)))
    yield from _try(search, ascent, starts, clock, effort, scale)
    if not loads and "annealing" not in without:
        yield from _anneal(search, clock, effort, scale)
    last = []
    if not loads and "neighbourhoods" not in without:
        last.append(_perturb(search, clock, effort, scale))
    if small and "branches" not in without:  # before the walks, which are not needed where it proves the choice
        last.append(_branch(search, ascent, bound, clock, effort))
    if (small or loads) and "walks" not in without:
        last.append(_walk(search, clock, effort, scale))
    yield from _beside(last, search, clock)


def _climb(ascent: Ascent, clock: _Clock, effort: Effort) -> Iterator[Start]:
    """Sweeps until the time or the bound stalls; yields roundings and their memory prices, and the last."""
    flat, recent, told = ascent.flat, [], 0.4
    progress = clock.phase(effort.sweeps, effort.shares[0])
    for i in itertools.count():
        if "dual" in effort.without:
            break
        done = max(progress(i), i / _MOST_SWEEPS)  # whichever ends it, the temperature must have fallen by then
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


def _tie(
    problem: Problem, search: Polish, ascent: Ascent, key: jax.Array, time_limit_s: float | None, effort: Effort
) -> Iterator[float]:
    """Forest moves from where equal layers take equal strategies."""
    yield -math.inf  # the rounding may be the optimum already
    choice = tied_start(problem, key, None if time_limit_s is None else _TIED * time_limit_s)
    if choice is not None:
        search.begin(choice, ascent.best[1].memory)
        for _ in range(effort.moves):
            search.anneal(0.0, 0.1)
            yield -math.inf


def _try(
    search: Polish,
    ascent: Ascent,
    starts: list[Start],
    clock: _Clock,
    effort: Effort,
    scale: float,
) -> Iterator[float]:
    """Forest moves from each start, and then from roundings of perturbed duals."""
    progress = clock.phase(effort.trials, effort.shares[1])
    sweeps = 0 if "dual" in effort.without else _SWEEPS
    trial = 0
    while progress(trial) < 1 and not (trial and "starts" in effort.without):
        if trial < len(starts):
            choice, memory = starts[trial]
        else:
            noise = _NOISE * scale * search.rng.random() ** 3
            absorbed, memory = ascent.perturbed(search.rng, sweeps, noise)
            choice = rounded(search.flat, absorbed)
        search.begin(choice, memory)
        for i in range(effort.moves):
            search.anneal(0.0, 0.1 if i < effort.moves // 2 else 0.05)
            yield -math.inf
            if clock.used() > effort.shares[1]:
                return
        trial += 1


def _rank(polish: Polish) -> tuple[float, float]:
    return polish.best_excess, polish.best_cost


def _anneal(search: Polish, clock: _Clock, effort: Effort, scale: float) -> Iterator[float]:
    """Forest moves with noise that dies away."""
    progress = clock.phase(effort.anneals, effort.shares[2])
    search.begin(search.best.copy(), search.best_memory)
    i = 0
    while (done := progress(i)) < 1:
        search.anneal(0.1 * scale * 0.01**done if done < 0.85 else 0.0, 0.1 ** (1 + done))
        yield -math.inf
        i += 1


def _perturb(search: Polish, clock: _Clock, effort: Effort, scale: float) -> Iterator[float]:
    """Neighbourhoods, perturbed again and again."""
    flat, small = search.flat, len(search.flat.sizes) <= _WHOLE
    progress = clock.phase(effort.rounds, 1.0)
    i, last, partition = 0, 0, None
    while progress(i) < 1 and (clock.limited or i - last < effort.patience):
        if partition is None or i % 6 == 0:
            size = _BALL * np.exp(0.7 * search.rng.normal())
            partition = split(flat, search.rng, 1 if small else round(len(flat.sizes) / size), edges=search.edges)
        before = _rank(search)
        perturb(search, partition, _MOVES, 0.1 * scale, 1.0 if small else 0.3)
        i += 1
        if _rank(search) < before:
            last = i
        yield -math.inf


def _walk(search: Polish, clock: _Clock, effort: Effort, scale: float) -> Iterator[float]:
    """Metropolis walks from the best choice under parallel tempering; with loads the hotter half starts anywhere."""
    flat, count = search.flat, len(search.flat.sizes)
    loads = bool(flat.load.shape[1])
    temperatures = scale * np.geomspace(*(_LOADED if loads else _LADDER), _WALKS)
    starts = np.repeat(search.best[None], _WALKS, axis=0)
    if loads:
        starts[_WALKS // 2 :] = search.rng.integers(flat.sizes, size=(_WALKS - _WALKS // 2, count))
    walks = Replicas(flat, search.rng, starts)
    progress = clock.phase(effort.steps * count // (1 if loads else 5), 1.0)
    step = 0
    while progress(step) < 1:
        for _ in range(_WALKED):
            walks.step(temperatures)
        walks.temper(temperatures)
        step += _WALKED
        if step % 100 == 0:
            if walks.best is not None:
                search.offer(walks.best)
            yield -math.inf


def _branch(search: Polish, ascent: Ascent, bound: float, clock: _Clock, effort: Effort) -> Iterator[float]:
    """Bounds of a branch and bound whose branches are also rounded and polished."""
    branching, before = Branching(ascent, bound), bound
    progress = clock.phase(effort.branches, 1.0)
    for i in itertools.count():
        if search.best_excess > 0 or progress(i) >= 1:
            return  # without a choice in hand no branch can be closed
        more = branching.step(search.best_cost)
        climb = branching.last
        search.begin(rounded(search.flat, climb.absorbed), climb.best[1].memory)
        for _ in range(_BRANCH_MOVES):
            search.anneal(0.0, 0.1)
        yield branching.bound
        if not more:
            return
        if (i + 1) % _WORTH[0] == 0:
            if branching.bound - before < _WORTH[1] * (search.best_cost - before):
                return
            before = branching.bound


def _beside(phases: Sequence[Iterator[float]], search: Polish, clock: _Clock) -> Iterator[float]:
    """All in turn, more of those that lately found something; without a limit one after the other."""
    spent = dict.fromkeys(phases, 0.0)
    found_at = dict.fromkeys(phases, 0.0)

    def weighted(phase: Iterator[float]) -> float:
        return spent[phase] * (1.0 if found_at[phase] >= 0.5 * spent[phase] else _IDLE)

    while spent:
        phase = min(spent, key=weighted) if clock.limited else next(iter(spent))
        before, start = _rank(search), time.perf_counter()
        try:
            yield next(phase)
        except StopIteration:
            del spent[phase]
        else:
            spent[phase] += time.perf_counter() - start
            if _rank(search) < before:
                found_at[phase] = spent[phase]

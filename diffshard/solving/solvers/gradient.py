"""The default: climbs the dual along its marginals, reads choices off it, and improves the best of them.

1. `DualClimb` raises a lower bound. The gradient of the smoothed dual, at a temperature that falls, is a relaxed
   choice: rows of softmax weights. Prices follow what it takes of memory and loads.
2. `QuotientStart` solves the much smaller problem in which equal layers take equal strategies, and `DualStarts` rounds
   the dual and perturbed duals. Exact moves of random forests, at prices that keep the memory, polish each start.
3. `Annealing` goes on from the best, and then three phases share the time:
   `Neighbourhoods` perturbs disjoint balls of nodes and accepts each by itself;
   `Branches` splits the dual where the graph is small: it closes what memory and loads leave between the choice and the
   bound, and its branches are new starts;
   `Walks` are Metropolis walks under parallel tempering, where the graph is small or devices do different work, so that
   the largest load joins all nodes.

A problem of few choices is enumerated instead.
"""

import functools
import math
from collections.abc import Iterator, Sequence

import jax

from cost.base import Problem, num_strategies
from diffshard.base import OPTIMAL_GAP, Proposal
from diffshard.solving.examples import coupled_ring
from diffshard.solving.flat import flatten, numpy_generator, with_ceiling
from diffshard.solving.moves.forest import Grow, grow
from diffshard.solving.moves.polish import Polish
from diffshard.solving.phases.annealing import Annealing
from diffshard.solving.phases.base import Climb, Clock, Phase, Search, Start
from diffshard.solving.phases.branches import Branches
from diffshard.solving.phases.climb import DualClimb
from diffshard.solving.phases.neighbourhoods import Neighbourhoods
from diffshard.solving.phases.quotient_start import QuotientStart
from diffshard.solving.phases.side_by_side import SideBySide
from diffshard.solving.phases.starts import MOST_CLIMB_STARTS, DualStarts
from diffshard.solving.phases.walks import Walks
from diffshard.solving.solvers import exhaustive

MOST_ENUMERATED = 1 << 16
"""Choices up to which all are enumerated, which takes about 10 ms; chosen by hand."""
_MOVES_PER_PROPOSAL = 10  # a proposal's exact price takes about as long as a move; chosen by hand
_CLIMB = DualClimb()


def default_phases() -> tuple[Phase, ...]:
    """Returns what improves the choice after the climb, in this order."""
    return (
        QuotientStart(solve),
        DualStarts(),
        Annealing(),
        SideBySide((Neighbourhoods(), Branches(), Walks())),
    )


def solve(
    problem: Problem,
    *,
    time_limit_s: float | None = None,
    key: jax.Array,
    climb: Climb = _CLIMB,
    phases: Sequence[Phase] | None = None,
    grow: Grow = grow,
) -> Iterator[Proposal]:
    """Yields the dual's bound and better and better choices, until all phases have ended or the gap is closed.

    Args:
      problem: see `diffshard.base.Solver`.
      time_limit_s: the same.
      key: the same.
      climb: raises the bound and reads starts off the dual.
      phases: what improves the choice, one after the other; None is `default_phases()`.
      grow: makes the forests whose nodes move together.
    """
    if math.prod(num_strategies(problem).tolist()) <= MOST_ENUMERATED:
        yield from exhaustive.solve(problem)
        return
    clock, flat, rng = Clock(time_limit_s), with_ceiling(flatten(problem)), numpy_generator(key)
    ascent = climb.init(flat)
    starts: list[Start] = []
    for start in climb(ascent, clock):
        starts.append(start)
        yield Proposal(start.choice)
    bound = ascent.certified()
    yield Proposal(lower_bound=bound)
    polish = Polish(flat, rng, starts[-1].choice, ascent.best[1], bound, grow)
    last_starts = tuple(starts[: -MOST_CLIMB_STARTS - 1 : -1])
    search = Search(problem, ascent, polish, last_starts, bound, clock, key)
    yield from _improve(search, default_phases() if phases is None else phases)


def _improve(search: Search, phases: Sequence[Phase]) -> Iterator[Proposal]:
    """Runs one phase after the other, until the gap is closed; yields the bounds and, now and then, the best choice."""
    polish, bound = search.polish, search.bound
    proposed_cost = math.inf
    moves = (move for phase in phases for move in phase(search))
    for i, move_bound in enumerate(moves):
        bound = max(bound, move_bound)
        if i % _MOVES_PER_PROPOSAL == 0 and polish.best_cost < proposed_cost:
            proposed_cost = polish.best_cost
            yield Proposal(polish.best, bound)
        else:
            yield Proposal(lower_bound=bound)
        if polish.best_excess == 0 and polish.best_cost - bound <= OPTIMAL_GAP * abs(polish.best_cost):
            break
    yield Proposal(polish.best, bound)


# 177,147 choices: more than are enumerated.
EXAMPLE = functools.partial(coupled_ring, 11)

"""The default: maximises the dual along its marginals, reads choices off it, and improves the best of them.

1. `DualAscent` raises a lower bound. The gradient of the smoothed dual, at a temperature that falls, is a relaxed
   choice: rows of softmax weights. Prices follow what it takes of memory and loads.
2. `QuotientStart` solves the much smaller problem in which equal layers take equal strategies, and `DualStarts` rounds
   the dual and perturbed duals. Exact moves of random forests, at prices that keep the memory, polish each start.
3. `Annealing` goes on from the best, and then three phases share the time:
   `Neighbourhoods` perturbs disjoint neighbourhoods of nodes and accepts each by itself; `Branches` splits the dual
   where the graph is small: it closes what memory and loads leave between the choice and the bound, and its branches
   are new starts; `TemperedChains` are Metropolis chains under parallel tempering, where the graph is small or devices
   do different work, so that the largest load joins all nodes.

`default_phases` chooses those that suit a problem. A problem of few choices is enumerated instead.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from cost.base import Problem, num_loads, num_strategies
from diffshard.base import OPTIMAL_GAP, Proposal
from diffshard.solving.csr import numpy_generator, to_csr, with_ceiling
from diffshard.solving.dual.sweeps import lay_out
from diffshard.solving.examples import coupled_ring
from diffshard.solving.moves.tree_moves import Grow, Polish, grow_forest
from diffshard.solving.phases.improving import Annealing, Branches, Neighbourhoods, SideBySide, TemperedChains
from diffshard.solving.phases.starts import (
    MOST_ASCENT_STARTS,
    AscentPhase,
    Clock,
    DualAscent,
    DualStarts,
    Phase,
    QuotientStart,
    Search,
    Start,
)
from diffshard.solving.solvers import exhaustive

MOST_ENUMERATED = 1 << 16
"""Choices up to which all are enumerated, which takes about 10 ms; chosen by hand."""
MOST_NODES_OF_SMALL = 500  # up to which a graph is worth branches and chains; chosen by hand on the contest's instances
_YIELDS_PER_PROPOSAL = 10  # a proposal's exact price takes about as long as a move; chosen by hand
_DUAL_ASCENT = DualAscent()


def default_phases(problem: Problem) -> tuple[Phase, ...]:
    """Returns the phases that suit a problem, in their order; all numbers were chosen by hand.

    Loads join all nodes, and tree moves do not see them: chains do, so these take the place of annealing and
    neighbourhoods, from hotter and random starts. On a small graph starts and annealing end early, because branches and
    chains do more there, and all its nodes are one neighbourhood.
    """
    is_small = len(problem.node_cost) <= MOST_NODES_OF_SMALL
    branches = (Branches(),) if is_small else ()
    starts = QuotientStart(solve), DualStarts(end_share=0.15 if is_small else 0.6)
    if num_loads(problem):
        chains = TemperedChains(num_random_starts=16, steps_per_node=200, temperatures=(1e-4, 1.0))
        return *starts, SideBySide((*branches, chains))
    if is_small:
        neighbourhoods = Neighbourhoods(nodes_per_neighbourhood=math.inf, memory_spread=1.0)
        return *starts, Annealing(end_share=0.2), SideBySide((neighbourhoods, *branches, TemperedChains()))
    return *starts, Annealing(end_share=0.75), Neighbourhoods(nodes_per_neighbourhood=50, memory_spread=0.3)


def solve(
    problem: Problem,
    *,
    time_limit_s: float | None = None,
    key: jax.Array,
    dual_ascent: AscentPhase = _DUAL_ASCENT,
    phases: Callable[[Problem], Sequence[Phase]] = default_phases,
    grow: Grow = grow_forest,
    most_enumerated: int = MOST_ENUMERATED,
) -> Iterator[Proposal]:
    """Yields the dual's bound and better and better choices, until all phases have ended or the gap is closed.

    Args:
      problem: see `diffshard.base.Solver`.
      time_limit_s: the same.
      key: the same.
      dual_ascent: raises the bound and reads starts off the dual.
      phases: returns what improves the choice, one after the other.
      grow: makes the forests whose nodes move together.
      most_enumerated: choices up to which all are enumerated.
    """
    if math.prod(num_strategies(problem).tolist()) <= most_enumerated:
        yield from exhaustive.solve(problem)
        return
    clock, csr, rng = Clock(time_limit_s), with_ceiling(to_csr(problem)), numpy_generator(key)
    ascent = dual_ascent.init(csr)
    exact_layout = lay_out(csr, np.float64)
    starts: list[Start] = []
    for start in dual_ascent(ascent, clock):
        starts.append(start)
        # Without a time limit an early bound can end the search; with one, the time is better spent on the ascent.
        yield Proposal(start.choice, ascent.certified_bound(exact_layout) if time_limit_s is None else -math.inf)
    bound = ascent.certified_bound(exact_layout)
    yield Proposal(lower_bound=bound)
    polish = Polish(csr, rng, starts[-1].choice, ascent.best[1], bound, grow)
    last_starts = tuple(starts[: -MOST_ASCENT_STARTS - 1 : -1])
    search = Search(problem, ascent, polish, last_starts, bound, clock, key)
    yield from _improve(search, phases(problem))


def _improve(search: Search, phases: Sequence[Phase]) -> Iterator[Proposal]:
    """Runs one phase after the other, until the gap is closed; yields the bounds and, now and then, the best choice."""
    polish, bound = search.polish, search.bound
    proposed_cost = math.inf
    bounds = (phase_bound for phase in phases for phase_bound in phase(search))
    for i, phase_bound in enumerate(bounds):
        bound = max(bound, phase_bound)
        if i % _YIELDS_PER_PROPOSAL == 0 and polish.best_cost < proposed_cost:
            proposed_cost = polish.best_cost
            yield Proposal(polish.best, bound)
        else:
            yield Proposal(lower_bound=bound)
        if polish.best_excess == 0 and polish.best_cost - bound <= OPTIMAL_GAP * abs(polish.best_cost):
            break
    yield Proposal(polish.best, bound)


# 177,147 choices: more than are enumerated.
EXAMPLE = functools.partial(coupled_ring, 11)


def solve_quickly(problem: Problem, *, time_limit_s: float | None = None, key: jax.Array) -> Iterator[Proposal]:
    """Solves a problem without the last phases, which prove and polish for a long time; see `diffshard.base.Solver`.

    That is for problems of which a search has several, or whose bound comes from elsewhere.
    """
    return solve(problem, time_limit_s=time_limit_s, key=key, phases=_quick_phases)


def _quick_phases(problem: Problem) -> tuple[Phase, ...]:
    _, *phases = default_phases(problem)
    return QuotientStart(solve_quickly), *phases[:-1]

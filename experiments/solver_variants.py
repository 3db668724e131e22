"""The default solver without each of its parts, to see what they are worth, and a short one for comparing sizes.

Each variant edits the default's list of phases; the time that the missing part had goes to the others.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from cost.base import Problem
from diffshard.base import Solver
from diffshard.solving.csr import CSRProblem, first_least
from diffshard.solving.dual.ascent import Ascent, Prices
from diffshard.solving.moves.tree_moves import Forest, grow_forest
from diffshard.solving.phases.improving import Annealing, Branches, Neighbourhoods, SideBySide, TemperedChains
from diffshard.solving.phases.starts import (
    Clock,
    DualAscent,
    DualStarts,
    Phase,
    QuotientStart,
    Search,
    Start,
    moves_from,
)
from diffshard.solving.solvers import gradient


class NoAscent:
    """An ascent without sweeps: the only start is read off the node costs, and the bound is that of zero messages."""

    def init(self, csr: CSRProblem) -> Ascent:
        """Returns the dual at zero messages."""
        return Ascent(csr)

    def __call__(self, ascent: Ascent, clock: Clock) -> Iterator[Start]:
        """Yields the start."""
        yield Start(first_least(ascent.absorbed_cost, ascent.csr.sizes), ascent.prices.memory)


def constant_prices(csr: CSRProblem, prices: Prices, weights: np.ndarray, bound_size: float, progress: float) -> Prices:
    """Returns the prices as they are: memory stays free in the dual, and all devices' times count alike."""
    return prices


def grow_single_nodes(csr: CSRProblem, order: np.ndarray) -> Forest:
    """Returns a forest whose trees are single nodes: those of `order` that have no neighbour among those before."""
    first, target = csr.first.tolist(), csr.target.tolist()
    alone = [False] * len(csr.sizes)
    for v in order.tolist():
        alone[v] = not any(alone[u] for u in target[first[v] : first[v + 1]])
    return grow_forest(csr, order[np.array(alone, bool)[order]])


def last_start_only(search: Search) -> Iterator[float]:
    """Makes tree moves from the rounding of the last dual; a phase in the place of `DualStarts`."""
    return moves_from(search, search.starts[0], DualStarts().num_moves)


def edited_phases(problem: Problem, edit: Callable[[Phase], Phase | None]) -> tuple[Phase, ...]:
    """Returns the default phases, each as `edit` returns it; those for which it returns None are left out."""

    def edited(phases: Sequence[Phase]) -> tuple[Phase, ...]:
        results = (
            replace(phase, phases=edited(phase.phases)) if isinstance(phase, SideBySide) else edit(phase)
            for phase in phases
        )
        return tuple(phase for phase in results if phase is not None)

    return edited(gradient.default_phases(problem))


def without(kind: type) -> Solver:
    """Returns the default solver without the phases of a class."""
    edit = functools.partial(_unless, kind)
    return functools.partial(gradient.solve, phases=functools.partial(edited_phases, edit=edit))


def with_settings(phase: Phase, settings: Mapping[type, Mapping[str, Any]]) -> Phase:
    """Returns a phase with the settings that its class has in `settings`, where it has any."""
    own_settings = settings.get(type(phase))
    return replace(cast(Any, phase), **own_settings) if own_settings else phase


def _unless(kind: type, phase: Phase) -> Phase | None:
    return None if isinstance(phase, kind) else phase


def _starts_replaced(phase: Phase) -> Phase:
    return last_start_only if isinstance(phase, DualStarts) else phase


VARIANTS: dict[str, Solver] = {
    "all": gradient.solve,
    "presolve": gradient.solve,
    "dual": functools.partial(
        gradient.solve,
        dual_ascent=NoAscent(),
        phases=functools.partial(
            edited_phases, edit=functools.partial(with_settings, settings={DualStarts: {"num_sweeps": 0}})
        ),
    ),
    "prices": functools.partial(gradient.solve, dual_ascent=DualAscent(price_step=constant_prices)),
    "tying": without(QuotientStart),
    "starts": functools.partial(gradient.solve, phases=functools.partial(edited_phases, edit=_starts_replaced)),
    "forests": functools.partial(gradient.solve, grow=grow_single_nodes),
    "annealing": without(Annealing),
    "neighbourhoods": without(Neighbourhoods),
    "chains": without(TemperedChains),
    "branches": without(Branches),
}
"""The search as it is, and without what the name says; "presolve" is left out by `iopddl.run`."""

_SHORT_SETTINGS = {
    DualStarts: {"num_starts": 1, "num_moves": 5},
    Neighbourhoods: {"num_rounds": 10},
}


def _shortened(phase: Phase) -> Phase | None:
    return None if isinstance(phase, QuotientStart | Annealing) else with_settings(phase, _SHORT_SETTINGS)


SHORT_SEARCH = functools.partial(
    gradient.solve,
    dual_ascent=DualAscent(num_sweeps=60),
    phases=functools.partial(edited_phases, edit=_shortened),
)
"""A search that does the same work for each node at every size: one ascent, one start, ten rounds of neighbourhoods."""

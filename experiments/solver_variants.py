"""The default solver without each of its parts, to see what they are worth, and a short one for comparing sizes.

Each variant is a list of phases of its own; the time that the missing part had goes to the others.
"""

import functools
from collections.abc import Iterator

import numpy as np

from diffshard.base import Solver
from diffshard.solving.dual.ascent import Ascent, Prices
from diffshard.solving.flat import Flat
from diffshard.solving.moves.forest import Forest, grow
from diffshard.solving.moves.polish import rounded
from diffshard.solving.phases.annealing import Annealing
from diffshard.solving.phases.base import Clock, Search, Start
from diffshard.solving.phases.branches import Branches
from diffshard.solving.phases.climb import DualClimb
from diffshard.solving.phases.neighbourhoods import Neighbourhoods
from diffshard.solving.phases.quotient_start import QuotientStart
from diffshard.solving.phases.side_by_side import SideBySide
from diffshard.solving.phases.starts import DualStarts, moves_from
from diffshard.solving.phases.walks import Walks
from diffshard.solving.solvers import gradient

_TIED = QuotientStart(gradient.solve)
_IMPROVEMENTS = Neighbourhoods(), Branches(), Walks()


class NoClimb:
    """A climb without sweeps: the only start is read off the node costs, and the bound is that of zero messages."""

    def init(self, flat: Flat) -> Ascent:
        """Returns the dual at zero messages."""
        return Ascent(flat)

    def __call__(self, ascent: Ascent, clock: Clock) -> Iterator[Start]:
        """Yields the start."""
        yield Start(rounded(ascent.flat, ascent.absorbed), ascent.prices.memory)


def constant_prices(flat: Flat, prices: Prices, weights: np.ndarray, bound_size: float, progress: float) -> Prices:
    """Returns the prices as they are: memory stays free in the dual, and all devices' times count alike."""
    return prices


def grow_single_nodes(flat: Flat, order: np.ndarray) -> Forest:
    """Returns a forest whose trees are single nodes: those of `order` that have no neighbour among those before."""
    first, target = flat.first.tolist(), flat.target.tolist()
    alone = [False] * len(flat.sizes)
    for v in order.tolist():
        alone[v] = not any(alone[u] for u in target[first[v] : first[v + 1]])
    return grow(flat, order[np.array(alone, bool)[order]])


def last_start_only(search: Search) -> Iterator[float]:
    """Makes forest moves from the climbed dual's own rounding; a phase in the place of `DualStarts`."""
    return moves_from(search, search.starts[0], DualStarts().num_moves)


VARIANTS: dict[str, Solver] = {
    "all": gradient.solve,
    "presolve": gradient.solve,
    "dual": functools.partial(
        gradient.solve,
        climb=NoClimb(),
        phases=(_TIED, DualStarts(num_sweeps=0), Annealing(), SideBySide(_IMPROVEMENTS)),
    ),
    "prices": functools.partial(gradient.solve, climb=DualClimb(price_step=constant_prices)),
    "tying": functools.partial(gradient.solve, phases=(DualStarts(), Annealing(), SideBySide(_IMPROVEMENTS))),
    "starts": functools.partial(
        gradient.solve, phases=(_TIED, last_start_only, Annealing(), SideBySide(_IMPROVEMENTS))
    ),
    "forests": functools.partial(gradient.solve, grow=grow_single_nodes),
    "annealing": functools.partial(gradient.solve, phases=(_TIED, DualStarts(), SideBySide(_IMPROVEMENTS))),
    "neighbourhoods": functools.partial(
        gradient.solve, phases=(_TIED, DualStarts(), Annealing(), SideBySide((Branches(), Walks())))
    ),
    "walks": functools.partial(
        gradient.solve, phases=(_TIED, DualStarts(), Annealing(), SideBySide((Neighbourhoods(), Branches())))
    ),
    "branches": functools.partial(
        gradient.solve, phases=(_TIED, DualStarts(), Annealing(), SideBySide((Neighbourhoods(), Walks())))
    ),
}
"""The search as it is, and without what the name says; "presolve" is left out by `iopddl.run`."""

SHORT_SEARCH = functools.partial(
    gradient.solve,
    climb=DualClimb(num_sweeps=40),
    phases=(
        QuotientStart(gradient.solve, num_moves=5),
        DualStarts(num_starts=2, num_moves=5),
        Annealing(num_moves=5),
        SideBySide((Neighbourhoods(num_rounds=5), Branches(), Walks())),
    ),
)
"""A search that does the same work at every size."""

"""Branch and bound on the dual: raises the bound, and each branch's rounding is a new start.

It closes what memory and loads leave between the choice and the bound, where the graph is small.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from diffshard.solving.dual.branching import Branching
from diffshard.solving.moves.polish import rounded_choice
from diffshard.solving.phases.base import Search


@dataclass(frozen=True)
class Branches:
    """Branches of the dual, for small graphs; all numbers were chosen by hand on the contest's instances.

    Attributes:
      num_branches: at most, without a time limit.
      num_moves: forest moves from each branch's rounding.
      review_interval: branches after which the phase ends unless they closed `least_closed` of the gap.
      least_closed: as a share of the gap.
    """

    num_branches: int = 300
    num_moves: int = 10
    review_interval: int = 40
    least_closed: float = 0.01

    def __call__(self, search: Search) -> Iterator[float]:
        """Makes one branch after the other and yields the bound of all."""
        polish = search.polish
        branching, reviewed_bound = Branching(search.ascent, search.bound), search.bound
        progress = search.clock.progress(self.num_branches, 1.0)
        for i in itertools.count():
            # Without a feasible choice no branch can be closed.
            if polish.best_excess > 0 or progress(i) >= 1:
                return
            more = branching.step(polish.best_cost)
            ascent = branching.last_ascent
            polish.begin(rounded_choice(search.flat, ascent.absorbed_cost), ascent.best[1].memory)
            for _ in range(self.num_moves):
                polish.anneal(0.0, 0.1)
            yield branching.bound
            if not more:
                return
            if (i + 1) % self.review_interval == 0:
                if branching.bound - reviewed_bound < self.least_closed * (polish.best_cost - reviewed_bound):
                    return
                reviewed_bound = branching.bound

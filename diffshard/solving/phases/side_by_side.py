"""Phases side by side: whichever improved the choice lately gets more of the time."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from diffshard.solving.phases.base import Phase, Search


@dataclass(frozen=True)
class SideBySide:
    """Phases that take turns under a time limit and run one after the other without one.

    Attributes:
      phases: in the order in which they run without a time limit.
      idle_factor: how much more the time of a phase counts that improved nothing in the last half of its own time;
        chosen by hand on the contest's instances.
    """

    phases: tuple[Phase, ...]
    idle_factor: float = 4.0

    def __call__(self, search: Search) -> Iterator[float]:
        """Runs the phase that has had the least time, until all have ended; yields the bounds of all."""
        runs = [phase(search) for phase in self.phases]
        spent_s = dict.fromkeys(runs, 0.0)
        improved_at_s = dict.fromkeys(runs, 0.0)

        def weighted_s(run: Iterator[float]) -> float:
            return spent_s[run] * (1.0 if improved_at_s[run] >= 0.5 * spent_s[run] else self.idle_factor)

        while spent_s:
            run = next(iter(spent_s)) if search.clock.time_limit_s is None else min(spent_s, key=weighted_s)
            rank, start = search.polish.best_rank, time.perf_counter()
            try:
                yield next(run)
            except StopIteration:
                del spent_s[run]
            else:
                spent_s[run] += time.perf_counter() - start
                if search.polish.best_rank < rank:
                    improved_at_s[run] = spent_s[run]

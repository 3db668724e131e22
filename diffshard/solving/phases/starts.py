"""Forest moves from several starts read off the dual, the best of which goes on.

Forest moves come down to a local optimum near their start. Duals of slightly different problems, with noise on the
costs and other prices of memory, round to starts far enough from each other to reach different ones.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from diffshard.solving.moves.polish import rounded_choice
from diffshard.solving.phases.base import NO_BOUND, Search, Start

_SETTLING_RATE, _SETTLING_GROWTH = 0.1, 1.05
"""By what share prices rise in the first settling move, and how much faster in each next one; chosen by hand on
generated layers of 1,000 and 10,000 nodes."""
MOST_CLIMB_STARTS = 3
"""Starts of the climb that are tried, the last ones; chosen by hand on the contest's instances."""


@dataclass(frozen=True)
class DualStarts:
    """Starts off the climb, then off perturbed duals; all numbers were chosen by hand on the contest's instances.

    Attributes:
      num_starts: without a time limit.
      num_moves: forest moves from each start.
      num_settling_moves: at most, after a start with no move that fits the memory, until one fits: prices then only
        rise. On a large problem some of many times is always exceeded at prices that fall again.
      end_share: of the time limit, when the phase ends.
      least_share: of the time limit, that the phase has where the climb lasted beyond that end.
      num_sweeps: of each perturbed dual.
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
        return Start(rounded_choice(search.flat, costs), memory)


def moves_from(search: Search, start: Start, num_moves: int) -> Iterator[float]:
    """Makes forest moves from a start; prices of memory answer half as much in the second half."""
    search.polish.begin(start.choice, start.memory)
    for i in range(num_moves):
        search.polish.anneal(0.0, 0.1 if i < num_moves // 2 else 0.05)
        yield NO_BOUND


def settling_moves(search: Search, num_moves: int) -> Iterator[float]:
    """Makes forest moves at prices that rise where the memory is exceeded and never fall, until the choice fits."""
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

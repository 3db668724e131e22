"""The climb of the dual: sweeps and price steps until the time or the bound stalls, rounded at several moments.

The rounding of an early, hot dual and that of the last one are good choices in different ways, so several are kept.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from diffshard.solving.dual.ascent import Ascent, PriceStep, step_along_excess
from diffshard.solving.flat import Flat
from diffshard.solving.moves.polish import rounded_choice
from diffshard.solving.phases.base import Clock, Start


@dataclass(frozen=True)
class DualClimb:
    """A climb that rounds the dual on its way; all numbers were chosen by hand on the contest's instances.

    Attributes:
      num_sweeps: without a time limit.
      most_sweeps: with one.
      end_share: of the time limit, when the climb ends.
      first_start: how far the climb is when the first start is read off.
      start_interval: how much further it is at each next one.
      stall_sweeps: where no memory can run out, the climb ends when the bound rose by at most `stall_rise` in so many.
      stall_rise: as a share of the bound.
      least_sweeps: made however short the time is, as a dual at its first messages has no good choices, and before the
        climb can stall.
      price_step: how prices answer to the relaxed choice.
    """

    num_sweeps: int = 400
    most_sweeps: int = 3000
    end_share: float = 0.3
    first_start: float = 0.4
    start_interval: float = 0.15
    stall_sweeps: int = 39
    stall_rise: float = 1e-5
    least_sweeps: int = 60
    price_step: PriceStep = step_along_excess

    def init(self, flat: Flat) -> Ascent:
        """Returns the dual at zero messages and the first prices."""
        return Ascent(flat, price_step=self.price_step)

    def __call__(self, ascent: Ascent, clock: Clock) -> Iterator[Start]:
        """Climbs; yields starts on the way and one at the end."""
        bounds: list[float] = []
        next_start = self.first_start
        progress = clock.progress(self.num_sweeps, self.end_share)
        for i in itertools.count():
            # Whichever of the two ends the climb, the temperature must have fallen by then.
            share = min(max(progress(i), i / self.most_sweeps), i / self.least_sweeps)
            if share >= 1:
                break
            ascent.step(share)
            bounds.append(ascent.bound)
            if not ascent.flat.base.size and self._stalls(bounds):
                break
            if share >= next_start:
                next_start += self.start_interval
                yield _read_off(ascent)
        yield _read_off(ascent)

    def _stalls(self, bounds: list[float]) -> bool:
        if len(bounds) <= self.least_sweeps:
            return False
        return bounds[-1] - bounds[-1 - self.stall_sweeps] <= self.stall_rise * abs(bounds[-1])


def _read_off(ascent: Ascent) -> Start:
    return Start(rounded_choice(ascent.flat, ascent.absorbed_cost), ascent.prices.memory)

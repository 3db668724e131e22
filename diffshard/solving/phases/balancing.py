"""Levelling of loads: descents over single nodes and pairs, from a greedy choice and from kicked ones."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from diffshard.solving.moves.balance import Balance
from diffshard.solving.phases.base import NO_BOUND, Search

_MOST_TABLE_NUMBERS = 1 << 24  # 128 MiB of what every strategy adds to each load and to the memory at each time


@dataclass(frozen=True)
class Balancing:
    """Descents for problems with loads; all numbers were chosen by hand on tasks of embedding tables.

    Attributes:
      squarings: norms of the loads, one after the other, as `Balance.descend` takes them.
      most_pairs: nodes that are tried together with another one before a descent ends.
      num_kicks: descents from the best choice with a few nodes changed, without a time limit.
      kick_nodes: changed by a kick.
      end_share: of the time limit, when the phase ends.
      stop_gap: between the best choice and the bound, relative, at which it ends.
    """

    squarings: tuple[int | None, ...] = (4, 8)
    most_pairs: int = 200
    num_kicks: int = 4
    kick_nodes: int = 3
    end_share: float = 0.5
    stop_gap: float = 0.0

    def __call__(self, search: Search) -> Iterator[float]:
        """Levels the loads; has no bound."""
        flat, polish = search.flat, search.polish
        if not flat.load.shape[1] or int(flat.start[-1]) * (flat.base.size + flat.load.shape[1]) > _MOST_TABLE_NUMBERS:
            return
        balance = Balance(flat, polish.rng)
        balance.begin_greedily(self.squarings[0])
        progress = search.clock.progress(self.num_kicks + 1, self.end_share, 0.1)
        for done in range(10**9):
            for squarings in self.squarings:
                while balance.descend(squarings, self.most_pairs):
                    polish.offer(balance.choice)
                    yield NO_BOUND
            if progress(done + 1) >= 1 or polish.best_cost - search.bound <= self.stop_gap * abs(polish.best_cost):
                return
            balance.begin(np.asarray(polish.best))
            balance.kick(self.kick_nodes)

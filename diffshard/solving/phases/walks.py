"""Metropolis walks of many replicas under parallel tempering, from the best choice.

A walk changes one node at a time and is priced exactly, largest load included, which forest moves cannot see.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from diffshard.solving.moves.replicas import Replicas
from diffshard.solving.phases.base import NO_BOUND, Search


@dataclass(frozen=True)
class Walks:
    """Tempered walks, for small graphs and for loads; all numbers were chosen by hand on the contest's instances.

    Attributes:
      num_walks: side by side, each at a temperature of its own.
      num_random_starts: the hottest walks, which begin at random choices; the others begin at the best choice.
      steps_per_node: of each walk, without a time limit.
      temperatures: lowest and highest, in the bound's cost per node.
      steps_per_exchange: steps between two exchanges of neighbours in temperature.
      steps_per_offer: steps between two yields, at which the walks' best choice is offered to the search.
    """

    num_walks: int = 32
    num_random_starts: int = 0
    steps_per_node: float = 40
    temperatures: tuple[float, float] = (3e-5, 3e-2)
    steps_per_exchange: int = 10
    steps_per_offer: int = 100

    def __call__(self, search: Search) -> Iterator[float]:
        """Walks; has no bound."""
        polish, num_nodes = search.polish, len(search.flat.sizes)
        temperatures = search.cost_per_node * np.geomspace(*self.temperatures, self.num_walks)
        replicas = Replicas(search.flat, polish.rng, self._starts(search))
        progress = search.clock.progress(round(self.steps_per_node * num_nodes), 1.0)
        step = 0
        while progress(step) < 1:
            for _ in range(self.steps_per_exchange):
                replicas.step(temperatures)
            replicas.temper(temperatures)
            step += self.steps_per_exchange
            if step % self.steps_per_offer == 0:
                if replicas.best is not None:
                    polish.offer(replicas.best)
                yield NO_BOUND

    def _starts(self, search: Search) -> np.ndarray:
        """Returns the choices `[num_walks, V]` at which the walks begin, the coldest first."""
        starts = np.repeat(search.polish.best[None], self.num_walks, axis=0)
        if self.num_random_starts:
            sizes = search.flat.sizes
            random_choices = search.polish.rng.integers(sizes, size=(self.num_random_starts, len(sizes)))
            starts[self.num_walks - self.num_random_starts :] = random_choices
        return starts

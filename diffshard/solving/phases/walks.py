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
    """Tempered walks, on small graphs and wherever there are loads; numbers chosen by hand on the contest's instances.

    Attributes:
      num_walks: side by side, each at a temperature of its own.
      steps_per_node: of each walk, without a time limit.
      steps_per_node_with_loads: the same where there are loads, which forest moves do not see.
      temperatures: lowest and highest, in the bound's cost per node.
      temperatures_with_loads: the same where there are loads.
      steps_per_exchange: steps between two exchanges of neighbours in temperature.
      steps_per_offer: steps between two yields, at which the walks' best choice is offered to the search.
    """

    num_walks: int = 32
    steps_per_node: float = 40
    steps_per_node_with_loads: float = 200
    temperatures: tuple[float, float] = (3e-5, 3e-2)
    temperatures_with_loads: tuple[float, float] = (1e-4, 1.0)
    steps_per_exchange: int = 10
    steps_per_offer: int = 100

    def __call__(self, search: Search) -> Iterator[float]:
        """Walks; has no bound."""
        if not (search.is_small or search.has_loads):
            return
        polish, num_nodes = search.polish, len(search.flat.sizes)
        steps_per_node = self.steps_per_node_with_loads if search.has_loads else self.steps_per_node
        span = self.temperatures_with_loads if search.has_loads else self.temperatures
        temperatures = search.cost_per_node * np.geomspace(*span, self.num_walks)
        replicas = Replicas(search.flat, polish.rng, self._starts(search))
        progress = search.clock.progress(round(steps_per_node * num_nodes), 1.0)
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
        """Returns `[num_walks, V]` the best choice for all; with loads the hotter half starts at random choices."""
        starts = np.repeat(search.polish.best[None], self.num_walks, axis=0)
        if search.has_loads:
            cold, sizes = self.num_walks // 2, search.flat.sizes
            starts[cold:] = search.polish.rng.integers(sizes, size=(self.num_walks - cold, len(sizes)))
        return starts

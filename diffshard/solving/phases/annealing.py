"""Annealing: forest moves from the best choice, with noise on the costs that dies away."""

from collections.abc import Iterator
from dataclasses import dataclass

from diffshard.solving.phases.base import NO_BOUND, Search


@dataclass(frozen=True)
class Annealing:
    """Annealed forest moves, which do not see loads; all numbers were chosen by hand on the contest's instances.

    Attributes:
      num_moves: without a time limit.
      end_share: of the time limit, when the phase ends.
      least_share: of the time limit, that the phase has where those before it lasted beyond that end.
      first_temperature: in the bound's cost per node.
      cooling: the last temperature as a share of the first.
      noise_end: how far the phase is when its noise stops.
      price_rate: by how much memory prices rise after the first moves; the rate falls to its square.
    """

    num_moves: int = 300
    end_share: float = 0.75
    least_share: float = 0.05
    first_temperature: float = 0.1
    cooling: float = 0.01
    noise_end: float = 0.85
    price_rate: float = 0.1

    def __call__(self, search: Search) -> Iterator[float]:
        """Makes one move of a random forest after the other; has no bound."""
        polish = search.polish
        progress = search.clock.progress(self.num_moves, self.end_share, self.least_share)
        polish.begin(polish.best.copy(), polish.best_memory)
        i = 0
        while (share := progress(i)) < 1:
            temperature = self.first_temperature * search.cost_per_node * self.cooling**share
            polish.anneal(temperature if share < self.noise_end else 0.0, self.price_rate ** (1 + share))
            yield NO_BOUND
            i += 1

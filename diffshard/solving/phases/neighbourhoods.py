"""Large-neighbourhood search: balls of nodes are perturbed and polished at once, again and again."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from diffshard.solving.moves.neighbourhoods import perturb, split
from diffshard.solving.phases.base import NO_BOUND, Search


@dataclass(frozen=True)
class Neighbourhoods:
    """Perturbed balls, where no loads join all nodes; all numbers were chosen by hand on the contest's instances.

    Attributes:
      num_rounds: perturbations of all balls, at most, without a time limit.
      patience: rounds without improvement after which the phase ends, without a time limit.
      nodes_per_ball: the median of a large graph's partitions; a small graph is one ball.
      ball_spread: standard deviation of the logarithm of the nodes per ball.
      rounds_per_partition: for how many rounds the same balls are perturbed.
      num_moves: forest moves of each round.
      most_noise: on costs, in the bound's cost per node.
      memory_spread: standard deviation of the logarithm of a ball's own factor on the price of memory.
      memory_spread_of_small: the same for a node of a small graph.
    """

    num_rounds: int = 600
    patience: int = 60
    nodes_per_ball: float = 50
    ball_spread: float = 0.7
    rounds_per_partition: int = 6
    num_moves: int = 8
    most_noise: float = 0.1
    memory_spread: float = 0.3
    memory_spread_of_small: float = 1.0

    def __call__(self, search: Search) -> Iterator[float]:
        """Perturbs and polishes; has no bound."""
        if search.has_loads:
            return
        polish, rng, num_nodes = search.polish, search.polish.rng, len(search.flat.sizes)
        spread = self.memory_spread_of_small if search.is_small else self.memory_spread
        noise = self.most_noise * search.cost_per_node
        progress = search.clock.progress(self.num_rounds, 1.0)
        i, last_improvement, partition = 0, 0, None
        while progress(i) < 1:
            if search.clock.time_limit_s is None and i - last_improvement >= self.patience:
                return
            if partition is None or i % self.rounds_per_partition == 0:
                nodes = self.nodes_per_ball * np.exp(self.ball_spread * rng.normal())
                partition = split(search.flat, rng, 1 if search.is_small else round(num_nodes / nodes), polish.grow)
            rank = polish.best_rank
            perturb(polish, partition, self.num_moves, noise, spread)
            i += 1
            if polish.best_rank < rank:
                last_improvement = i
            yield NO_BOUND

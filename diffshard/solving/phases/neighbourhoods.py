"""Large-neighbourhood search: balls of nodes are perturbed and polished at once, again and again."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from diffshard.solving.moves.neighbourhoods import perturb, split
from diffshard.solving.phases.base import NO_BOUND, Search


@dataclass(frozen=True)
class Neighbourhoods:
    """Perturbed balls, whose moves do not see loads; all numbers were chosen by hand on the contest's instances.

    Attributes:
      num_rounds: perturbations of all balls, at most, without a time limit.
      patience: rounds without improvement after which the phase ends, without a time limit.
      nodes_per_ball: the median over partitions; infinite for one ball of all nodes.
      ball_spread: standard deviation of the logarithm of the nodes per ball.
      rounds_per_partition: for how many rounds the same balls are perturbed.
      num_moves: forest moves of each round.
      most_noise: on costs, in the bound's cost per node.
      memory_spread: standard deviation of the logarithm of the factor that each ball, and each node, puts on the price
        of memory.
    """

    num_rounds: int = 600
    patience: int = 60
    nodes_per_ball: float = 50
    ball_spread: float = 0.7
    rounds_per_partition: int = 6
    num_moves: int = 8
    most_noise: float = 0.1
    memory_spread: float = 0.3

    def __call__(self, search: Search) -> Iterator[float]:
        """Perturbs and polishes; has no bound."""
        polish, rng, num_nodes = search.polish, search.polish.rng, len(search.flat.sizes)
        noise = self.most_noise * search.cost_per_node
        progress = search.clock.progress(self.num_rounds, 1.0)
        i, last_improvement, partition = 0, 0, None
        while progress(i) < 1:
            if search.clock.time_limit_s is None and i - last_improvement >= self.patience:
                return
            if partition is None or i % self.rounds_per_partition == 0:
                nodes = self.nodes_per_ball * np.exp(self.ball_spread * rng.normal())
                partition = split(search.flat, rng, max(1, round(num_nodes / nodes)), polish.grow)
            rank = polish.best_rank
            perturb(polish, partition, self.num_moves, noise, self.memory_spread)
            i += 1
            if polish.best_rank < rank:
                last_improvement = i
            yield NO_BOUND

"""Phases that improve the choice of a search: annealed tree moves, large neighbourhoods, chains, levelled loads.

They differ in what they see. Tree moves change much at once but see no loads; a chain changes one node and is priced
exactly; a branch of the dual raises the bound as well. `SideBySide` gives more of the time to those that improved the
choice lately.
"""

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from diffshard.solving.csr import first_least
from diffshard.solving.dual.ascent import Branching
from diffshard.solving.moves.random_moves import Chains, perturb, split
from diffshard.solving.moves.single_nodes import Balance
from diffshard.solving.phases.starts import NO_BOUND, Phase, Search


@dataclass(frozen=True)
class Annealing:
    """Annealed tree moves, which do not see loads; all numbers were chosen by hand on the contest's instances.

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


@dataclass(frozen=True)
class Neighbourhoods:
    """Large neighbourhoods, whose moves do not see loads; all numbers were chosen by hand on the contest's instances.

    Attributes:
      num_rounds: perturbations of all neighbourhoods, at most, without a time limit.
      patience: rounds without improvement after which the phase ends, without a time limit.
      nodes_per_neighbourhood: the median over partitions; infinite for one neighbourhood of all nodes.
      size_spread: standard deviation of the logarithm of the nodes per neighbourhood.
      rounds_per_partition: for how many rounds the same neighbourhoods are perturbed.
      most_noise: on costs, in the bound's cost per node.
      memory_spread: standard deviation of the logarithm of the factor that each neighbourhood, and each node, puts on
        the price of memory.
    """

    num_rounds: int = 600
    patience: int = 60
    nodes_per_neighbourhood: float = 50
    size_spread: float = 0.7
    rounds_per_partition: int = 6
    num_moves: int = 8
    most_noise: float = 0.1
    memory_spread: float = 0.3

    def __call__(self, search: Search) -> Iterator[float]:
        """Perturbs and polishes; has no bound."""
        polish, rng, num_nodes = search.polish, search.polish.rng, len(search.csr.sizes)
        noise = self.most_noise * search.cost_per_node
        progress = search.clock.progress(self.num_rounds, 1.0)
        i, last_improvement, partition = 0, 0, None
        while progress(i) < 1:
            if search.clock.time_limit_s is None and i - last_improvement >= self.patience:
                return
            if partition is None or i % self.rounds_per_partition == 0:
                nodes = self.nodes_per_neighbourhood * np.exp(self.size_spread * rng.normal())
                partition = split(search.csr, rng, max(1, round(num_nodes / nodes)), polish.grow)
            rank = polish.best_rank
            perturb(polish, partition, self.num_moves, noise, self.memory_spread)
            i += 1
            if polish.best_rank < rank:
                last_improvement = i
            yield NO_BOUND


@dataclass(frozen=True)
class TemperedChains:
    """Tempered chains, for small graphs and for loads; all numbers were chosen by hand on the contest's instances.

    Attributes:
      num_chains: side by side, each at a temperature of its own.
      num_random_starts: the hottest chains, which begin at random choices; the others begin at the best choice.
      steps_per_node: of each chain, without a time limit.
      temperatures: lowest and highest, in the bound's cost per node.
      steps_per_exchange: steps between two exchanges of neighbours in temperature.
      steps_per_offer: steps between two yields, at which the chains' best choice is offered to the search.
    """

    num_chains: int = 32
    num_random_starts: int = 0
    steps_per_node: float = 40
    temperatures: tuple[float, float] = (3e-5, 3e-2)
    steps_per_exchange: int = 10
    steps_per_offer: int = 100

    def __call__(self, search: Search) -> Iterator[float]:
        """Runs the chains; has no bound."""
        polish, num_nodes = search.polish, len(search.csr.sizes)
        temperatures = search.cost_per_node * np.geomspace(*self.temperatures, self.num_chains)
        chains = Chains(search.csr, polish.rng, self._starts(search))
        progress = search.clock.progress(round(self.steps_per_node * num_nodes), 1.0)
        step = 0
        while progress(step) < 1:
            for _ in range(self.steps_per_exchange):
                chains.step(temperatures)
            chains.temper(temperatures)
            step += self.steps_per_exchange
            if step % self.steps_per_offer == 0:
                if chains.best is not None:
                    polish.offer(chains.best)
                yield NO_BOUND

    def _starts(self, search: Search) -> np.ndarray:
        """Returns the choices `[num_chains, V]` at which the chains begin, the coldest first."""
        starts = np.repeat(search.polish.best[None], self.num_chains, axis=0)
        if self.num_random_starts:
            sizes = search.csr.sizes
            random_choices = search.polish.rng.integers(sizes, size=(self.num_random_starts, len(sizes)))
            starts[self.num_chains - self.num_random_starts :] = random_choices
        return starts


_MOST_TABLE_NUMBERS = 1 << 24  # 128 MiB of what every strategy adds to each load and to the memory at each time


@dataclass(frozen=True)
class Balancing:
    """Descents for problems with loads; all numbers were chosen by hand on tasks of embedding tables.

    Attributes:
      squarings: norms of the loads, one after the other, as `Balance.descend` takes them.
      most_pairs: nodes that are tried together with another one before a descent ends.
      num_kicks: descents from the best choice with a few nodes changed, without a time limit.
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
        csr, polish = search.csr, search.polish
        if not csr.load.shape[1] or int(csr.start[-1]) * (csr.base.size + csr.load.shape[1]) > _MOST_TABLE_NUMBERS:
            return
        balance = Balance(csr, polish.rng)
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


@dataclass(frozen=True)
class Branches:
    """Branches of the dual, for small graphs; all numbers were chosen by hand on the contest's instances.

    Attributes:
      num_branches: at most, without a time limit.
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
            polish.begin(first_least(ascent.absorbed_cost, search.csr.sizes), ascent.best[1].memory)
            for _ in range(self.num_moves):
                polish.anneal(0.0, 0.1)
            yield branching.bound
            if not more:
                return
            if (i + 1) % self.review_interval == 0:
                if branching.bound - reviewed_bound < self.least_closed * (polish.best_cost - reviewed_bound):
                    return
                reviewed_bound = branching.bound


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

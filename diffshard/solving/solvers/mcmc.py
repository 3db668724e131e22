"""Markov chain Monte Carlo, as FlexFlow searches: random changes are taken if cheaper, or by a chance that falls.

Source: Jia et al., "Beyond Data and Model Parallelism for Deep Neural Networks" (MLSys 2019), section 6.
"""

from collections.abc import Iterator

import jax
import numpy as np

from cost.base import Problem, num_strategies
from diffshard.base import Proposal
from diffshard.solving.csr import numpy_generator, to_csr, with_ceiling
from diffshard.solving.examples import chain
from diffshard.solving.moves.random_moves import Chains
from diffshard.solving.phases.starts import Clock

_NUM_CHAINS = 8  # from random choices; chosen by hand
_STEPS_PER_NODE = 100  # of each chain, without a time limit; chosen by hand
_STEPS_PER_PROPOSAL = 10  # chosen by hand
_TEMPERATURES = 1.0, 1e-4  # first and last, in the best chain's cost per node; chosen by hand


def solve(problem: Problem, *, time_limit_s: float | None = None, key: jax.Array) -> Iterator[Proposal]:
    """Yields the best of the chains; has no bound."""
    rng, csr = numpy_generator(key), with_ceiling(to_csr(problem))
    sizes = num_strategies(problem)
    chains = Chains(csr, rng, rng.integers(sizes, size=(_NUM_CHAINS, len(sizes))))
    progress = Clock(time_limit_s).progress(_STEPS_PER_NODE * len(sizes), 1.0)
    hot, cold = _TEMPERATURES
    proposed_cost, share, step = np.inf, 0.0, 0
    while share < 1:
        scale = np.abs(chains.cost).min() / len(sizes)
        chains.step(scale * hot * (cold / hot) ** share)
        step += 1
        share = progress(step)
        if step % _STEPS_PER_PROPOSAL == 0 or share >= 1:
            yield Proposal(chains.best if chains.best_cost < proposed_cost else None)
            proposed_cost = chains.best_cost
    if chains.best is None:
        yield Proposal(chains.choice[chains.excess.argmin()])


EXAMPLE = chain

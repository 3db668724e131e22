"""Random restarts: single-node moves bring random choices down to local optima, of which the best is returned.

It is the plainest baseline.

Source: multi-start local search, as in Martí, Resende and Ribeiro, "Multi-start methods for combinatorial optimization"
(European Journal of Operational Research, 2013), without its memory of earlier starts.
"""

from collections.abc import Iterator

import jax

from cost.base import Problem
from diffshard.base import Proposal
from diffshard.solving.csr import numpy_generator, to_csr, with_ceiling
from diffshard.solving.examples import chain
from diffshard.solving.moves.single_nodes import Descent

_STARTS_PER_ROUND = 16  # side by side; chosen by hand
_NUM_ROUNDS = 8  # without a time limit; chosen by hand


def solve(problem: Problem, *, time_limit_s: float | None = None, key: jax.Array) -> Iterator[Proposal]:
    """Yields the best of each round of starts, until the time is over or for a fixed number of rounds; has no bound."""
    rng, csr = numpy_generator(key), with_ceiling(to_csr(problem))
    nodes = len(csr.sizes)
    num_done = 0
    while time_limit_s is not None or num_done < _NUM_ROUNDS:  # the loop of `diffshard.solve` watches the time
        descent = Descent(csr, rng.integers(csr.sizes, size=(_STARTS_PER_ROUND, nodes)))
        yield from descent.proposals(rng.permutation(nodes))
        num_done += 1


EXAMPLE = chain

"""Exact reductions of a `Problem`, each with an exact way back: the reduced optimum expands to the original one."""

import numpy as np

from cost.problem import Problem
from diffshard.presolve.elimination import eliminate
from diffshard.presolve.memory import compress_memory
from diffshard.presolve.reduction import InfeasibleError, Reduction, chain, unchanged
from diffshard.presolve.ties import merge_ties

__all__ = [
    "InfeasibleError",
    "Reduction",
    "chain",
    "compress_memory",
    "eliminate",
    "merge_ties",
    "reduce",
    "unchanged",
]


_ROUNDS = 5


def reduce(problem: Problem) -> Reduction:
    """All reductions, in the order that leaves the least."""
    if not len(problem.node_cost):
        return unchanged(problem)
    done = chain(problem, (merge_ties, compress_memory, eliminate, compress_memory))
    for _ in range(_ROUNDS):
        if not any(np.isinf(cost).any() for cost in done.problem.node_cost):
            break
        # Strategies that cannot fit are gone after this, which leaves less room for the others.
        done = chain(done, (eliminate, compress_memory))
    return done

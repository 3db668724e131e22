"""Exact reductions of a `Problem`, each with an exact way back: the reduced optimum expands to the original one."""

import functools

import numpy as np

from cost.base import Problem
from diffshard.base import InfeasibleError
from diffshard.solving.presolve.elimination import eliminate
from diffshard.solving.presolve.memory import compress_memory
from diffshard.solving.presolve.reduction import Reduction, chain, unchanged
from diffshard.solving.presolve.ties import merge_ties

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
    done = chain(problem, (merge_ties, compress_memory, eliminate))
    for _ in range(_ROUNDS):
        before = set(done.problem.usage_node.tolist())
        done = chain(done, (compress_memory,))
        # Strategies that cannot fit leave less room for others, and nodes whose memory is free now can be eliminated.
        changed = before - set(done.problem.usage_node.tolist())
        changed |= {v for v, cost in enumerate(done.problem.node_cost) if np.isinf(cost).any()}
        if not changed:
            break
        done = chain(done, (functools.partial(eliminate, changed=changed),))
    return done

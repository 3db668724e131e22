"""All reductions in the order that leaves the least: ties, memory, then elimination, again while nodes lose memory."""

import functools

import numpy as np

from cost.base import Problem
from diffshard.solving.presolve.base import Reduction, compose, identity
from diffshard.solving.presolve.elimination import eliminate
from diffshard.solving.presolve.memory import compress_memory
from diffshard.solving.presolve.ties import merge_ties

_MOST_ROUNDS = 5
"""Rounds of memory and elimination after the first one; further ones hardly ever find anything."""


def presolve(problem: Problem) -> Reduction:
    """Applies all reductions, in the order that leaves the least, and returns them as one.

    Raises:
      InfeasibleError: some node has no allowed strategy.
    """
    if not len(problem.node_cost):
        return identity(problem)
    reduction = compose(problem, merge_ties, compress_memory, eliminate)
    for _ in range(_MOST_ROUNDS):
        nodes_with_memory = set(reduction.problem.usage_node.tolist())
        reduction = compose(reduction, compress_memory)
        # Strategies that cannot fit leave less room for others, and nodes whose memory is free now can be eliminated.
        freed_nodes = nodes_with_memory - set(reduction.problem.usage_node.tolist())
        freed_nodes |= {v for v, cost in enumerate(reduction.problem.node_cost) if np.isinf(cost).any()}
        if not freed_nodes:
            break
        reduction = compose(reduction, functools.partial(eliminate, changed_nodes=freed_nodes))
    return reduction

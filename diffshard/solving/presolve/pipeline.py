"""All reductions in the order that leaves the least: ties, memory, then elimination, again while nodes lose memory."""

import functools
import math
import time

import numpy as np

from cost.base import Problem
from diffshard.solving.presolve.base import Reduction, compose, identity
from diffshard.solving.presolve.elimination import eliminate
from diffshard.solving.presolve.memory import compress_memory
from diffshard.solving.presolve.ties import merge_ties

_MOST_ROUNDS = 5
"""Rounds of memory and elimination after the first one; further ones hardly ever find anything."""


def presolve(problem: Problem, deadline: float = math.inf) -> Reduction:
    """Applies all reductions, in the order that leaves the least, and returns them as one.

    Args:
      problem: valid.
      deadline: by `time.perf_counter`; no reduction begins after it, and what the ones before it found is returned. One
        reduction takes up to four seconds for forty thousand nodes.

    Raises:
      InfeasibleError: some node has no allowed strategy.
    """
    reduction = identity(problem)
    if not len(problem.node_cost):
        return reduction
    for step in (merge_ties, compress_memory, eliminate):
        if time.perf_counter() > deadline:
            return reduction
        reduction = compose(reduction, step)
    for _ in range(_MOST_ROUNDS):
        if time.perf_counter() > deadline:
            break
        nodes_with_memory = set(reduction.problem.usage_node.tolist())
        reduction = compose(reduction, compress_memory)
        # Strategies that cannot fit leave less room for others, and nodes whose memory is free now can be eliminated.
        freed_nodes = nodes_with_memory - set(reduction.problem.usage_node.tolist())
        freed_nodes |= {v for v, cost in enumerate(reduction.problem.node_cost) if np.isinf(cost).any()}
        if not freed_nodes:
            break
        reduction = compose(reduction, functools.partial(eliminate, changed_nodes=freed_nodes))
    return reduction

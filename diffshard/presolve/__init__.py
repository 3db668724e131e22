"""Exact reductions of a `Problem`, each with an exact way back: the reduced optimum expands to the original one."""

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


def reduce(problem: Problem) -> Reduction:
    """All reductions, in the order that leaves the least."""
    if not len(problem.node_cost):
        return unchanged(problem)
    return chain(problem, (merge_ties, compress_memory, eliminate, compress_memory))

"""Dynamic programming, exact where the graph is a chain, a tree or a forest without memory limit and loads.

Source: Bellman (1957); Viterbi (1967). It is the same min-plus elimination as in presolve, as a solver of its own.
"""

from collections.abc import Iterator

import jax
import numpy as np

from cost.problem import Problem
from diffshard.flat import chosen_cost, flatten, with_ceiling
from diffshard.forest import best_choices, grow
from diffshard.polish import Field
from diffshard.solve import Proposal


def solve(problem: Problem, *, time_limit_s: float | None = None, key: jax.Array | None = None) -> Iterator[Proposal]:
    """Yields the optimum and its cost as the bound.

    Raises:
      ValueError: the graph has a cycle, a memory limit can bind, or devices have loads of their own.
    """
    del time_limit_s, key
    flat = with_ceiling(flatten(problem))
    if flat.base.size or flat.load.shape[1]:
        what = "a memory limit" if flat.base.size else "loads of devices"
        raise ValueError(f"`solver` 'dynamic' takes no problem with {what}, which couple all nodes; take 'gradient'.")
    forest = grow(flat, np.arange(len(flat.sizes)))
    if len(forest.node) < len(flat.sizes):
        outside = np.setdiff1d(np.arange(len(flat.sizes)), forest.node)[0]
        raise ValueError(
            f"`solver` 'dynamic' needs a graph without cycles; node {outside} closes one; take 'gradient'."
        )
    start = np.zeros(len(flat.sizes), np.int64)
    choice = best_choices(flat, forest, Field(flat)(flat.cost, start)[None], start)[0]
    yield Proposal(choice, chosen_cost(flat, choice))

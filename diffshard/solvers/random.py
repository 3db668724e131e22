"""Uniform choices, the cheapest kept: what every other solver has to beat."""

from collections.abc import Iterator

import jax

from cost.problem import Problem, num_strategies
from diffshard.solve import Proposal, seeded

_DRAWS = 1000


def solve(problem: Problem, *, time_limit_s: float | None = None, key: jax.Array) -> Iterator[Proposal]:
    """Yields a thousand choices, or as many as the time limit allows; has no bound."""
    rng, sizes = seeded(key), num_strategies(problem)
    count = 0
    while count < _DRAWS or time_limit_s is not None:
        yield Proposal(rng.integers(sizes))
        count += 1

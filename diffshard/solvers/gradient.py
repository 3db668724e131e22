"""The default: climbs the dual by its gradient, rounds with its messages and prices, improves by forest moves."""

import time
from collections.abc import Iterator

import jax
import numpy as np

from cost.problem import Problem
from diffshard.ascent import Ascent, priced
from diffshard.flat import chosen_cost, chosen_memory, flatten, memory_price, ragged
from diffshard.forest import best_choices, grow
from diffshard.solve import Proposal, seeded

_SWEEPS = 300
_ROUNDS = 300
_CLOSE = 1e-6  # relative gap at which the search has nothing left to win


def solve(problem: Problem, *, time_limit_s: float | None = None, key: jax.Array) -> Iterator[Proposal]:
    """Yields the dual's bound and roundings of it, then better and better choices."""
    start = time.perf_counter()
    rng = seeded(key)
    flat = flatten(problem)
    ascent = Ascent(flat)
    limited = bool(flat.base.size)
    for i in range(_SWEEPS):
        ascent.step(i / _SWEEPS)
        if i % 20 == 19 and not limited:
            rounded = chosen_cost(flat, _argmin(ascent.absorbed, flat))
            if rounded - ascent.bound <= _CLOSE * abs(rounded):
                break
        if time_limit_s is not None and time.perf_counter() - start > 0.4 * time_limit_s:
            break
        if i % 20 == 0:
            yield Proposal(_argmin(ascent.absorbed, flat))
    yield Proposal(_argmin(ascent.absorbed, flat), ascent.certified())
    size = flat.sizes[flat.target]
    to = ragged(flat.start[flat.target], size)
    count = len(flat.sizes)
    forests = [grow(flat, rng.permutation(count)) for _ in range(12)]
    prices = ascent.best[1]
    memory = prices.memory.copy()
    floor = 1e-5 * max(abs(ascent.bound), 1e-30) / np.maximum(flat.limit, 1e-30)
    best, best_cost = _argmin(ascent.absorbed, flat), np.inf
    choice = best.copy()
    for i in range(_ROUNDS):
        if best_cost < np.inf and best_cost - ascent.bound <= _CLOSE * abs(best_cost):
            break
        cost = flat.cost + flat.load @ prices.load + (memory_price(flat, memory) if memory.any() else 0)
        if i % 10 == 9:
            node = np.repeat(np.exp(rng.normal(size=count) * (rng.random(count) < 0.05)), flat.sizes)
            choice, cost = best.copy(), cost * node
        at = ragged(flat.matrix + choice[flat.source] * size, size)
        field = cost + np.bincount(to, flat.entries[at], len(cost))
        choice = best_choices(flat, forests[rng.integers(len(forests))], field[None], choice)[0]
        over = chosen_memory(flat, choice) > flat.limit if flat.base.size else np.zeros(1, bool)
        if not over.any() and chosen_cost(flat, choice) < best_cost:
            best, best_cost = choice.copy(), chosen_cost(flat, choice)
            yield Proposal(best)
        if flat.base.size:
            memory = np.where(over, np.maximum(memory, floor) * 1.25, memory * 0.97)
        if time_limit_s is not None and time.perf_counter() - start > time_limit_s:
            break


def _argmin(absorbed: np.ndarray, flat) -> np.ndarray:
    return np.array([int(np.argmin(row)) for row in np.split(absorbed, flat.start[1:-1])], np.int64)

"""Branch and bound against exhaustive search: never above the optimum on the way, and at it in the end."""

import math

import numpy as np
import pytest

from cost.base import FORBIDDEN, Problem
from diffshard.solving.csr import to_csr, with_ceiling
from diffshard.solving.dual.ascent import Ascent, Branching
from experiments.fuzzing.truth import Truth
from tests.diffshard.solving.random_problems import EMPTY, small_problem
from tests.diffshard.solving.random_problems import optimum as least_cost

KINDS = {
    "plain": {},
    "forbidden": {"forbidden": 0.15},
    "memory": {"memory": True},
    "loads": {"devices": 3},
    "all": {"forbidden": 0.1, "memory": True, "devices": 2},
}
MOST_STEPS = 200


def _varied(seed: int, kind: str) -> Problem:
    """Costs of either sign in any unit, forbidden strategies of both spellings, memory of one device or two."""
    rng = np.random.default_rng(seed)
    problem = small_problem(seed, **KINDS[kind])
    unit = 10.0 ** rng.integers(-9, 10)
    least = rng.choice([0, -15, -40])
    nodes = [unit * (cost + least) for cost in problem.node_cost]
    if kind in ("forbidden", "all"):
        v = int(rng.integers(len(nodes)))
        nodes[v] = np.where(np.arange(len(nodes[v])) == 1, rng.choice([np.inf, FORBIDDEN]), nodes[v])
    if kind in ("memory", "all") and rng.random() < 0.5:
        limit = problem.memory_limit * rng.choice([[1, 1], [1, np.inf], [np.inf, 1], [0, 1]])
        limit[problem.memory_limit == np.inf] = np.inf
        usage = [np.stack([row, rng.permutation(row)], axis=1) for row in problem.usage]
        problem = problem._replace(usage=usage, memory_limit=limit)
    edges, load = ([unit * array for array in arrays] for arrays in (problem.edge_cost, problem.load))
    return problem._replace(node_cost=nodes, edge_cost=edges, load=load)


def _branching(problem: Problem) -> Branching:
    ascent = Ascent(with_ceiling(to_csr(problem)))
    for i in range(10):
        ascent.step(i / 10)
    return Branching(ascent, ascent.certified_bound())


@pytest.mark.parametrize("kind", KINDS)
def test_bounds_rise_to_the_optimum_in_hand(kind):
    split = 0
    for seed in range(40):
        problem = _varied(seed, kind)
        optimum = least_cost(problem)
        if math.isinf(optimum):
            continue
        branching = _branching(problem)
        before, steps = branching.bound, 1
        while branching.step(optimum):
            assert before <= branching.bound <= optimum, f"seed {seed}"
            before, steps = branching.bound, steps + 1
            assert steps < MOST_STEPS, f"seed {seed}"
        assert branching.bound <= optimum
        assert branching.bound == pytest.approx(optimum, rel=1e-6), f"seed {seed}"
        split += steps > 1
    assert split > 3 or kind in ("plain", "forbidden")  # there the root's bound is nearly always tight


@pytest.mark.parametrize("kind", ["forbidden", "all"])
def test_bounds_hold_when_a_worse_choice_is_in_hand(kind):
    for seed in range(40, 70):
        problem = _varied(seed, kind)
        optimum = least_cost(problem)
        branching = _branching(problem)
        for _ in range(30 if math.isfinite(optimum) else 0):
            more = branching.step(optimum + 0.3 * abs(optimum))
            assert branching.bound <= optimum, f"seed {seed}"
            if not more:
                break


def test_the_only_choice_of_a_branch_is_no_bound_above_itself_where_loads_are_negative():
    rng = np.random.default_rng(0)
    for _ in range(20):
        nodes = [rng.integers(-30, 0, 4).astype(float) for _ in range(2)]
        load = [-1e9 * rng.integers(35, 52, (4, 3)) for _ in range(2)]
        usage = [rng.choice([0.2, 0.6, 0.8], (4, 2)) for _ in range(2)]
        interval = np.array([[2, 4], [2, 4]])
        problem = Problem(nodes, EMPTY, [], np.arange(2), usage, interval, memory_limit=0.8, load=load)
        optimum = Truth(problem).least_cost()
        if optimum is None:
            continue
        branching = _branching(problem)
        while branching.step(float(optimum)):
            assert branching.bound <= optimum
        assert branching.bound <= optimum

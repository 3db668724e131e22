"""The ascent: its bound holds at every moment."""

import numpy as np
import pytest

from cost.base import Problem
from diffshard.solving.csr import to_csr, with_ceiling
from diffshard.solving.dual.ascent import Ascent
from experiments.fuzzing.truth import Truth
from tests.diffshard.solving.random_problems import EMPTY, KINDS, optimum, small_problem


@pytest.mark.parametrize("kind", KINDS)
def test_the_dual_bound_holds_against_exhaustive_search(kind):
    """At every moment of the ascent, and tight where the graph is a tree without coupling."""
    for seed in range(20):
        problem = small_problem(seed, **KINDS[kind])
        least = optimum(problem)
        ascent = Ascent(with_ceiling(to_csr(problem)))
        for i in range(30):
            ascent.step(i / 30)
            if i % 10 == 9:
                assert ascent.certified_bound() <= least + 1e-9, f"seed {seed}"
        if kind == "plain" and len(problem.edge_cost) < 2:
            assert ascent.certified_bound() == pytest.approx(least, rel=1e-6, abs=1e-6)


def test_the_dual_bound_holds_where_costs_and_loads_cancel():
    """Costs of up to 1e17 and loads of the same size below zero: what remains is smaller than the rounding of a sum."""
    for seed in range(60):
        rng = np.random.default_rng(seed)
        cost = [rng.choice([-1, 1]) * 10.0 ** rng.uniform(10, 17, 3) for _ in range(3)]
        load = [np.repeat(rng.random((3, 1)) - part[:, None], 5, axis=1) for part in cost]
        problem = Problem(cost, EMPTY, [], load=load)
        ascent = Ascent(to_csr(problem))
        for i in range(5):
            ascent.step(i / 5)
        optimum = Truth(problem).least_cost()
        assert optimum is not None
        assert ascent.certified_bound() <= optimum, f"seed {seed}"

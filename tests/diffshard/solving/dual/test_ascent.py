"""The climb: its bound holds at every moment."""

import pytest

from diffshard.solving.dual.ascent import Ascent
from diffshard.solving.flat import flatten, with_ceiling
from tests.diffshard.solving.random_problems import KINDS, optimum, small_problem


@pytest.mark.parametrize("kind", KINDS)
def test_the_dual_bound_holds_against_exhaustive_search(kind):
    """At every moment of the climb, and tight where the graph is a tree without coupling."""
    for seed in range(20):
        problem = small_problem(seed, **KINDS[kind])
        least = optimum(problem)
        ascent = Ascent(with_ceiling(flatten(problem)))
        for i in range(30):
            ascent.step(i / 30)
            if i % 10 == 9:
                assert ascent.certified_bound() <= least + 1e-9, f"seed {seed}"
        if kind == "plain" and len(problem.edge_cost) < 2:
            assert ascent.certified_bound() == pytest.approx(least, rel=1e-6, abs=1e-6)

"""The flat layout: its costs and memory are those of the problem."""

import numpy as np
import pytest

from cost.base import num_strategies
from cost.evaluation import evaluate
from diffshard.solving.flat import chosen_cost, chosen_memory, flatten
from tests.diffshard.solving.random_problems import small_problem


def test_flat_costs_and_memory_are_those_of_the_problem():
    for seed in range(20):
        problem = small_problem(seed, memory=True, devices=2)
        flat, rng = flatten(problem), np.random.default_rng(seed)
        for _ in range(5):
            choice = rng.integers(num_strategies(problem))
            expected = evaluate(problem, choice)
            assert chosen_cost(flat, choice) == pytest.approx(expected.cost)
            assert chosen_memory(flat, choice).max() == pytest.approx(expected.peak)

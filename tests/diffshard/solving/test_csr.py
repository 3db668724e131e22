"""Compressed sparse rows: their costs and memory are those of the problem."""

import numpy as np
import pytest

from cost.base import num_strategies
from cost.evaluation import evaluate
from diffshard.solving.csr import (
    chosen_cost,
    chosen_memory,
    even_parts,
    memory_change,
    memory_of_strategies,
    to_csr,
)
from tests.diffshard.solving.random_problems import small_problem


def test_costs_and_memory_are_those_of_the_problem():
    for seed in range(20):
        problem = small_problem(seed, memory=True, devices=2)
        csr, rng = to_csr(problem), np.random.default_rng(seed)
        for _ in range(5):
            choice = rng.integers(num_strategies(problem))
            expected = evaluate(problem, choice)
            assert chosen_cost(csr, choice) == pytest.approx(expected.cost)
            assert chosen_memory(csr, choice).max() == pytest.approx(expected.peak)


def test_a_change_of_memory_is_that_of_all_times_where_it_begins_and_ends():
    for seed in range(20):
        csr, rng = to_csr(small_problem(seed, memory=True, devices=2)), np.random.default_rng(seed)
        strategies = rng.integers(len(csr.cost), size=3)
        weight = rng.choice([-1.0, 1.0], 3)
        expected = memory_of_strategies(csr, strategies, weight, np.zeros(3, int), 1)[0]
        times, change = memory_change(csr, strategies, weight)
        assert expected[times] == pytest.approx(change)
        expected[times] = 0
        assert expected == pytest.approx(0)


def test_even_parts_cover_all_lengths_in_order():
    lengths = np.array([3, 1, 9, 2, 2, 2, 0])
    parts = even_parts(lengths, 4)
    assert [lengths[part].tolist() for part in parts] == [[3, 1], [9, 2], [2, 2, 0]]
    assert even_parts(lengths[:0], 4) == []

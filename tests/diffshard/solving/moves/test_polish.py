"""Polishing: prices that stay numbers whatever does not fit."""

import numpy as np

from cost.base import Problem
from diffshard.solving.csr import to_csr
from diffshard.solving.dual.ascent import initial_prices
from diffshard.solving.moves.polish import Polish


def test_prices_rise_where_the_memory_is_exceeded_and_fall_elsewhere():
    """Two nodes that use memory at two times each."""
    usage = [np.array([1.0, 2.0])] * 2
    empty = np.zeros((0, 2), int)
    problem = Problem([np.ones(2)] * 2, empty, [], np.arange(2), usage, np.array([[0, 1], [1, 2]]), 1.5)
    csr = to_csr(problem)
    polish = Polish(csr, np.random.default_rng(0), np.zeros(2, int), initial_prices(csr), 2.0)
    polish.reprice(np.array([[True], [True]]), 1.0, 0.5)
    first = polish.memory.copy()
    assert first.shape == (2, 1)
    assert (first > 0).all()
    polish.reprice(np.array([[True], [False]]), 1.0, 0.25)
    np.testing.assert_allclose(polish.memory, first * [[2.0], [0.75]])


def test_prices_stay_numbers_where_nothing_ever_fits():
    usage = [np.array([1.0, 2.0]), np.array([2.0, 1.0])]
    problem = Problem(
        [np.ones(2)] * 2, np.array([[0, 1]]), [np.eye(2)], np.arange(2), usage, np.array([[0, 1], [0, 1]]), 0.5
    )
    csr = to_csr(problem)
    polish = Polish(csr, np.random.default_rng(0), np.zeros(2, int), initial_prices(csr), 2.0)
    with np.errstate(all="raise"):
        for _ in range(10_000):  # without a ceiling, 1.1 to this power is no float
            polish.reprice(np.ones_like(polish.memory, bool), 0.1, 0.02)
        polish.anneal(0.0, 0.1)
    assert np.isfinite(polish.memory).all()
    assert polish.choice.tolist() == [0, 1]  # at such prices the least memory


def test_the_best_choice_is_the_cheapest_of_those_that_fit_or_the_one_of_least_excess():
    """Two nodes of three strategies, which use a memory of 0, 2 or 4 at a time of their own."""
    usage = [np.array([0.0, 2.0, 4.0])] * 2
    empty = np.zeros((0, 2), int)
    cost = [np.array([9.0, 5.0, 1.0])] * 2
    problem = Problem(cost, empty, [], np.arange(2), usage, np.array([[0, 1], [1, 2]]), 2.0)
    csr = to_csr(problem)
    polish = Polish(csr, np.random.default_rng(0), np.array([2, 2]), initial_prices(csr), 2.0)
    assert (polish.best.tolist(), polish.best_rank) == ([2, 2], (2.0, np.inf))
    for choice, exceeds, best, rank in [
        ([2, 1], [True, False], [2, 2], (2.0, np.inf)),  # as much too much at the worst time
        ([0, 0], [False, False], [0, 0], (0.0, 18.0)),
        ([1, 2], [False, True], [0, 0], (0.0, 18.0)),  # cheaper, but it does not fit
        ([1, 1], [False, False], [1, 1], (0.0, 10.0)),
        ([0, 1], [False, False], [1, 1], (0.0, 10.0)),
    ]:
        assert polish.offer(np.array(choice)).ravel().tolist() == exceeds
        assert (polish.best.tolist(), polish.best_rank) == (best, rank)

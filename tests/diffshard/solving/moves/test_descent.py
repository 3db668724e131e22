"""Descent: single moves are priced exactly, only go down, and bring choices into the memory."""

import numpy as np

from diffshard.solving.csr import chosen_cost, chosen_memory, to_csr, with_ceiling
from diffshard.solving.moves.single_nodes import Descent
from tests.diffshard.solving.random_problems import layered_problem, small_problem


def test_descent_prices_moves_exactly_and_only_goes_down():
    for seed in range(10):
        problem = small_problem(seed, memory=True, devices=2)
        csr, rng = with_ceiling(to_csr(problem)), np.random.default_rng(seed)
        descent = Descent(csr, rng.integers(csr.sizes, size=(4, len(csr.sizes))))
        start = descent.cost() + 10.0 * descent.excess()
        for v in range(len(csr.sizes)):
            price = descent.price(v, 10.0)
            for r, choice in enumerate(descent.choice):
                others = []
                for s in range(int(csr.sizes[v])):
                    moved = choice.copy()
                    moved[v] = s
                    over = 0.0
                    if csr.base.size:
                        over = (np.maximum(chosen_memory(csr, moved) - csr.limit, 0) / csr.limit).sum()
                    others.append(chosen_cost(csr, moved) + 10.0 * over)
                np.testing.assert_allclose(price[r] - price[r, 0], np.array(others) - others[0], atol=1e-9)
        for _ in descent.descend(np.arange(len(csr.sizes)), 10.0):
            pass
        end = descent.cost() + 10.0 * descent.excess()
        assert (end <= start + 1e-9).all()
        for v in range(len(csr.sizes)):  # no single move is better
            price = descent.price(v, 10.0)
            assert (price[np.arange(4), descent.choice[:, v]] <= price.min(axis=1) + 1e-9).all()
        np.testing.assert_allclose(descent.cost(), [chosen_cost(csr, choice) for choice in descent.choice])


def test_repaired_choices_fit_where_single_moves_can_make_them():
    problem = layered_problem(3, 2, binding=0.7)
    csr = with_ceiling(to_csr(problem))
    descent = Descent(csr, np.stack([csr.sizes - 1, 0 * csr.sizes]))
    assert descent.excess().any()
    for _ in descent.repair(np.arange(len(csr.sizes))):
        pass
    assert not descent.excess().any()
    assert (chosen_memory(csr, descent.choice[0]) <= csr.limit).all()

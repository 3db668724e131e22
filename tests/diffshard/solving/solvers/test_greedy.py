"""Greedy construction beside the same rule in plain loops, which prices every strategy anew."""

import jax
import numpy as np
import pytest

from cost.base import load_groups, num_strategies
from diffshard.solving.csr import to_csr, with_ceiling
from diffshard.solving.moves.single_nodes import spans
from diffshard.solving.solvers.greedy import construct, least_entries, solve
from tests.diffshard.solving.random_problems import KINDS, small_problem


def constructed(problem, order):
    """Returns each node's choice, made in `order`: an edge to a node without one counts with the least it can cost."""
    csr = with_ceiling(to_csr(problem))
    tables = np.split(csr.cost, csr.start[1:-1])
    ceiling = max(csr.entries.max(initial=0.0), csr.cost.max())
    edges = [(u, v, np.minimum(np.asarray(m, float), ceiling)) for (u, v), m in zip(
        np.asarray(problem.edge_nodes).tolist(), problem.edge_cost, strict=True)]  # fmt: skip
    choice = {}
    for v in order:
        prices = []
        for s in range(len(tables[v])):
            price = tables[v][s]
            for a, b, matrix in edges:
                if v in (a, b):
                    row, other = (matrix[s], b) if a == v else (matrix[:, s], a)
                    price += row[choice[other]] if other in choice else row.min()
            if len(problem.load):
                loads = np.sum([problem.load[v][s], *(problem.load[u][t] for u, t in choice.items())], axis=0)
                price += sum(loads[group].max() for group in load_groups(problem))
            prices.append(price)
        choice[v] = int(np.argmin(prices))
    return [choice[v] for v in range(len(tables))]


@pytest.mark.parametrize("kind", KINDS)
def test_nodes_take_what_is_cheapest_given_those_before(kind):
    num_edges = 0
    for seed in range(60):
        problem = small_problem(seed, **KINDS[kind])
        csr = with_ceiling(to_csr(problem))
        order = np.random.default_rng(seed).permutation(len(num_strategies(problem)))
        found = construct(csr, order, least_entries(csr)).tolist()
        assert found == constructed(problem, order.tolist()), f"seed {seed}"
        num_edges += len(problem.edge_cost)
    assert num_edges > 60


def test_the_first_order_begins_with_what_has_most_at_stake_and_the_key_decides_on_the_others(monkeypatch):
    problem = small_problem(8)
    orders = []

    def recorded(csr, order, least_entry):
        orders.append(order.tolist())
        return construct(csr, order, least_entry)

    monkeypatch.setattr("diffshard.solving.solvers.greedy.construct", recorded)
    for key in (0, 0, 1):
        assert [p for p in solve(problem, key=jax.random.key(key)) if p.choice is not None]
    first, again, other = orders[:8], orders[8:16], orders[16:]
    stake = spans(with_ceiling(to_csr(problem)))
    assert (np.diff(stake[first[0]]) <= 0).all()
    assert first == again
    assert first[0] == other[0]
    assert first[1:] != other[1:]
    assert len({tuple(order) for order in first}) > 2

"""The experiment on learned costs: its baseline has the price by which ours are judged, and its factors fit."""

import numpy as np
import pytest

from diffshard.tables import host_table_cost
from experiments.embedding_tables import tasks
from experiments.embedding_tables.learned import Judged, fitted, steps_s
from experiments.embedding_tables.learned_beam import LearnedPrices
from search_spaces.embedding_tables.base import Piece


def test_parts_on_a_device_cost_what_their_pieces_cost():
    """The step of the beam search's placements is that of the cost, by which ours are judged."""
    tables, devices = tasks.generated(400, 10)
    cost = host_table_cost()
    prices = LearnedPrices(tables, devices, cost)
    placed = prices.placed()
    pieces = []
    for index, table in enumerate(tables):
        placed.put(prices.part(index, table.dimension), index % 4)
        pieces.append(Piece(index, index % 4, 0, table.rows, 0, table.dimension))
    decoded = cost.decoded(tables, pieces, devices)
    assert placed.step_s == pytest.approx(decoded.forward_s.max() + decoded.rest_s.max())


def test_factors_of_prices_by_bytes_fit_the_measurements():
    rng = np.random.default_rng(0)
    by_bytes = rng.uniform(1, 2, (3, 2, 5))
    factors = np.array([[2.0] * 4 + [3.0], [5.0] * 4 + [7.0]])
    found = [Judged("", own * factors, own, own) for own in by_bytes]
    for one in fitted(found):
        assert steps_s(one.by_bytes) == pytest.approx(steps_s(one.measured))

"""Prices of moves where the compiler joins collectives, and where it does not."""

import dataclasses

import pytest

from cost.hardware import Hardware, Link
from cost.presets import preset
from search_spaces.sharding.prices import Prices
from search_spaces.sharding.resharding import Move

JOINED = Hardware("joined", 1e9, 1e9, 1e9, {"x": Link(1e-3, 1e-6, reduce_scatter_s_per_byte=2e-6)})
APART = dataclasses.replace(JOINED, combines_gathers=False)
SPLIT, WHOLE = ((0,),), ((),)


@pytest.mark.parametrize(("hardware", "latency_s"), [(JOINED, 1e-3 / 10), (APART, 1e-3)])
def test_gathers_share_a_latency_only_where_they_are_joined(hardware: Hardware, latency_s: float):
    prices = Prices(("x",), (4,), hardware)
    gather_s = latency_s + 400 * 3 / 4 * 1e-6
    matrix = prices.reshard_s((SPLIT,), (WHOLE,), 400.0, 0.1, 1.0)
    assert matrix.tolist() == [[pytest.approx(gather_s)]]
    (move,) = prices.path(SPLIT, WHOLE)
    assert isinstance(move, Move)
    assert prices.move_s(move, 400.0, 0.1) == pytest.approx(gather_s)


@pytest.mark.parametrize("hardware", [JOINED, APART])
@pytest.mark.parametrize(("kind", "slope"), [("all_reduce", 2 * 1e-6), ("reduce_scatter", 2e-6)])
def test_reductions_share_a_latency_everywhere(hardware: Hardware, kind: str, slope: float):
    prices = Prices(("x",), (4,), hardware)
    (gather,) = prices.path(SPLIT, WHOLE)
    reduction = gather._replace(kind=kind)
    assert prices.move_s(reduction, 400.0, 0.1) == pytest.approx(1e-4 + 400 * 3 / 4 * slope)


def test_only_host_devices_gather_apart():
    assert not preset("cpu", {"x": 2, "y": 4}).combines_gathers
    assert preset("h100", {"x": 2, "y": 4}).combines_gathers

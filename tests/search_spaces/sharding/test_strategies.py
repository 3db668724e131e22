"""Strategies of rules, listed by hand, and played through on blocks."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from cost.collectives import collective_sent_bytes
from search_spaces.sharding.base import Axes, Rule
from search_spaces.sharding.spec import divides
from search_spaces.sharding.strategies import collective_bytes, replicated_strategy, strategies_of_rule

# Factors: 0 rows of the left operand, 1 columns of the right one, 2 what is summed over.
MATMUL = Rule((((0,), (2,)), ((2,), (1,))), (((0,), (1,)),), (8, 8, 8), reduction=frozenset({2}), reduction_is_sum=True)
ONE, TWO = Axes((2,), (0,)), Axes((2, 2), (1, 0))


def listed(strategies):
    return {(s.operands, s.results, tuple((m.kind, m.axis) for m in s.reductions[0])) for s in strategies}


def test_a_matmul_on_one_axis_has_six_strategies():
    no, x = (), (0,)
    assert listed(strategies_of_rule(MATMUL, ONE)) == {
        (((no, no), (no, no)), ((no, no),), ()),
        (((x, no), (no, no)), ((x, no),), ()),
        (((no, no), (no, x)), ((no, x),), ()),
        (((no, x), (x, no)), ((no, no),), (("all_reduce", 0),)),
        (((no, x), (x, no)), ((x, no),), (("reduce_scatter", 0),)),
        (((no, x), (x, no)), ((no, x),), (("reduce_scatter", 0),)),
    }


def test_the_first_strategy_replicates():
    assert strategies_of_rule(MATMUL, TWO)[0] == replicated_strategy((2, 2), (2,))


def test_a_matmul_on_two_axes_has_what_combinatorics_says():
    """Each axis: none, rows, columns (3), or summed over, then reduced or scattered into one of two dimensions (3).

    Of the 36 pairs, those are missing where the scattered axis would lie above one that splits the dimension already
    (axis 0 scattered into the dimension that axis 1 splits), and those that scatter into both dimensions.
    """
    found = strategies_of_rule(MATMUL, TWO)
    assert len(found) == 36 - 2 - 2
    by_hand = set()
    for places in product(range(6), repeat=2):
        split = {f: tuple(a for a in (0, 1) if places[a] == 1 + f) for f in (0, 1)}
        summed = tuple(a for a in (0, 1) if places[a] >= 3)
        into = {a: places[a] - 4 for a in summed if places[a] > 3}
        if any(split[d] and a < max(split[d]) for a, d in into.items()) or set(into.values()) == {0, 1}:
            continue
        result = tuple(tuple(sorted((*split[d], *(a for a in into if into[a] == d)))) for d in (0, 1))
        by_hand.add((((split[0], summed), (summed, split[1])), (result,)))
    assert {(s.operands, s.results) for s in found} == by_hand


def test_parts_are_the_devices_that_share_the_arithmetic():
    for strategy in strategies_of_rule(MATMUL, Axes((2, 4), (1, 0))):
        axes = {a for spec in strategy.operands for split in spec for a in split}
        assert strategy.parts == np.prod([(2, 4)[a] for a in axes])


def sent(strategy, num_bytes, sizes):
    """Bytes that one device sends, over all axes."""
    return sum(
        float(collective_sent_bytes(move.kind, move.fraction * num_bytes, sizes[move.axis]))
        for moves in strategy.reductions
        for move in moves
    )


def find(strategies, operands, results):
    (found,) = [s for s in strategies if (s.operands, s.results) == (operands, results)]
    return found


def test_bytes_of_reductions_by_hand():
    strategies = strategies_of_rule(MATMUL, TWO)
    no, x, y = (), (0,), (1,)
    # Summed over x, columns over y: each device all-reduces its half of the result with one other.
    half = find(strategies, ((no, x), (x, y)), ((no, y),))
    assert sent(half, 100, (2, 2)) == 2 * 50 * 1 / 2
    # The same, scattered into rows: half of that.
    scattered = find(strategies, ((no, x), (x, y)), ((x, y),))
    assert sent(scattered, 100, (2, 2)) == 50 * 1 / 2
    # Summed over both: as one ring of four devices, however the axes are nested.
    both = find(strategies, ((no, (0, 1)), ((0, 1), no)), ((no, no),))
    assert sent(both, 100, (2, 2)) == 2 * 100 * 3 / 4
    everywhere = find(strategies, ((no, (0, 1)), ((0, 1), no)), ((no, (0, 1)),))
    assert sent(everywhere, 100, (2, 2)) == 100 * 3 / 4
    # Scattered over x, the rest reduced over y.
    mixed = find(strategies, ((no, (0, 1)), ((0, 1), no)), ((x, no),))
    assert sent(mixed, 100, (2, 2)) == 100 * 1 / 2 + 2 * 50 * 1 / 2


def test_fast_links_reduce_first_and_leave_the_slow_ones_less():
    strategies = strategies_of_rule(MATMUL, Axes((2, 4), (1, 0)))
    both = find(strategies, (((), (0, 1)), ((0, 1), ())), (((), ()),))
    assert [(m.axis, m.fraction) for m in both.reductions[0]] == [(1, 1.0), (0, 1 / 4)]
    slow_last = strategies_of_rule(MATMUL, Axes((2, 4), (0, 1)))
    both = find(slow_last, (((), (0, 1)), ((0, 1), ())), (((), ()),))
    assert [(m.axis, m.fraction) for m in both.reductions[0]] == [(0, 1.0), (1, 1 / 2)]


def test_only_sums_are_scattered():
    largest = Rule((((0,), (1,)),), (((0,),),), (8, 8), reduction=frozenset({1}))
    kinds = {m.kind for s in strategies_of_rule(largest, TWO) for moves in s.reductions for m in moves}
    assert kinds == {"all_reduce"}
    total = Rule((((0,), (1,)),), (((0,),),), (8, 8), reduction=frozenset({1}), reduction_is_sum=True)
    kinds = {m.kind for s in strategies_of_rule(total, TWO) for moves in s.reductions for m in moves}
    assert kinds == {"all_reduce", "reduce_scatter"}


def test_several_results_are_reduced_each():
    moments = Rule((((0,), (1,)),), (((0,),), ((0,),)), (8, 8), reduction=frozenset({1}), reduction_is_sum=True)
    partial = [s for s in strategies_of_rule(moments, ONE) if s.operands == (((), (0,)),)]
    kinds = [[m.kind for m in moves] for s in partial for moves in s.reductions]
    assert kinds == [["all_reduce"], ["all_reduce"], ["reduce_scatter"], ["reduce_scatter"]], "both in the same way"


@pytest.mark.parametrize("closed", ["need_replication", "permutation", "blocked_propagation"])
def test_closed_factors_stay_whole(closed):
    rule = replace(Rule((((0,), (1,)),), (((0,), (1,)),), (8, 8)), **{closed: frozenset({1})})
    assert {s.operands[0][1] for s in strategies_of_rule(rule, TWO)} == {()}


def test_a_minor_factor_is_split_only_below_a_major_that_is_split_up():
    """A reshape of [2, 4] into [8]: both axes fit, the major's first."""
    merge = Rule((((0,), (1,)),), (((0, 1),),), (2, 4))
    found = {(s.operands[0], s.results[0]) for s in strategies_of_rule(merge, TWO)}
    assert found == {
        (((), ()), ((),)),
        (((0,), ()), ((0,),)),
        (((1,), ()), ((1,),)),
        (((0,), (1,)), ((0, 1),)),
        (((1,), (0,)), ((1, 0),)),
    }


def test_a_major_that_is_only_half_split_keeps_the_minor_whole():
    merge = Rule((((0,), (1,)),), (((0, 1),),), (4, 4))
    found = {(s.operands[0], s.results[0]) for s in strategies_of_rule(merge, TWO)}
    assert {operand[1] for operand, _ in found} == {()}
    assert (((0, 1), ()), ((0, 1),)) in found


def test_factors_that_do_not_divide_are_not_split():
    rule = Rule((((0,), (1,)),), (((0,), (1,)),), (6, 4))
    for sizes in ((4,), (2, 2), (2, 3)):
        for strategy in strategies_of_rule(rule, Axes(sizes, tuple(range(len(sizes))))):
            assert divides(strategy.operands[0], (6, 4), sizes)
    assert ((0, 1), ()) in {s.operands[0] for s in strategies_of_rule(rule, Axes((2, 3), (0, 1)))}


def test_axes_of_one_device_split_nothing():
    assert len(strategies_of_rule(MATMUL, Axes((1, 2), (0, 1)))) == 6


def test_of_two_ways_to_the_same_specs_the_one_with_fewer_bytes_is_kept():
    for axes in (TWO, Axes((2, 2, 2), (0, 1, 2))):
        strategies = strategies_of_rule(MATMUL, axes)
        assert len({(s.operands, s.results) for s in strategies}) == len(strategies)
        assert all(collective_bytes(s) >= 0 for s in strategies)


@pytest.mark.parametrize("sizes", [(2,), (2, 2), (2, 3)])
def test_devices_that_follow_a_strategy_find_the_product(sizes):
    """Every device multiplies the blocks of its operands; summed over the reduced axes they are the result's."""
    n = int(np.prod(sizes)) ** 2
    rng = np.random.default_rng(0)
    left, right = rng.normal(size=(n, n)), rng.normal(size=(n, n))
    rule = Rule(MATMUL.operands, MATMUL.results, (n, n, n), reduction=frozenset({2}), reduction_is_sum=True)
    devices = list(product(*map(range, sizes)))

    def block(array, spec, device):
        for d, axes in enumerate(spec):
            index = 0
            for a in axes:
                index = index * sizes[a] + device[a]
            parts = int(np.prod([sizes[a] for a in axes]))
            array = np.split(array, parts, axis=d)[index]
        return array

    for strategy in strategies_of_rule(rule, Axes(sizes, tuple(range(len(sizes))))):
        own = {dev: block(left, strategy.operands[0], dev) @ block(right, strategy.operands[1], dev) for dev in devices}
        summed = {move.axis for move in strategy.reductions[0]}
        for dev in devices:
            group = [
                other
                for other in devices
                if all(o == d or a in summed for a, (o, d) in enumerate(zip(other, dev, strict=True)))
            ]
            partial = np.sum([own[other] for other in group], axis=0)
            np.testing.assert_allclose(partial, block(left @ right, strategy.unreduced[0], dev), rtol=1e-9)
            # What a scatter leaves is a part of what the device has the sums of.
            left_with = block(left @ right, strategy.results[0], dev)
            rows = {row.tobytes() for row in np.round(block(left @ right, strategy.unreduced[0], dev), 9)}
            assert (
                left_with.size * np.prod([sizes[m.axis] for m in strategy.reductions[0] if m.kind == "reduce_scatter"])
                == partial.size
            )
            assert left_with.shape[1] != n or {row.tobytes() for row in np.round(left_with, 9)} <= rows

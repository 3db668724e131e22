"""Merging and splitting factors, and what becomes of their marks."""

from search_spaces.sharding.rules import Factors, Mark, rule_from_factors


def _sizes(factors, dimension):
    return [factors.size(leaf) for leaf in factors.leaves(dimension)]


def test_equating_a_whole_with_its_parts_splits_it_everywhere():
    factors = Factors()
    whole, other, parts = factors.new(64), factors.new(64), [factors.new(4), factors.new(16)]
    factors.equate([whole], [other])
    factors.equate([whole], parts)
    assert factors.leaves([other]) == factors.leaves(parts)
    assert _sizes(factors, [other]) == [4, 16]


def test_equating_interleaved_parts_finds_the_common_refinement():
    factors = Factors()
    left, right = [factors.new(8), factors.new(6)], [factors.new(2), factors.new(24)]
    factors.equate(left, right)
    assert factors.leaves(left) == factors.leaves(right)
    assert _sizes(factors, left) == [2, 4, 6]


def test_parts_without_a_common_refinement_need_replication():
    factors = Factors()
    left, right = [factors.new(6), factors.new(4)], [factors.new(4), factors.new(6)]
    factors.equate(left, right)
    assert all(Mark.NEED_REPLICATION in factors.mark_of(leaf) for leaf in factors.leaves([*left, *right]))


def test_marks_are_merged_and_inherited():
    factors = Factors()
    reduced, moved = factors.new(12, Mark.REDUCTION), factors.new(12, Mark.PERMUTATION)
    factors.equate([reduced], [moved])
    factors.equate([reduced], [factors.new(3), factors.new(4)])
    assert [factors.mark_of(leaf) for leaf in factors.leaves([moved])] == [Mark.REDUCTION | Mark.PERMUTATION] * 2


def test_a_slice_keeps_one_factor_of_the_larger_size():
    factors = Factors()
    whole, part = factors.new(8), factors.new(6)
    factors.equate([whole], [part])
    assert _sizes(factors, [part]) == [8]


def test_a_reduced_factor_that_occurs_twice_in_an_array_is_whole_and_no_reduction():
    factors = Factors()
    twice, once, kept = (factors.new(8, mark) for mark in (Mark.REDUCTION, Mark.REDUCTION, Mark.NONE))
    rule = rule_from_factors(factors, [[[twice], [twice], [once], [kept]]], [[[kept]]])
    assert rule.operands == (((0,), (0,), (1,), (2,)),)
    assert (rule.need_replication, rule.reduction) == ({0}, {1})


def test_a_factor_that_no_result_has_is_whole_unless_it_is_reduced():
    factors = Factors()
    lost, reduced, kept = (factors.new(8, mark) for mark in (Mark.NONE, Mark.REDUCTION, Mark.NONE))
    rule = rule_from_factors(factors, [[[lost], [reduced], [kept]]], [[[kept]]])
    assert (rule.need_replication, rule.reduction) == ({0}, {1})

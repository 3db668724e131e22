"""Matrices of edges, summed by hand."""

import numpy as np

from cost.edges import distinct_arrays, first_positions, map_distinct, merge_edges


def test_matrices_between_two_nodes_are_summed_whichever_of_them_comes_first():
    forward, alone = np.array([[1, 2, 3], [4, 5, 6]]), np.array([[7, 8, 9]])
    backward = np.array([[10, 20], [30, 40], [50, 60]])  # from the second node to the first
    merged = merge_edges([(0, 1, forward), (2, 1, alone), (1, 0, backward), (0, 1, forward)])
    assert list(merged) == [(0, 1), (2, 1)]
    np.testing.assert_array_equal(merged[0, 1], [[12, 34, 56], [28, 50, 72]])
    assert merged[2, 1] is alone


def test_one_array_at_several_places_is_one_and_an_equal_one_is_another():
    one, equal = np.zeros(2), np.zeros(2)
    distinct, which = distinct_arrays([one, equal, one])
    assert distinct[0] is one
    assert distinct[1] is equal
    assert which.tolist() == [0, 1, 0]


def test_an_operation_runs_once_for_each_distinct_array_and_results_stay_shared():
    one, equal, calls = np.zeros(2), np.zeros(2), []

    def plus_one(array):
        calls.append(array)
        return array + 1

    results = map_distinct(plus_one, [one, equal, one])
    assert len(calls) == 2
    assert results[0] is results[2]
    assert results[0] is not results[1]
    assert first_positions([one, equal, one]) == [0, 1]

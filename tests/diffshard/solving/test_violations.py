"""Sentences on what a choice breaks: they name the time of the problem, its device and who uses the memory there."""

import numpy as np

from cost.base import FORBIDDEN, Problem
from cost.evaluation import violations

EMPTY = np.zeros((0, 2), int)
INTERVALS = np.array([[3, 5], [4, 7], [9, 11]])


def problem_of(usage, limit):
    return Problem([np.zeros(2)] * 3, EMPTY, [], np.arange(3), usage, INTERVALS, limit)


def test_the_time_is_the_problem_s_own():
    """Nodes 0 and 1 live together at time 4 only, node 2 alone later."""
    problem = problem_of([np.array([2, 1]), np.array([5, 1]), np.array([6, 1])], 4)
    assert violations(problem, (0, 0, 1)) == [
        "At time 4 the memory exceeds the limit by 3; its largest users are nodes 1 (5), 0 (2).",
        "At time 5 the memory exceeds the limit by 1; its largest users are nodes 1 (5).",
    ]
    (later,) = violations(problem, (1, 1, 0))
    assert later == "At time 9 the memory exceeds the limit by 2; its largest users are nodes 2 (6)."
    assert violations(problem, (1, 1, 1)) == []


def test_the_device_is_the_one_that_is_exceeded_most():
    usage = [np.array([[1, 4], [1, 1]]), np.array([[1, 2], [1, 1]]), np.array([[1, 1], [1, 1]])]
    (sentence,) = violations(problem_of(usage, np.array([9, 5])), (0, 0, 0))
    assert sentence == (
        "At time 4 the memory on device 1 exceeds the limit by 1; its largest users are nodes 0 (4), 1 (2)."
    )


def test_what_is_forbidden_is_named():
    cost, matrix = np.array([0.0, FORBIDDEN]), np.array([[FORBIDDEN, 0.0], [0.0, 0.0]])
    problem = Problem([cost, np.zeros(2)], np.array([[0, 1]]), [matrix], EMPTY[:, 0], [], EMPTY)
    assert violations(problem, (1, 0)) == ["Node 0 takes strategy 1, which is forbidden."]
    assert violations(problem, (0, 0)) == ["Nodes 0 and 1 take strategies 0 and 0, which exclude each other."]

"""Memory in use over time, against adding up what is live at each time."""

from itertools import product

import numpy as np
import pytest

from cost.base import Problem, num_memory_devices
from cost.evaluation import evaluate
from cost.memory import least_memory, memory_profile, numbered_times
from diffshard.solving.solve import solve


@pytest.mark.parametrize("dtype", [np.int64, np.float64, object])
def test_the_profile_is_what_is_live_at_each_time(dtype):
    rng = np.random.default_rng(0)
    start = rng.integers(0, 9, 30)
    interval = np.stack([start, start + rng.integers(1, 5, 30)], axis=1)
    amounts = rng.integers(0, 100, (30, 2)).astype(dtype)
    profile = memory_profile(interval, amounts, 13)
    assert profile.dtype == dtype
    for time in range(13):
        live = (interval[:, 0] <= time) & (time < interval[:, 1])
        assert profile[time].tolist() == amounts[live].sum(axis=0).tolist()


def test_integers_beyond_64_bits_are_summed_exactly():
    profile = memory_profile(np.array([[0, 2], [1, 2], [1, 2]]), np.full((3, 1), 2**62 + 1), 2)
    assert profile[:, 0].tolist() == [2**62 + 1, 3 * (2**62 + 1)]


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint32, np.float16])
def test_what_a_narrow_type_cannot_hold_is_summed_in_a_wide_one(dtype):
    largest = np.array(np.finfo(dtype).max if np.issubdtype(dtype, np.floating) else np.iinfo(dtype).max, dtype)
    problem = Problem(
        [np.array([1.0, 9.0])] * 2, np.zeros((0, 2), int), [], usage_node=np.arange(2),
        usage=[np.array([largest, 1], dtype)] * 2, usage_interval=np.array([[0, 2], [1, 3]]),
        memory_limit=1.5 * float(largest),
    )  # fmt: skip
    assert evaluate(problem, (0, 0)).peak == 2 * float(largest)
    assert not evaluate(problem, (0, 0)).feasible
    assert solve(problem).cost == 10.0


def test_times_are_numbered_without_gaps():
    times, interval = numbered_times(np.array([[5, 90], [7, 1000]]))
    assert times.tolist() == [5, 7, 90, 1000]
    assert interval.tolist() == [[0, 2], [1, 3]]


@pytest.mark.parametrize("seed", range(20))
def test_the_least_peak_is_that_of_the_best_of_all_choices(seed):
    """One usage for each node: then all can be at their least at once."""
    rng = np.random.default_rng(seed)
    nodes = 5
    usage = [rng.integers(0, 50, size=rng.integers(1, 4)).astype(float) for _ in range(nodes)]
    starts = rng.integers(0, 8, nodes)
    problem = Problem(
        node_cost=[np.zeros(len(u)) for u in usage],
        edge_nodes=np.zeros((0, 2), int),
        edge_cost=[],
        usage_node=np.arange(nodes),
        usage=usage,
        usage_interval=np.stack([starts, starts + rng.integers(1, 6, nodes)], axis=1),
    )
    peaks = [evaluate(problem, choice).peak for choice in product(*(range(len(u)) for u in usage))]
    assert least_memory(problem)[1].max() == min(peaks)


def test_without_usages_nothing_is_needed():
    empty = Problem([np.zeros(1)], np.zeros((0, 2), int), [], np.zeros(0, int), [], np.zeros((0, 2), int))
    assert least_memory(empty)[1].max() == 0


def test_a_usage_that_is_the_same_on_all_devices_counts_on_each():
    problem = Problem(
        [np.zeros(2)] * 2, np.zeros((0, 2), int), [], np.array([0, 1]),
        [np.array([4, 2]), np.array([[1, 5], [3, 3]])], np.array([[0, 2], [1, 3]]),
    )  # fmt: skip
    assert num_memory_devices(problem) == 2
    times, least = least_memory(problem)
    assert times.tolist() == [0, 1, 2, 3]
    assert least.tolist() == [[2, 2], [3, 5], [1, 3], [0, 0]]

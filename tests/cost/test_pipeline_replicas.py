"""Replicas of a pipeline: micro-batches are balanced as well as possible, and schedules run side by side."""

import itertools

import numpy as np
import pytest

from cost.pipeline_schedules import graph_of
from cost.pipeline_times import StageTimes, balanced_microbatches, joined_graph, simulate


@pytest.mark.parametrize("seed", range(5))
def test_the_slowest_replica_is_as_fast_as_with_the_best_of_all_divisions(seed):
    rng = np.random.default_rng(seed)
    seconds = rng.integers(1, 9, (3, 7)).cumsum(axis=1).astype(float)
    seconds[:2, 0] = np.inf  # the first two take at least one
    divisions = [d for d in itertools.product(range(7), repeat=3) if sum(d) == 6]
    best = min(max(seconds[r, n] for r, n in enumerate(d)) for d in divisions)
    found = balanced_microbatches(seconds, 6)
    assert sum(found) == 6
    assert max(seconds[r, n] for r, n in enumerate(found)) == best < np.inf


def test_numbers_that_nothing_can_take_are_an_error():
    with pytest.raises(ValueError, match="2 replicas leave no numbers for 1 micro-batches"):
        balanced_microbatches([[np.inf, 1.0], [np.inf, 1.0]], 1)


def test_pipelines_side_by_side_take_the_time_of_the_slower_one():
    graphs = [graph_of("1f1b", 2, 5), graph_of("1f1b", 2, 3)]
    times = [StageTimes([1, 2], [2, 3], [0.5], [0.25]), StageTimes([3, 2], [4, 6], [1], [1])]
    alone = [simulate(t, graph) for t, graph in zip(times, graphs, strict=True)]
    joined = joined_graph(graphs)
    together = simulate(StageTimes([1, 2, 3, 2], [2, 3, 4, 6], [0.5, 0, 1], [0.25, 0, 1]), joined)
    assert together.step_s == max(found.step_s for found in alone)
    assert together.busy_s.tolist() == [*alone[0].busy_s, *alone[1].busy_s]
    assert together.in_flight.tolist() == [*alone[0].in_flight, *alone[1].in_flight]
    assert set(joined.microbatch[joined.stage >= 2]) == {5, 6, 7}

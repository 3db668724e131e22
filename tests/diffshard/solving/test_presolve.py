"""Every reduction against exhaustive search: same optimum, and the way back finds a choice that has it."""

import itertools
import math

import numpy as np
import pytest

from cost.base import Problem, is_forbidden, num_strategies
from cost.edges import distinct_arrays
from cost.evaluation import evaluate
from diffshard.base import InfeasibleError
from diffshard.solving.presolve import memory, pipeline
from diffshard.solving.presolve.elimination import eliminate
from diffshard.solving.presolve.memory import compress_memory
from diffshard.solving.presolve.pipeline import merge_ties, presolve
from diffshard.solving.solvers.exhaustive import price
from tests.diffshard.solving.random_problems import layered_problem, small_problem

KINDS = {
    "plain": {},
    "forbidden": {"forbidden": 0.15},
    "memory": {"memory": True},
    "loads": {"devices": 2},
    "all": {"forbidden": 0.1, "memory": True, "devices": 2},
}


def _on_two_devices(seed: int) -> Problem:
    """Usages that differ between two devices, of which one or both have a limit."""
    rng = np.random.default_rng(seed)
    problem = small_problem(seed, memory=True)
    usage = [np.stack([row, rng.permutation(row)], axis=1) for row in problem.usage]
    limits = [[1, 1], [1, np.inf], [np.inf, 1]]
    return problem._replace(usage=usage, memory_limit=problem.memory_limit * np.array(limits[seed % 3]))


def _optimum(problem: Problem) -> tuple[float, np.ndarray | None]:
    sizes = num_strategies(problem).tolist()
    index = np.arange(math.prod(sizes))
    choices = np.stack(np.unravel_index(index, sizes), axis=1) if sizes else np.zeros((1, 0), int)
    cost, excess = price(problem, choices)
    cost = np.where((excess > 0) | is_forbidden(cost), np.inf, cost)
    return float(cost.min()), choices[cost.argmin()] if np.isfinite(cost.min()) else None


@pytest.mark.parametrize("step", [merge_ties, compress_memory, eliminate, presolve])
@pytest.mark.parametrize("kind", KINDS)
def test_the_optimum_is_the_same_before_and_after(step, kind):
    solvable = 0
    for seed in range(120):
        problem = small_problem(seed, **KINDS[kind])
        expected, _ = _optimum(problem)
        try:
            reduction = step(problem)
        except InfeasibleError:
            assert math.isinf(expected), f"seed {seed}"
            continue
        optimum, choice = _optimum(reduction.problem)
        assert optimum + reduction.constant == pytest.approx(expected, abs=1e-9), f"seed {seed}"
        if choice is not None:
            solvable += 1
            expanded = evaluate(problem, reduction.expand(choice))
            assert expanded.feasible, f"seed {seed}"
            assert expanded.cost == pytest.approx(expected, abs=1e-9), f"seed {seed}"
    assert solvable > 20  # or the test tells nothing


@pytest.mark.parametrize("kind", KINDS)
def test_any_reduced_choice_costs_no_more_when_expanded(kind):
    for seed in range(60):
        problem = small_problem(seed, **KINDS[kind])
        try:
            reduction = presolve(problem)
        except InfeasibleError:
            continue
        rng = np.random.default_rng(seed)
        for _ in range(5):
            choice = rng.integers(num_strategies(reduction.problem))
            reduced, full = evaluate(reduction.problem, choice), evaluate(problem, reduction.expand(choice))
            if not is_forbidden(np.asarray(reduced.cost)):
                assert full.cost <= reduced.cost + reduction.constant + 1e-9
                assert full.excess <= reduced.excess + 1e-9


@pytest.mark.parametrize("step", [compress_memory, presolve])
@pytest.mark.parametrize("compared", [0, 1 << 24])
def test_limits_of_each_device_bind_where_they_are_finite(step, compared, monkeypatch):
    monkeypatch.setattr(memory, "_MOST_COMPARISONS", compared)  # 0: all times but the first are kept
    bound = free = 0
    for seed in range(120):
        problem = _on_two_devices(seed)
        expected, _ = _optimum(problem)
        try:
            reduction = step(problem)
        except InfeasibleError:
            assert math.isinf(expected), f"seed {seed}"
            continue
        assert np.isfinite(reduction.problem.memory_limit).all() or not len(reduction.problem.usage)
        optimum, choice = _optimum(reduction.problem)
        assert optimum + reduction.constant == pytest.approx(expected, abs=1e-9), f"seed {seed}"
        if choice is not None:
            assert evaluate(problem, reduction.expand(choice)).feasible, f"seed {seed}"
            bound += expected > _optimum(problem._replace(memory_limit=np.inf))[0]
            free += expected < _optimum(problem._replace(memory_limit=float(np.min(problem.memory_limit))))[0]
    assert bound > 5  # or no limit would matter
    assert free > 5  # nor that there is none


def test_times_that_never_use_more_than_another_are_left_out():
    """Node 0 uses memory at times 0 and 4 and node 1 at times 2 and 4: at time 4 they use as much as ever.

    Each of the times can exceed the limit by itself, so that no other rule leaves any of them out.
    """
    usage = [np.array([2, 5]), np.array([1, 4])]
    nodes, intervals = [0, 1, 0, 1], np.array([[0, 1], [2, 3], [4, 5], [4, 5]])
    problem = Problem([np.zeros(2)] * 2, np.zeros((0, 2), int), [], np.array(nodes), usage * 2, intervals, 3)
    reduced = compress_memory(problem._replace(memory_limit=np.array([3.0, np.inf]))).problem
    assert np.unique(reduced.usage_interval).tolist() == [0, 1]  # one time
    assert sorted(map(tuple, reduced.usage_interval.tolist())) == [(0, 1)] * len(reduced.usage)
    most = sum(float(np.max(table)) for table in reduced.usage)
    assert most == 5 + 4  # what both use at time 4 at most; at the others it is 5 and 4


@pytest.mark.parametrize("kind", ["memory", "all"])
def test_where_the_time_ends_early_what_was_reduced_so_far_is_as_exact(kind, monkeypatch):
    sizes = set()
    for num_steps in range(6):
        for seed in range(20):
            problem = small_problem(seed, **KINDS[kind])
            now = itertools.count()
            monkeypatch.setattr(pipeline.time, "perf_counter", lambda now=now: next(now))
            try:
                reduction = presolve(problem, deadline=num_steps - 0.5)
            except InfeasibleError:
                continue
            assert next(now) <= num_steps + 1  # it asked at most once after the deadline
            if num_steps == 0:
                assert reduction.problem is problem
            optimum, _ = _optimum(reduction.problem)
            assert optimum + reduction.constant == pytest.approx(_optimum(problem)[0], abs=1e-9)
            sizes.add((seed, num_strategies(reduction.problem).sum()))
    assert len(sizes) > len({seed for seed, _ in sizes})  # more steps leave less


def test_a_determined_node_is_merged():
    only = np.array([[0.0, np.inf], [np.inf, 3.0]])
    empty = np.zeros((0, 2), int)
    problem = Problem([np.array([1.0, 2.0]), np.array([5.0, 0.0])], np.array([[0, 1]]), [only], empty[:, 0], [], empty)
    merged = merge_ties(problem)
    assert len(merged.problem.node_cost) == 1
    np.testing.assert_array_equal(merged.problem.node_cost[0], [1 + 5 + 0, 2 + 0 + 3])
    np.testing.assert_array_equal(merged.expand(np.array([1])), [1, 1])


def test_a_shared_matrix_is_turned_round_where_its_edge_goes_the_other_way():
    matrix, empty = np.array([[0.0, 5.0], [1.0, 9.0]]), np.zeros((0, 2), int)
    problem = Problem([np.zeros(2)] * 4, np.array([[0, 1], [3, 2]]), [matrix] * 2, empty[:, 0], [], empty)
    merged = merge_ties(problem)
    for choice in np.ndindex(2, 2, 2, 2):
        assert evaluate(merged.problem, choice).cost == matrix[choice[0], choice[1]] + matrix[choice[3], choice[2]]


def test_a_contradiction_names_the_node():
    never = np.full((2, 2), np.inf)
    empty = np.zeros((0, 2), int)
    problem = Problem([np.zeros(2), np.zeros(2)], np.array([[0, 1]]), [never], empty[:, 0], [], empty)
    with pytest.raises(InfeasibleError, match="strategy of node 0"):
        presolve(problem)


def test_a_chain_of_any_length_is_eliminated():
    rng = np.random.default_rng(0)
    count = 300
    edges = np.stack([np.arange(count - 1), np.arange(1, count)], axis=1)
    costs = [rng.random((5, 5)) for _ in edges]
    empty = np.zeros((0, 2), int)
    problem = Problem([rng.random(5) for _ in range(count)], edges, costs, empty[:, 0], [], empty)
    reduced = presolve(problem)
    assert not reduced.problem.node_cost
    choice = reduced.expand(np.zeros(0, int))
    assert evaluate(problem, choice).cost == pytest.approx(reduced.constant)
    forward = problem.node_cost[0]  # Viterbi, the other way to find it
    for cost, matrix in zip(problem.node_cost[1:], costs, strict=True):
        forward = (forward[:, None] + matrix).min(axis=0) + cost
    assert reduced.constant == pytest.approx(forward.min())


def test_strategies_that_never_fit_are_gone_and_free_times_are_forgotten():
    empty = np.zeros((0, 2), int)
    usage = [np.array([1, 9]), np.array([3, 4])]
    both = Problem(
        [np.array([5.0, 0.0]), np.array([1.0, 0.0])], empty, [], np.array([0, 1]), usage, np.array([[0, 2], [1, 3]]), 8
    )
    reduced = presolve(both)
    assert not reduced.problem.node_cost  # 9 > 8 - 3 leaves one strategy for node 0, and then both of node 1 fit
    np.testing.assert_array_equal(reduced.expand(np.zeros(0, int)), [0, 1])


def test_shared_matrices_stay_one_array():
    problem = layered_problem(0, 6)
    reduced = presolve(problem)
    distinct = {id(cost) for cost in reduced.problem.edge_cost}
    assert len(distinct) < len(reduced.problem.edge_cost) / 3
    assert len(reduced.problem.node_cost) < len(problem.node_cost)


def test_arrays_that_equal_layers_share_stay_shared():
    """Presolve leaves as many arrays as one layer has, and not one for each node."""
    problem = layered_problem(0, 20, binding=0.7)
    reduced = presolve(problem).problem
    assert len(reduced.node_cost) > 10 * len(distinct_arrays(problem.node_cost)[0])
    for before, after in ((problem.node_cost, reduced.node_cost), (problem.edge_cost, reduced.edge_cost)):
        assert len(distinct_arrays(after)[0]) <= 1.5 * len(distinct_arrays(before)[0])

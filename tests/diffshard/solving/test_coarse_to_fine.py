"""Solving in stages: bounds hold against brute force, the limit is kept, and ties are kept where they cost little."""

import math
from collections.abc import Iterator

import numpy as np
import pytest

from cost.base import Problem, num_strategies
from cost.evaluation import Evaluator, evaluate
from diffshard.base import Proposal
from diffshard.solving.coarse_to_fine import TIE_GAP, LazyMemoryLimit
from diffshard.solving.form import identity, merge_classes
from diffshard.solving.solve import solve
from tests.diffshard.solving.random_problems import optimum, small_problem

MOST_CHOICES = 30_000  # that brute force looks at


def repeated(seed: int, copies: int, binding: float | None, **features) -> tuple[Problem, np.ndarray]:
    """Copies of a small problem in a chain, each live a while later, and which nodes are tied.

    `binding` is where the memory limit lies between the least and the largest peak; None is no limit.
    """
    rng = np.random.default_rng(seed)
    one = small_problem(seed, memory=binding is not None, **features)
    count = len(one.node_cost)
    onward = rng.integers(0, 30, (len(one.node_cost[0]),) * 2).astype(float)
    later = np.repeat(3 * np.arange(copies), len(one.usage))[:, None]
    problem = one._replace(
        node_cost=list(one.node_cost) * copies,
        edge_nodes=np.concatenate(
            [
                *(one.edge_nodes + i * count for i in range(copies)),
                np.array([(i * count, (i + 1) * count) for i in range(copies - 1)]).reshape(-1, 2),
            ]
        ),
        edge_cost=[*one.edge_cost] * copies + [onward] * (copies - 1),
        usage_node=np.concatenate([one.usage_node + i * count for i in range(copies)]),
        usage=list(one.usage) * copies,
        usage_interval=np.tile(one.usage_interval, (copies, 1)) + later,
        load=list(one.load) * copies,
    )
    if binding is not None:
        peaks = [np.max(evaluate(problem, rng.integers(num_strategies(problem))).peak) for _ in range(30)]
        problem = problem._replace(memory_limit=float(min(peaks) + binding * (max(peaks) - min(peaks))))
    return problem, np.tile(np.arange(count), copies)


def small_repeated(binding: float | None, **features) -> Iterator[tuple[Problem, np.ndarray]]:
    for seed in range(40):
        problem, tied = repeated(seed, 2 + seed % 2, binding, **features)
        if math.prod(num_strategies(problem).tolist()) <= MOST_CHOICES:
            yield problem, tied


@pytest.mark.parametrize("features", [{}, {"forbidden": 0.1}, {"devices": 2}])
@pytest.mark.parametrize("binding", [None, 0.0, 0.3, 0.8])
def test_the_choice_is_nearly_optimal_and_the_bound_holds(binding, features):
    count = 0
    for problem, tied in small_repeated(binding, **features):
        best, found = optimum(problem), solve(problem, tied=tied)
        assert found.feasible == (best < math.inf)
        if found.feasible:
            count += 1
            assert found.cost == evaluate(problem, found.choice).cost
            assert best <= found.cost <= best + TIE_GAP * abs(best)
            assert found.lower_bound <= best * (1 + 1e-9)
    assert count >= 5


@pytest.mark.parametrize("binding", [None, 0.3])
def test_bounds_of_a_solver_that_is_not_exact_hold(binding):
    for problem, tied in small_repeated(binding):
        best, found = optimum(problem), solve(problem, tied=tied, solver="greedy", reduce=identity)
        if best < math.inf:
            assert found.lower_bound <= best * (1 + 1e-9)
            assert found.cost >= best or not found.feasible


def test_ties_are_kept_where_they_cost_little_and_dropped_where_they_cost_more():
    cost, prefer = np.array([1.0, 1.0]), np.array([[0.0, 5.0], [5.0, 0.0]])
    chain = Problem([cost] * 6, np.array([(v, v + 1) for v in range(5)]), [prefer] * 5)
    tied = np.zeros(6, int)
    for push, is_equal in ((1e-5, True), (1.0, False)):  # the ends would rather differ, by a little or by a lot
        ends = [np.array([0.0, 5 + push]), cost, cost, cost, cost, np.array([5 + push, 0.0])]
        pushed = chain._replace(node_cost=ends)
        found = solve(pushed, tied=tied)
        assert (len(set(found.choice)) == 1) == is_equal
        assert found.cost <= optimum(pushed) * (1 + TIE_GAP)


def test_a_limited_problem_uses_at_its_times_what_the_whole_does():
    rng = np.random.default_rng(0)
    for seed in range(20):
        problem, _ = repeated(seed, 3, 0.3)
        whole, times = Evaluator(problem), LazyMemoryLimit(problem)
        assert np.isinf(times.relaxation(problem).memory_limit)
        choices = [rng.integers(num_strategies(problem)) for _ in range(20)]
        exceeded = [times.exceeded_by(choice) for choice in choices]
        times.add(np.concatenate(exceeded[:5]))
        relaxed = times.relaxation(problem)
        kept_times = np.unique(np.concatenate(exceeded[:5]))
        for choice, own in zip(choices, exceeded, strict=True):
            assert bool(len(own)) == (evaluate(problem, choice).excess > 0)
            at, used = whole.live_usage(choice)
            before = np.searchsorted(at, kept_times, side="right") - 1
            most = used[before].max() if len(kept_times) else 0
            assert evaluate(relaxed, choice).excess == max(most - problem.memory_limit, 0)
            assert evaluate(relaxed, choice).cost == evaluate(problem, choice).cost
        assert all(evaluate(relaxed, choice).excess > 0 for choice in choices[:5] if len(times.exceeded_by(choice)))


def test_a_run_of_exceeded_times_is_limited_at_its_peak():
    # Two nodes of one strategy; the limit of 10 is exceeded from 2 to 5, most at 3, and from 8 to 9.
    amounts, intervals = [8.0, 4.0, 3.0, 12.0], [(0, 6), (2, 5), (3, 4), (8, 9)]
    problem = Problem(
        [np.zeros(1)] * 2, np.zeros((0, 2), int), [], usage_node=np.array([0, 1, 0, 1]),
        usage=[np.array([amount]) for amount in amounts], usage_interval=np.array(intervals), memory_limit=10.0,
    )  # fmt: skip
    assert LazyMemoryLimit(problem).exceeded_by(np.zeros(2, int)).tolist() == [3, 8]


def test_all_times_are_limited_in_the_end():
    problem, _ = repeated(1, 3, 0.3)
    times = LazyMemoryLimit(problem)
    for i in range(20):
        times.add(np.array([i]))
    assert times.all
    assert times.relaxation(problem) is problem
    assert LazyMemoryLimit(problem._replace(memory_limit=np.inf)).all


def test_a_limit_that_does_not_bind_changes_nothing():
    free, tied = repeated(4, 3, None)
    loose = free._replace(
        usage_node=np.array([0]), usage=[np.ones(len(free.node_cost[0]))], usage_interval=np.array([[0, 9]]),
        memory_limit=1.0,
    )  # fmt: skip
    one, other = solve(free, tied=tied), solve(loose, tied=tied)
    assert one.choice == other.choice
    assert one.lower_bound == other.lower_bound


def test_many_layers_with_a_binding_limit_are_solved_as_well_as_without_ties():
    problem, tied = repeated(12, 12, 0.4)
    found, plain = (solve(problem, tied=a, time_limit_s=3) for a in (tied, None))
    assert found.feasible
    assert found.cost <= plain.cost * 1.01
    assert found.lower_bound <= plain.cost


@pytest.mark.parametrize("is_tied", [True, False])
def test_however_short_the_time_is_there_is_a_good_choice(is_tied):
    problem, tied = repeated(12, 12, None)
    hurried, patient = (solve(problem, tied=tied if is_tied else None, time_limit_s=t) for t in (1e-9, None))
    cheapest = [int(np.argmin(cost)) for cost in problem.node_cost]
    assert hurried.status in ("optimal", "time limit")
    assert hurried.cost <= patient.cost * 1.1 < evaluate(problem, cheapest).cost


def test_tied_nodes_must_have_equally_many_strategies():
    problem = Problem([np.zeros(2), np.zeros(3)], np.zeros((0, 2), int), [])
    with pytest.raises(ValueError, match=r"`tied` ties nodes 0 and 1, which have 2 and 3 strategies"):
        solve(problem, tied=np.zeros(2, int))
    with pytest.raises(ValueError, match=r"`tied` must have one number for each of the 2 nodes, got .* shape \(3,\)"):
        solve(problem, tied=np.zeros(3, int))


def test_ctrl_c_in_the_tied_problem_stops_the_whole_search():
    calls = []

    def pressed(problem: Problem, *, time_limit_s, key) -> Iterator[Proposal]:
        calls.append(problem)
        raise KeyboardInterrupt
        yield Proposal()

    problem, tied = repeated(4, 3, None)
    assert solve(problem, tied=tied, solver=pressed, reduce=identity).status == "interrupted"
    assert len(calls) == 1


def test_ties_are_loosened_where_neighbours_differ_once_the_bound_no_longer_rises():
    prefer = np.array([[0.0, 5.0], [5.0, 0.0]])
    chain = Problem([np.ones(2)] * 8, np.array([(v, v + 1) for v in range(7)]), [prefer] * 7)
    calls: list[tuple[int, float]] = []

    def stuck(problem: Problem, *, time_limit_s, key) -> Iterator[Proposal]:
        calls.append((len(problem.node_cost), time_limit_s))
        for _ in range(3):
            yield Proposal(np.zeros(len(problem.node_cost), int), 0.0)

    solve(chain, tied=np.zeros(8, int), solver=stuck, reduce=identity, time_limit_s=100.0)
    # All nodes as one; the whole chain; both ends, the nodes beside them, and the four between. Each tied problem has
    # a fifth of the time.
    assert [size for size, _ in calls] == [1, 8, 3]
    assert [calls[i][1] for i in (0, 2)] == pytest.approx([20.0, 20.0], rel=0.1)


def test_a_tied_choice_is_found_though_the_whole_problem_is_never_reached():
    problem, tied = repeated(4, 3, None)
    quotient = merge_classes(problem, tied)
    calls: list[int] = []

    def only_tied(problem: Problem, *, time_limit_s, key) -> Iterator[Proposal]:
        calls.append(len(problem.node_cost))
        yield Proposal(np.zeros(len(problem.node_cost), int))
        if len(calls) > 1:
            raise KeyboardInterrupt

    found = solve(problem, tied=tied, solver=only_tied, reduce=identity)
    assert calls == [len(quotient.node_cost), len(problem.node_cost)]
    assert found.cost <= evaluate(problem, np.zeros(len(tied), int)).cost


@pytest.mark.parametrize("binding", [None, 0.3])
def test_a_start_never_makes_the_choice_worse(binding):
    rng = np.random.default_rng(0)
    for problem, tied in small_repeated(binding):
        best = optimum(problem)
        for start in (rng.integers(num_strategies(problem)), np.zeros(len(problem.node_cost), int)):
            for found in (solve(problem, tied=tied, start=start), solve(problem, start=start)):
                assert found.feasible == (best < math.inf)
                if found.feasible:
                    assert best <= found.cost <= best + TIE_GAP * abs(best)
                    assert found.lower_bound <= best * (1 + 1e-9)


def test_a_start_that_is_good_enough_is_the_answer_as_soon_as_the_bound_says_so():
    problem, tied = repeated(4, 3, None)
    first = solve(problem, tied=tied)
    num_solved = []

    def bounding(problem: Problem, **kwargs) -> Iterator[Proposal]:
        num_solved.append(len(problem.node_cost))
        yield Proposal(lower_bound=first.lower_bound)

    again = solve(problem, tied=tied, solver=bounding, reduce=identity, start=first.choice)
    assert (again.choice, again.cost) == (first.choice, first.cost)
    assert num_solved == [len(problem.node_cost)]  # the tied problem was not needed


def test_a_start_that_is_no_choice_is_refused():
    problem, tied = repeated(4, 3, None)
    for wrong in ([0], [99] * len(problem.node_cost)):
        for ties in (tied, None):
            with pytest.raises(ValueError, match="`start` "):
                solve(problem, tied=ties, start=wrong)

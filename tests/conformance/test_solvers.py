"""Every solver keeps the rules of `diffshard.base.Solver`; a new one is found by its `EXAMPLE`.

Its `EXAMPLE` also says what a solver promises: the optimum of that problem. If it proves this optimum, it has to prove
those of all small problems too; those with memory or loads only if its `EXAMPLE` has them.
"""

import functools
import math
import os
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from cost.base import Problem
from cost.evaluation import evaluate
from cost.validation import validate
from diffshard.base import Proposal, Solution
from diffshard.solving import solvers
from diffshard.solving.form import identity
from diffshard.solving.solve import resolve, solve, solver_names
from tests.conformance.discovery import examples
from tests.conformance.endless import ending, time_budget
from tests.diffshard.solving.random_problems import (
    CHAIN,
    EMPTY,
    FORMS,
    KINDS,
    layered_problem,
    optimum,
    random_graph,
    small_problem,
)

MODULES: dict[str, ModuleType] = {module.__name__.rpartition(".")[2]: module for module in examples(solvers)}
NAMES = tuple(MODULES)
SEEDS = {"mcmc": 3}  # it walks for seconds
_TIME_LIMIT_S = 1.0
_MOST_OVERTIME_S = 1.5
"""Computing beyond the time limit: an idle core needs 0.4 s to import HiGHS or to make a beam's last step."""

_FALSE_BOUND = "a `lower_bound` that the solver gave is above the optimum; it must hold for every feasible choice"
_NOT_AGAIN = "the solver must do the same each time for the same `key`"


def solved(name: str, problem: Problem, **options: Any) -> Solution:
    """What a solver finds without presolve; it must end."""
    with time_budget():
        return solve(problem, solver=ending(resolve(name)), reduce=identity, **options)


@functools.cache
def solved_example(name: str) -> tuple[Problem, Solution]:
    module = MODULES[name]
    assert callable(module.EXAMPLE), "`EXAMPLE` must be a function without arguments that makes a small problem"
    problem: Problem = module.EXAMPLE()  # pyright: ignore[reportAssignmentType]
    return problem, solved(name, problem)


def is_coupled(problem: Problem) -> bool:
    """Whether memory or loads join all nodes."""
    return bool(len(problem.load) or np.isfinite(problem.memory_limit).any())


def proves(name: str, problem: Problem) -> bool:
    """Whether the solver promises to prove the optimum of a small problem like this one."""
    example, solution = solved_example(name)
    return solution.status == "optimal" and (is_coupled(example) or not is_coupled(problem))


def propose_for_ever(problem: Problem, *, time_limit_s: float | None, key: Any) -> Iterator[Proposal]:
    while True:
        yield Proposal()


def think_for_ever(problem: Problem, *, time_limit_s: float | None, key: Any) -> Iterator[Proposal]:
    while True:
        pass
    yield Proposal()


@pytest.mark.parametrize("solver", [propose_for_ever, think_for_ever])
def test_a_solver_that_never_ends_fails_with_a_sentence(solver):
    with pytest.raises(pytest.fail.Exception, match=r"must end by itself"), time_budget(1.0):
        solve(small_problem(0), solver=ending(solver, most=100), reduce=identity)


def test_every_solver_has_an_example():
    assert set(NAMES) == set(solver_names())


@pytest.mark.parametrize("name", NAMES)
def test_the_optimum_of_the_example_is_reached(name):
    problem, solution = solved_example(name)
    validate(problem)
    assert solution.feasible
    assert max(bound for *_, bound in solution.history) <= optimum(problem) * (1 + 1e-9), _FALSE_BOUND
    assert solution.cost == optimum(problem), "the solver must reach the optimum of its `EXAMPLE`"
    assert solution.lower_bound <= solution.cost


def test_exact_solvers_prove_their_examples():
    plain, coupled = small_problem(0), small_problem(0, memory=True, devices=2)
    assert {name for name in NAMES if proves(name, plain)} >= {"dynamic_programming", "exact", "exhaustive", "gradient"}
    assert {name for name in NAMES if proves(name, coupled)} >= {"exact", "exhaustive", "gradient"}


@pytest.mark.parametrize("name", NAMES)
def test_equal_keys_give_equal_choices(name):
    problem, first = solved_example(name)
    again = solved(name, problem)
    np.testing.assert_array_equal(first.choice, again.choice, _NOT_AGAIN)
    assert again.status == first.status


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", KINDS)
def test_small_problems(name, kind):
    """No cost below the optimum, no bound above it, feasible where it says so, and proofs where they are promised."""
    ratios = []
    for seed in range(SEEDS.get(name, 6)):
        problem = small_problem(seed, **KINDS[kind])
        expected = optimum(problem)
        solution = solved(name, problem, key=seed)
        checked = evaluate(problem, solution.choice)
        assert (solution.cost, solution.feasible, solution.excess) == (checked.cost, checked.feasible, checked.excess)
        # The history has the bounds as the solver gave them; the solution's own is never above its cost.
        assert max(bound for *_, bound in solution.history) <= expected * (1 + 1e-9), _FALSE_BOUND
        if math.isinf(expected):
            assert not solution.feasible
            continue
        assert not solution.feasible or solution.cost >= expected - 1e-9
        ratios.append(solution.cost / max(expected, 1.0) if solution.feasible else math.inf)
        if proves(name, problem):
            assert solution.cost == pytest.approx(expected), f"seed {seed}"
            assert solution.status == "optimal", f"seed {seed}"
    assert not ratios or np.median(ratios) < 1.3, "costs relative to the optima; inf: not feasible"


@pytest.mark.parametrize("name", NAMES)
def test_corner_cases(name):
    single = Problem([np.array([3.0])], EMPTY, [], EMPTY[:, 0], [], EMPTY)
    apart = Problem([np.array([3.0, 1.0]), np.array([0.0, -2.0, 5.0])], EMPTY, [], EMPTY[:, 0], [], EMPTY)
    for problem, expected in ((single, 3.0), (apart, -1.0)):
        solution = solved(name, problem)
        assert solution.feasible
        assert solution.cost == expected


@pytest.mark.parametrize("name", NAMES)
def test_forms_of_graphs(name):
    for form, problem in FORMS.items():
        least = solve(problem, solver="exhaustive", reduce=identity).cost
        solution = solved(name, problem)
        assert solution.feasible
        assert solution.lower_bound <= least, _FALSE_BOUND
        assert least <= solution.cost <= 1.15 * least, form
        if proves(name, problem):
            assert (solution.cost, solution.status) == (least, "optimal"), form


@pytest.mark.parametrize("name", NAMES)
def test_negative_costs_and_parallel_edges(name):
    ring = random_graph(7, [*CHAIN, (5, 0), (0, 5), (0, 1)])  # two edges join 5 and 0, in both directions, and 0 and 1
    problem = ring._replace(node_cost=[cost - 40 for cost in ring.node_cost], edge_cost=[c - 9 for c in ring.edge_cost])
    least = solve(problem, solver="exhaustive", reduce=identity).cost
    solution = solved(name, problem)
    assert solution.lower_bound <= least <= solution.cost <= 0.9 * least < 0
    assert solution.cost == least or not proves(name, problem)


@pytest.mark.parametrize("name", NAMES)
def test_negative_and_infinite_loads(name):
    rng = np.random.default_rng(4)
    problem = random_graph(7, CHAIN)
    loads = [4 * rng.normal(size=(len(cost), 2)) - 30 for cost in problem.node_cost]
    loads[1][0, 1] = loads[2][-1] = np.inf
    problem = problem._replace(load=loads)
    best = solve(problem, solver="exhaustive", reduce=identity)
    solution = solved(name, problem)
    assert solution.feasible
    assert math.isfinite(solution.cost)
    assert max(bound for *_, bound in solution.history) <= best.cost <= solution.cost, _FALSE_BOUND
    assert solution.cost == best.cost or not proves(name, problem)


def test_only_infinite_loads_are_not_feasible():
    problem = random_graph(7, CHAIN)
    loads = [np.full((len(cost), 2), np.inf if v == 2 else 1.0) for v, cost in enumerate(problem.node_cost)]
    solution = solve(problem._replace(load=loads))
    assert not solution.feasible
    assert solution.status != "optimal"


def solution_or_refusal(name: str, problem: Problem, *, time_limit_s: float | None) -> Solution | None:
    """What a solver finds; None where the problem is larger than what it takes, which it has to say at once."""
    try:
        return solved(name, problem, key=5, time_limit_s=time_limit_s)
    except ValueError as error:
        if "at most" not in str(error):
            error.add_note("If this is to refuse a large problem, it needs the words: at most.")
            raise
        return None


@pytest.mark.parametrize("name", NAMES)
def test_equal_keys_give_equal_proposals(name):
    problem = layered_problem(2, 1, width=15, most=6, binding=0.8)
    runs = [solution_or_refusal(name, problem, time_limit_s=None) for _ in range(2)]
    if runs[0] is None or runs[1] is None:
        assert runs == [None, None]
        return
    np.testing.assert_array_equal(runs[0].choice, runs[1].choice, _NOT_AGAIN)
    assert runs[0].feasible
    assert [facts for _, *facts in runs[0].history] == [facts for _, *facts in runs[1].history], _NOT_AGAIN


@pytest.mark.parametrize("name", NAMES)
def test_time_limits_are_kept_and_used_for_better_choices(name, monkeypatch):
    """Counts seconds of computing, of solvers and of processes that they start: a busy machine makes these no longer.

    The first call compiles, which no limit stops. A solver that starts processes keeps its time by the wall clock: this
    process's computing would not show it that they are late.
    """
    problem = layered_problem(1, 6, binding=0.7)
    before_s = computing_of_children_s()
    solution_or_refusal(name, problem, time_limit_s=_TIME_LIMIT_S)
    if computing_of_children_s() == before_s:
        monkeypatch.setattr(time, "perf_counter", time.process_time)
    start_s = computing_s()
    solution = solution_or_refusal(name, problem, time_limit_s=_TIME_LIMIT_S)
    assert computing_s() - start_s < _TIME_LIMIT_S + _MOST_OVERTIME_S
    if solution is not None and solution.status == "time limit":
        assert solution.feasible, (
            f"There was no feasible choice after {_TIME_LIMIT_S} s. Propose one early, or refuse a problem of "
            f"{len(problem.node_cost)} nodes by a ValueError with the words: at most"
        )
        assert solution.history[-1][1] < solution.history[0][1]  # inf before the first feasible choice


def computing_s() -> float:
    """The seconds for which this process, and those of its children that have ended, have kept cores busy."""
    return time.process_time() + computing_of_children_s()


def computing_of_children_s() -> float:
    """The seconds for which processes that this one has started, and that have ended, have kept cores busy."""
    times = os.times()
    return times.children_user + times.children_system

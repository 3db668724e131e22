"""The one loop around every solver: errors at the boundary, what it keeps, how it stops, and what it says."""

import math
import time
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from cost.base import FORBIDDEN, Problem
from cost.evaluation import evaluate, violations
from cost.quantities import Quantity
from diffshard.base import Proposal
from diffshard.solving.form import identity
from diffshard.solving.objectives.objective import Objective
from diffshard.solving.solve import solve, solver_names
from search_spaces.numbered import NumberedSpace
from tests.diffshard.solving.random_problems import layered_problem, small_problem

EMPTY = np.zeros((0, 2), int)
TWO = Problem([np.array([1.0, 2.0]), np.array([4.0, 3.0])], EMPTY, [], EMPTY[:, 0], [], EMPTY)


def _proposing(*proposals: Any, pause_s: float = 0.0, then: type[BaseException] | None = None):
    def solver(problem: Problem, *, time_limit_s, key) -> Iterator[Proposal]:
        for proposal in proposals:
            time.sleep(pause_s)
            yield proposal
        if then is not None:
            raise then

    return solver


def test_unknown_solvers_are_refused_with_those_that_exist():
    with pytest.raises(ValueError, match=r"`solver` must be one of .*exact, exhaustive, gradient.*got 'magic'"):
        solve(TWO, solver="magic")
    assert "gradient" in solver_names()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"solver": 3}, "`solver` must be one of .*, or a function; got 3"),
        ({"solver": int}, "`solver` must be one of .*, or a function; got <class 'int'>"),
        ({"key": "x"}, "`key` must be a seed below 2\\^63, a JAX random key or None, got 'x'"),
        ({"time_limit_s": "3"}, "`time_limit_s` must be a positive number of seconds or None, not '3'"),
        ({"stop_gap": math.nan}, "`stop_gap` must be a number, zero or more, not nan"),
        ({"tied": [0, [1]]}, r"`tied` must have one number for each of the 2 nodes, got object of shape"),
        ({"start": [0, 9]}, "`start` takes strategy 9 of node 1, which has 2 strategies, 0 to 1"),
        ({"start": [0, 9], "tied": np.arange(2)}, "`start` takes strategy 9 of node 1"),
    ],
)
def test_arguments_of_the_wrong_kind_are_refused(words, said):
    with pytest.raises(ValueError, match=said):
        solve(TWO, **words)


@pytest.mark.parametrize("reduce", ["identity", None])
def test_a_presolve_is_a_function(reduce):
    with pytest.raises(
        TypeError, match=f"`reduce` must be a function of a problem, such as .*identity.* not {reduce!r}"
    ):
        solve(TWO, reduce=reduce)


def test_an_unknown_argument_is_told_all_that_there_are():
    with pytest.raises(
        TypeError, match=r"`x` is no argument of solve, whose own are problem, .*objective; .* progress"
    ):
        solve(TWO, x=1)  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize(
    ("objective", "said"),
    [
        (
            lambda amounts: jnp.zeros(()),
            r"must be a `diffshard.objectives.Objective\(function, quantities\)`, not a function",
        ),
        ("x", r"`objective` of `solve` must be .*, not 'x'"),
        (
            Objective(None, {"x": Quantity(TWO.node_cost)}),  # pyright: ignore[reportArgumentType]
            r"`objective.function` must be a function of amounts, .* not None",
        ),
        (
            Objective(lambda amounts: jnp.zeros(()), {}),
            r"`objective.quantities` must be a dict of one Quantity or more .*, not {}",
        ),
    ],
)
def test_an_objective_of_a_problem_has_quantities(objective, said):
    with pytest.raises(TypeError, match=said):
        solve(TWO, objective=objective)


@pytest.mark.parametrize("factor", [1e20, 1e300])
def test_an_objective_as_large_as_what_is_forbidden_is_told_so(factor):
    large = Objective(lambda amounts: factor * amounts["x"] ** 2, {"x": Quantity(TWO.node_cost)})
    with pytest.raises(ValueError, match=r"`objective` is .* at the first plan; it must stay between -1e18 and 1e18"):
        solve(TWO, objective=large)


def test_a_problem_without_a_feasible_choice_says_so_before_its_objective_is_too_large():
    full = TWO._replace(
        usage_node=np.array([0]), usage=[np.full(len(TWO.node_cost[0]), 5.0)], usage_interval=np.array([[0, 1]]),
        memory_limit=1.0,
    )  # fmt: skip
    objective = Objective(lambda amounts: 1e19 * amounts["x"] ** 2, {"x": Quantity(TWO.node_cost)})
    assert solve(full, objective=objective).status == "infeasible"


def test_the_start_of_a_problem_with_amounts_is_named():
    with pytest.raises(ValueError, match="`start` takes strategy 9 of node 1"):
        solve(TWO._replace(amount=[np.ones((2, 1))] * 2, amount_limit=np.array([np.inf])), start=[0, 9])


@pytest.mark.parametrize("field", ["amount", "edge_load"])
def test_what_is_no_list_of_arrays_is_refused_before_the_form_of_a_problem_is_looked_at(field):
    with pytest.raises(ValueError, match=f"`{field}` must be a list of NumPy arrays, got NoneType"):
        solve(TWO._replace(**{field: None}))


@pytest.mark.parametrize("limit", [0.0, -1.0, math.nan])
def test_time_limits_are_positive(limit):
    with pytest.raises(ValueError, match="`time_limit_s` must be a positive"):
        solve(TWO, time_limit_s=limit)


@pytest.mark.parametrize("takes_a_problem", [solve, NumberedSpace])
def test_what_is_no_problem_is_refused(takes_a_problem):
    with pytest.raises(TypeError, match="`problem` must be a Problem, not list"):
        takes_a_problem([TWO])


def test_a_broken_problem_is_refused():
    with pytest.raises(ValueError, match=r"`node_cost\[0\]` must not hold NaN"):
        solve(TWO._replace(node_cost=[np.array([math.nan]), TWO.node_cost[1]]))


def test_a_problem_without_nodes_is_solved():
    solution = solve(Problem([], EMPTY, [], EMPTY[:, 0], [], EMPTY))
    assert (solution.cost, solution.feasible, solution.status, len(solution.choice)) == (0, True, "optimal", 0)


def test_the_best_proposal_is_kept_whatever_follows():
    worse, better = np.array([1, 0]), np.array([0, 0])
    calls = []
    solution = solve(
        TWO,
        solver=_proposing(Proposal(worse), Proposal(better, 2.0), Proposal(worse), Proposal(None, 1.0)),
        reduce=identity,
        progress=lambda *numbers: calls.append(numbers),
    )
    # The cheapest strategy of each node is there before any solver: 1 + 3.
    assert (solution.cost, solution.lower_bound, solution.status) == (4.0, 2.0, "finished")
    assert solution.gap == pytest.approx(0.5)
    assert [cost for _, cost, _ in calls] == [4.0, 4.0]
    assert solution.history == tuple(calls)


def test_the_time_limit_returns_the_best_so_far():
    solution = solve(TWO, solver=_proposing(*[Proposal()] * 100, pause_s=0.02), reduce=identity, time_limit_s=0.1)
    assert (solution.status, solution.cost) == ("time limit", 4.0)
    assert solution.history[-1][0] < 1.0


def test_ctrl_c_returns_the_best_so_far():
    stopped = _proposing(Proposal(np.array([0, 1])), then=KeyboardInterrupt)
    solution = solve(TWO, solver=stopped, reduce=identity)
    assert (solution.status, solution.cost) == ("interrupted", 4.0)


def test_a_closed_gap_stops_the_solver():
    def endless(problem: Problem, *, time_limit_s, key) -> Iterator[Proposal]:
        while True:
            yield Proposal(np.array([0, 1]), 4.0)

    solution = solve(TWO, solver=endless, reduce=identity)
    assert (solution.status, solution.gap) == ("optimal", 0.0)


@pytest.mark.parametrize("tied", [None, np.arange(2)])
def test_a_gap_that_is_small_enough_stops_the_solver(tied):
    def slow(problem: Problem, *, time_limit_s, key) -> Iterator[Proposal]:
        yield from (Proposal(np.array([0, 1]), bound) for bound in (3.0, 3.7, 3.8, 3.9, 4.0))

    solution = solve(TWO, solver=slow, reduce=identity, stop_gap=0.1, tied=tied)
    assert (solution.cost, solution.lower_bound) == (4.0, 3.7)


@pytest.mark.parametrize(
    ("solver", "error", "said"),
    [
        (
            _proposing((np.array([0, 1]), 4.0)),
            TypeError,
            r"`solver` must yield diffshard.solvers.Proposal.*, not \(array",
        ),
        (_proposing(np.array([0, 1])), TypeError, "`solver` must yield diffshard.solvers.Proposal"),
        (_proposing(Proposal(np.array([0]))), ValueError, r"each of the 2 nodes .*, not a choice of shape \(1,\)"),
        (_proposing(Proposal(np.ones((2, 2)))), ValueError, r"not a choice of shape \(2, 2\)"),
        (_proposing(Proposal(np.array([0.6, 1.0]))), ValueError, "must propose strategy indices.*, not float64"),
        (_proposing(Proposal(np.array([None, 1]))), ValueError, "must propose strategy indices.*, not object"),
        (
            _proposing(Proposal(np.array([9, 1]))),
            ValueError,
            "`solver` proposed strategy 9 of node 0, .* propose 0 to 1",
        ),
        (_proposing(Proposal(np.array([0, -1]))), ValueError, "`solver` proposed strategy -1 of node 1, which has 2"),
        (
            _proposing(Proposal(None, math.nan)),
            ValueError,
            "must propose a number as `lower_bound`, not nan; -inf is no",
        ),
        (_proposing(Proposal(None, "1")), ValueError, "must propose a number as `lower_bound`, not '1'"),  # pyright: ignore[reportArgumentType]
        (_proposing(Proposal(None, None)), ValueError, "must propose a number as `lower_bound`, not None"),  # pyright: ignore[reportArgumentType]
        (lambda problem, *, time_limit_s, key: None, TypeError, "must be a generator of .*, but it returned None"),
        (
            lambda problem: iter(()),
            TypeError,
            r"must be a function of \(problem, \*, time_limit_s, key\): .*time_limit_s",
        ),
    ],
)
def test_a_solver_that_yields_no_proposals_is_told_so(solver, error, said):
    with pytest.raises(error, match=said):
        solve(TWO, solver=solver, reduce=identity)


def test_an_infeasible_problem_says_so_and_by_how_much():
    tight = TWO._replace(
        usage_node=np.array([0, 1]),
        usage=[np.array([5, 7]), np.array([6, 4])],
        usage_interval=np.array([[0, 2], [1, 3]]),
    )
    solution = solve(tight._replace(memory_limit=8))
    assert (solution.status, solution.feasible, solution.excess) == ("infeasible", False, 1.0)
    assert solution.choice == (0, 1)
    assert solution.gap == math.inf
    assert violations(tight._replace(memory_limit=8), solution.choice) == [
        "At time 1 the memory exceeds the limit by 1; its largest users are nodes 0 (5), 1 (4)."
    ]
    assert not violations(tight._replace(memory_limit=9), solution.choice)


@pytest.mark.parametrize("limit", [0.0, 1e-30, 0.5])
@pytest.mark.parametrize("num_nodes", [10, 60])
def test_where_the_least_usages_exceed_the_limit_no_search_is_needed(num_nodes, limit):
    rng = np.random.default_rng(num_nodes)
    usage = 1 + rng.random((num_nodes, 6))
    ends = np.stack([np.arange(num_nodes - 1), np.arange(1, num_nodes)], axis=1)
    problem = Problem(
        list(rng.random((num_nodes, 6))), ends, list(rng.random((len(ends), 6, 6))),
        np.arange(num_nodes), list(usage), np.tile([0, 2], (num_nodes, 1)), limit,
    )  # fmt: skip
    solution = solve(problem, time_limit_s=20.0)
    assert (solution.status, solution.feasible, solution.lower_bound, solution.gap) == (
        "infeasible",
        False,
        math.inf,
        math.inf,
    )
    assert solution.history[-1][0] < 10
    np.testing.assert_array_equal(solution.choice, usage.argmin(axis=1))
    assert solution.excess == pytest.approx(usage.min(axis=1).sum() - limit)


def test_contradictory_transfers_are_infeasible_and_named():
    never = TWO._replace(edge_nodes=np.array([[0, 1]]), edge_cost=[np.full((2, 2), np.inf)])
    solution = solve(never)
    assert (solution.status, solution.feasible) == ("infeasible", False)
    assert violations(never, [0, 1]) == ["Nodes 0 and 1 take strategies 0 and 1, which exclude each other."]


def test_the_largest_cost_that_is_allowed_breaks_no_rule():
    costs = np.array([FORBIDDEN - 1, FORBIDDEN])
    problem = TWO._replace(node_cost=[costs, costs], edge_nodes=np.array([[0, 1]]), edge_cost=[np.diag(costs)])
    assert violations(problem, [0, 0]) == []
    assert violations(problem, [0, 1]) == ["Node 1 takes strategy 1, which is forbidden."]


def test_costs_are_those_of_the_problem_as_given():
    problem = layered_problem(1, 2, width=20)
    solution = solve(problem)
    assert solution.cost == evaluate(problem, solution.choice).cost
    assert 0 < solution.lower_bound <= solution.cost
    assert solution.gap == pytest.approx(1 - solution.lower_bound / solution.cost)


def test_equal_keys_give_equal_solutions():
    problem = small_problem(5, memory=True)
    first, second = (solve(problem, solver="mcmc", key=3) for _ in range(2))
    np.testing.assert_array_equal(first.choice, second.choice)
    assert first.cost == second.cost

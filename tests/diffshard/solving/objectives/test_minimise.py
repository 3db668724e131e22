"""Objectives that are not sums: the optimum of small problems by brute force, valid bounds, and clear errors."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diffshard
from cost.base import Problem
from cost.evaluation import Evaluator, evaluate
from cost.quantities import LiveMemory, Quantity, amounts_of
from diffshard.base import InfeasibleError, Solution
from diffshard.solving.objectives.minimise import minimise
from diffshard.solving.objectives.objective import Objective
from diffshard.solving.solve import solve


def random_problem(seed, num_nodes=7, num_strategies=3, columns=3, limit=np.inf):
    """Returns a problem with a linear part, and two quantities that disagree about which strategies are good."""
    generator = np.random.default_rng(seed)
    edges = np.array([(i, j) for i in range(num_nodes) for j in (i + 1, i + 3) if j < num_nodes])
    sizes = (num_strategies,) * num_nodes
    problem = Problem(
        [0.1 * generator.uniform(size=s) for s in sizes], edges, [np.zeros((num_strategies,) * 2) for _ in edges],
        usage_node=np.arange(num_nodes), usage=[generator.integers(1, 9, s).astype(float) for s in sizes],
        usage_interval=np.array([[i, i + 3] for i in range(num_nodes)]), memory_limit=limit,
    )  # fmt: skip
    loads = Quantity(
        [generator.uniform(size=(s, columns)) for s in sizes],
        [0.5 * generator.uniform(size=(num_strategies, num_strategies, columns)) for _ in edges],
    )
    items = Quantity([generator.uniform(size=s) for s in sizes], (), np.arange(num_nodes), None, num_nodes)
    return problem, {"loads": loads, "items": items, "memory": LiveMemory(problem)}


def slowest(amounts):
    return jnp.max(amounts["loads"]) + 0.1 * jnp.sum(amounts["loads"])


def smooth(amounts):
    return jax.nn.logsumexp(3 * amounts["loads"]) / 3 + jnp.sum(amounts["items"] ** 2)


def peak(amounts):
    return jnp.max(amounts["memory"]) + jnp.max(amounts["loads"])


def longest_path(amounts):
    """The finishing time of two streams that wait for each other, a maximum over paths."""
    first = second = jnp.zeros(())
    for seconds in amounts["items"]:
        first, second = first + seconds, jnp.maximum(first, second) + 0.7 * seconds
    return jnp.maximum(first, second) + 0.01 * jnp.sum(amounts["loads"])


def least_price(problem, quantities, function):
    """Returns the least price of all choices that keep the memory limit."""
    sizes = [range(len(cost)) for cost in problem.node_cost]
    evaluate = Evaluator(problem)
    choices = [np.array(c) for c in itertools.product(*sizes) if evaluate(np.array(c)).feasible]
    all_amounts = [amounts_of(quantities, problem, choice) for choice in choices]
    stacked = {name: jnp.array([amounts[name] for amounts in all_amounts]) for name in quantities}
    linear_costs = np.array([evaluate(choice).cost for choice in choices])
    return float(np.min(linear_costs + np.asarray(jax.vmap(function)(stacked), float)))


def linear(problem, start, stop_gap):
    return solve(problem, start=start, stop_gap=stop_gap)


def cheapest(problem):
    return np.array(solve(problem).choice)


@pytest.mark.parametrize("function", [slowest, smooth, peak, longest_path], ids=lambda f: f.__name__)
@pytest.mark.parametrize("seed", range(2))
def test_the_optimum_is_found_and_proven(function, seed):
    problem, quantities = random_problem(seed, num_nodes=6)
    found = minimise(problem, Objective(function, quantities), linear, cheapest(problem), most_problems=2000)
    best = least_price(problem, quantities, function)
    assert found.cost == pytest.approx(best, rel=1e-5)  # prices of this test are in float32
    assert found.status == "optimal"
    assert found.lower_bound <= found.cost


@pytest.mark.parametrize("most_problems", [1, 2, 5, 10])
def test_a_search_that_is_cut_off_has_a_bound_that_holds(most_problems):
    for seed in range(4):
        problem, quantities = random_problem(seed, num_nodes=6)
        objective = Objective(slowest, quantities)
        found = minimise(problem, objective, linear, cheapest(problem), most_problems=most_problems)
        assert found.lower_bound <= least_price(problem, quantities, slowest) * (1 + 1e-6)
        assert found.status in ("finished", "optimal")
        assert [cost for _, cost, _ in found.history] == sorted((cost for _, cost, _ in found.history), reverse=True)


def test_the_memory_limit_holds_for_every_choice():
    problem, quantities = random_problem(1, num_nodes=6, limit=13.0)

    def solve_linear(tangent, start, stop_gap):
        solution = solve(tangent, start=start, stop_gap=stop_gap)
        if not solution.feasible:
            raise InfeasibleError("Nothing fits.")
        return solution

    found = minimise(problem, Objective(slowest, quantities), solve_linear, cheapest(problem), most_problems=2000)
    assert evaluate(problem, found.choice).feasible
    assert found.cost == pytest.approx(least_price(problem, quantities, slowest), rel=1e-5)
    free, _ = random_problem(1, num_nodes=6)
    assert found.cost > least_price(free, quantities, slowest) * 1.001  # the limit binds


def test_the_first_choice_under_a_kink_is_the_one_that_neither_side_finds():
    # max(C + O/4, O): the first strategy has the least C + O/4, the second the least O, the third is the fastest.
    seconds = np.array([[1.0, 8.0], [10.0, 1.0], [5.0, 4.5]])
    problem = Problem([np.zeros(3)], np.zeros((0, 2), int), [])
    objective = Objective(
        lambda amounts: jnp.maximum(amounts["s"][0] + amounts["s"][1] / 4, amounts["s"][1]), {"s": Quantity([seconds])}
    )
    found = minimise(problem, objective, linear, np.array([0]))
    assert found.choice == (2,)
    assert found.cost == 5 + 4.5 / 4
    assert found.lower_bound == pytest.approx(found.cost)


def test_a_function_that_is_not_convex_has_no_bound_but_from_a_convex_one_below():
    problem, quantities = random_problem(2, num_nodes=6)

    def concave(amounts):
        return jnp.sqrt(jnp.sum(amounts["loads"])) + jnp.min(amounts["loads"])

    def below(amounts):
        return jnp.min(amounts["loads"]) * 0 + 0.1 * jnp.sum(amounts["loads"])

    best = least_price(problem, quantities, concave)
    without = minimise(problem, Objective(concave, quantities), linear, cheapest(problem), most_problems=40)
    assert without.lower_bound == -math.inf
    assert without.cost <= best * 1.05
    bounded = minimise(problem, Objective(concave, quantities, below), linear, cheapest(problem), most_problems=40)
    assert 0 < bounded.lower_bound <= best
    assert bounded.cost <= best * 1.02


def test_without_its_gradient_the_same_search_finds_worse_choices():
    ratios = []
    for seed in range(4):
        problem, quantities = random_problem(seed, num_nodes=24, num_strategies=4)
        differ = (
            2.0 * (1 - np.eye(4))[..., None] * np.ones(3)
        )  # neighbours that differ cost all, so that many must change
        quantities |= {"loads": quantities["loads"]._replace(edge=[differ] * len(problem.edge_nodes))}

        @jax.custom_vjp
        def shuffled(amounts):
            return slowest(amounts)

        shuffled.defvjp(
            lambda amounts: (slowest(amounts), jax.grad(slowest)(amounts)),
            lambda gradient, g: ({n: g * jnp.roll(jnp.ravel(a), 1).reshape(a.shape) for n, a in gradient.items()},),
        )
        start = np.arange(24) % 4
        own, other = (
            minimise(problem, Objective(function, quantities), linear, start, most_problems=8).cost
            for function in (slowest, shuffled)
        )
        ratios.append(other / own)
    assert min(ratios) >= 1 - 1e-9
    assert np.mean(ratios) > 1.01


def test_solve_takes_an_objective_and_a_time_limit():
    problem, quantities = random_problem(3, num_nodes=6)
    best = least_price(problem, quantities, slowest)
    told = []
    found = diffshard.solve(
        problem, objective=Objective(slowest, quantities), time_limit_s=60, progress=lambda *entry: told.append(entry)
    )
    assert found.status == "optimal"
    assert found.cost == pytest.approx(best, rel=1e-5)
    assert told[-1][1:] == (found.cost, pytest.approx(found.lower_bound))
    again = diffshard.solve(problem, objective=Objective(slowest, quantities), start=found.choice, time_limit_s=1e-6)
    assert (again.choice, again.status) == (found.choice, "time limit")
    free = Problem(
        [np.zeros(2)], np.zeros((0, 2), int), [], np.array([0]), [np.array([3.0, 4.0])], np.array([[0, 1]]), 2
    )
    memory = {"memory": LiveMemory(free)}
    assert not diffshard.solve(free, objective=Objective(lambda a: jnp.sum(a["memory"]), memory)).feasible


def test_a_search_that_finds_nothing_feasible_has_the_price_and_the_bound_of_the_objective(monkeypatch):
    problem = Problem(
        [np.zeros(2)], np.zeros((0, 2), int), [], usage_node=np.array([0]), usage=[np.array([0.0, 5.0])],
        usage_interval=np.array([[0, 1]]), memory_limit=4.0,
    )  # fmt: skip
    squared = Objective(lambda amounts: amounts["of"] ** 2, {"of": Quantity([np.array([9.0, 10.0])])})

    def does_not_fit(tangent, *_, **__):
        costs = tangent.node_cost[0]
        return Solution(
            (1,), float(costs[1]), float(min(costs)), math.inf, False, 1.0, ((0.0, 1.0, 1.0),), "time limit"
        )

    monkeypatch.setattr("diffshard.solving.solve.run_solver", does_not_fit)
    found = solve(problem, objective=squared)
    assert not found.feasible
    assert found.cost == 100.0
    assert found.lower_bound <= 81.0  # of the choice that fits; the tangent has costs from 162 to 200


def test_an_interrupted_search_returns_its_best_choice_with_the_bound_so_far():
    problem, quantities = random_problem(0)
    solved = []

    def interrupted(tangent, start, stop_gap):
        solved.append(solve(tangent, start=start))
        return solved[-1]._replace(status="interrupted") if len(solved) == 2 else solved[-1]

    found = minimise(problem, Objective(slowest, quantities), interrupted, cheapest(problem))
    assert found.status == "interrupted"
    assert len(solved) == 2
    assert -math.inf < found.lower_bound <= least_price(problem, quantities, slowest) <= found.cost * (1 + 1e-6)


def test_no_problem_is_solved_when_the_time_is_over():
    problem, quantities = random_problem(0)

    def never(tangent, start, stop_gap):
        raise AssertionError

    start = cheapest(problem)
    found = minimise(problem, Objective(slowest, quantities), never, start, is_over=lambda: True)
    assert found.choice == tuple(start)
    assert found.status == "time limit"


@pytest.mark.parametrize(
    ("function", "error", "words"),
    [
        (
            lambda amounts: amounts["loads"],
            TypeError,
            r"`cost` must return a floating scalar, but it returns float64\[3\]",
        ),
        (lambda amounts: 3.0, ValueError, "`cost` has no gradient"),
        (lambda amounts: "fast", TypeError, "`cost` must be a function of JAX that returns a floating scalar"),
        (lambda amounts: jnp.argmax(amounts["loads"]), TypeError, "must return a floating scalar"),
        (
            lambda amounts: amounts["lods"].sum(),
            ValueError,
            "`cost` reads 'lods', which is no quantity; there are loads,",
        ),
        (
            lambda amounts: jnp.round(amounts["loads"].sum()),
            ValueError,
            "`cost` has no gradient with respect to loads,",
        ),
        (lambda amounts: jnp.sqrt(amounts["loads"].sum() - 1e6), ValueError, "`cost` must be finite at every mixture"),
        (lambda amounts: jnp.sqrt(0 * amounts["loads"].sum()), ValueError, "its gradient with respect to 'loads'"),
    ],
)
def test_a_function_that_cannot_be_minimised_is_named(function, error, words):
    problem, quantities = random_problem(0)
    with pytest.raises(error, match=words):
        minimise(problem, Objective(function, quantities, name="cost"), linear, cheapest(problem))

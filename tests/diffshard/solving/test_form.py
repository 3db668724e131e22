"""Problems with groups of loads, edges that add to loads, and amounts, against the formula and brute force."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from cost.base import Problem, num_strategies
from cost.evaluation import change_costs, evaluate, relaxed_cost
from diffshard.solving import form
from diffshard.solving.form import has_few_pairs, is_node_form, node_form
from diffshard.solving.objectives.objective import split_loads
from diffshard.solving.solve import solve
from tests.diffshard.solving.random_problems import small_problem

SEEDS = range(12)


def formed_problem(
    seed: int, *, edge_loads: bool = True, amounts: bool = True, memory: bool = True, negative: bool = False
) -> Problem:
    """Returns a small random problem with four loads in two groups, and two amounts whose limits often bind."""
    rng = np.random.default_rng(1000 + seed)
    problem = small_problem(seed, memory=memory, devices=4)
    sizes, least = num_strategies(problem), -5 if negative else 0
    shapes = [np.shape(matrix) for matrix in problem.edge_cost]
    problem = problem._replace(load_group=np.array([1, 0, 1, 0]))
    if edge_loads:
        tables = [rng.integers(least, 20, (*shape, 4)) * (rng.random() < 0.7) for shape in shapes]
        problem = problem._replace(edge_load=[table.astype(float) for table in tables])
    if not amounts:
        return problem
    of_nodes = [rng.integers(least, 10, (size, 2)).astype(float) for size in sizes]
    of_edges = [rng.integers(least, 6, (*shape, 2)).astype(float) * (rng.random() < 0.5) for shape in shapes]
    limit = 0.9 * np.sum([rows.mean(axis=0) for rows in of_nodes], axis=0)
    limit += 0.9 * np.sum([np.zeros(2), *(table.mean(axis=(0, 1)) for table in of_edges)], axis=0)
    return problem._replace(amount=of_nodes, edge_amount=of_edges, amount_limit=np.floor(limit))


def formula(problem: Problem, choice: tuple[int, ...]) -> float:
    """Returns the cost of a choice as the docstring of `Problem` has it, inf where a limit is exceeded."""
    pairs = [(int(u), int(v)) for u, v in problem.edge_nodes]
    cost = sum(row[s] for row, s in zip(problem.node_cost, choice, strict=True))
    cost += sum(matrix[choice[u], choice[v]] for (u, v), matrix in zip(pairs, problem.edge_cost, strict=True))
    loads = np.sum([load[s] for load, s in zip(problem.load, choice, strict=True)], axis=0)
    loads = loads + sum(t[choice[u], choice[v]] for (u, v), t in zip(pairs, problem.edge_load, strict=False))
    for group in np.unique(problem.load_group):
        cost += max(load for load, g in zip(loads, problem.load_group, strict=True) if g == group)
    if len(problem.amount):
        amounts = sum(rows[s] for rows, s in zip(problem.amount, choice, strict=True))
        amounts = amounts + sum(t[choice[u], choice[v]] for (u, v), t in zip(pairs, problem.edge_amount, strict=False))
        if (amounts > problem.amount_limit).any():
            return np.inf
    for time in range(20):
        uses = zip(problem.usage, problem.usage_node, problem.usage_interval, strict=True)
        if sum(use[choice[v]] for use, v, (a, b) in uses if a <= time < b) > problem.memory_limit:
            return np.inf
    return float(cost)


def choices(problem: Problem) -> list[tuple[int, ...]]:
    return list(itertools.product(*map(range, num_strategies(problem).tolist())))


@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_prices_are_those_of_the_formula(seed, negative):
    problem = formed_problem(seed, negative=negative)
    for choice in choices(problem)[::7]:
        found = evaluate(problem, choice)
        expected = formula(problem, choice)
        assert found.feasible == np.isfinite(expected)
        if found.feasible:
            assert found.cost == expected
            assert float(relaxed_cost(problem, _one_hot(problem, choice))) == pytest.approx(expected, rel=1e-5)
            for v, change in enumerate(change_costs(problem, choice)):
                other = [*choice]
                other[v] = len(change) - 1
                assert change[-1] == pytest.approx(evaluate(problem, other).cost - found.cost)


def _one_hot(problem, choice):
    return [jnp.eye(len(cost))[s] for cost, s in zip(problem.node_cost, choice, strict=True)]


@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_form_that_solvers_take_has_the_same_prices(seed, negative):
    problem = formed_problem(seed, negative=negative)
    nodes = node_form(problem)
    assert is_node_form(nodes.problem)
    assert nodes.problem.amount == ()
    for choice in choices(problem)[::5]:
        here, there = evaluate(problem, choice), evaluate(nodes.problem, nodes.choice_of(choice))
        assert (here.cost, here.feasible, here.excess > 0) == (there.cost, there.feasible, there.excess > 0)


@pytest.mark.parametrize("solver", ["gradient", "exact", "greedy", "beam", "mcmc", "exhaustive"])
@pytest.mark.parametrize("seed", SEEDS[:6])
def test_solvers_are_held_against_brute_force(solver, seed):
    problem = formed_problem(seed, negative=bool(seed % 2))
    least = min(formula(problem, choice) for choice in choices(problem))
    assert has_few_pairs(problem)
    if np.prod([float(np.size(matrix)) for matrix in problem.edge_cost]) > 1e5 and solver == "exhaustive":
        pytest.skip("too many choices once edges are nodes")
    found = solve(problem, solver=solver)
    assert len(found.choice) == len(problem.node_cost)
    assert found.lower_bound <= least * (1 + 1e-9)
    if np.isfinite(least):
        if found.feasible:
            assert found.cost == formula(problem, found.choice)
        if solver in ("gradient", "exact"):
            assert found.feasible
            assert found.cost == least
    else:
        assert not found.feasible
        assert found.excess > 0


@pytest.mark.parametrize("seed", SEEDS[:6])
def test_loads_of_many_edges_are_an_objective(seed, monkeypatch):
    problem = formed_problem(seed, amounts=bool(seed % 2))
    least = min(formula(problem, choice) for choice in choices(problem))
    monkeypatch.setattr(form, "_MOST_PAIRS", -1)
    found = solve(problem)
    assert found.feasible == np.isfinite(least)
    if found.feasible:
        assert found.cost == pytest.approx(formula(problem, found.choice))
        assert found.cost == pytest.approx(least)  # small enough for branches to close every gap
        assert found.lower_bound <= least * (1 + 1e-6)


def test_an_objective_is_added_to_loads_of_edges(monkeypatch):
    problem = formed_problem(3, amounts=False, memory=False)
    _, objective = split_loads(problem)
    monkeypatch.setattr(form, "_MOST_PAIRS", -1)
    more = objective._replace(function=lambda amounts: 2.0 * amounts["of"][0], quantities={"of": _first_load(problem)})
    costs = [
        formula(problem, c) + 2.0 * more.quantities["of"].amounts(problem, np.array(c))[0] for c in choices(problem)
    ]
    assert solve(problem, objective=more).cost == pytest.approx(min(costs))


def _first_load(problem):
    _, objective = split_loads(problem)
    return next(iter(objective.quantities.values()))


def test_loads_that_forbid_strategies_do_so_where_they_are_an_objective(monkeypatch):
    problem = formed_problem(3, amounts=False, memory=False)
    load = [np.array(rows, float) for rows in problem.load]
    v = int(np.argmax(num_strategies(problem)))
    load[v][1] = np.inf
    problem = problem._replace(load=load)
    least = min(formula(problem, choice) for choice in choices(problem))
    monkeypatch.setattr(form, "_MOST_PAIRS", -1)
    found = solve(problem)
    assert found.choice[v] != 1
    assert found.cost == pytest.approx(least)


@pytest.mark.parametrize(
    ("amounts", "limit"),
    [
        (np.array([[2**54 + 2], [0]]), np.array([np.inf])),
        (np.array([[-100], [100]], np.int8), np.array([100], np.int8)),
        (np.array([[3], [9]]), np.array([5], np.uint64)),
        (np.array([[3], [9]]), [5]),
    ],
)
def test_amounts_within_their_limits_are_so_in_every_type(amounts, limit):
    problem = Problem([np.array([0.0, 1.0])], np.zeros((0, 2), int), [], amount=[amounts], amount_limit=limit)
    found = solve(problem)
    assert (found.cost, found.feasible, found.status) == (0.0, True, "optimal")


def test_what_is_no_problem_is_named():
    with pytest.raises(TypeError, match="`problem` must be a Problem, not str"):
        solve("problem")  # pyright: ignore[reportArgumentType]


def test_a_start_and_tied_nodes_carry_over():
    problem = formed_problem(0)
    least = min(choices(problem), key=lambda choice: formula(problem, choice))
    assert np.isfinite(formula(problem, least))
    found = solve(problem, start=least, tied=np.arange(len(problem.node_cost)))
    assert found.cost == formula(problem, least)


def test_two_groups_by_hand():
    rows = np.array([[3.0, 1.0, 0.0, 4.0], [0.0, 0.0, 5.0, 5.0]])
    problem = Problem(
        node_cost=[np.zeros(2), np.zeros(2)],
        edge_nodes=np.array([[0, 1]]),
        edge_cost=[np.zeros((2, 2))],
        load=[rows, rows],
        edge_load=[np.array([[[0, 9.0, 0, 0], [0, 0, 0, 0]], [[0, 0, 0, 0], [0, 0, 0, 1.0]]])],
        load_group=np.array([0, 0, 1, 1]),
        amount=[np.array([[1.0], [0.0]])] * 2,
        edge_amount=[np.array([[[0.0], [0.0]], [[0.0], [2.0]]])],
        amount_limit=np.array([1.0]),
    )
    both, mixed, none = (evaluate(problem, choice) for choice in ([0, 0], [0, 1], [1, 1]))
    assert (both.cost, both.feasible, both.excess) == (11 + 8, False, 1)  # loads 6 and 2 + 9; 0 and 8
    assert (mixed.cost, mixed.feasible) == (3 + 9, True)  # 3 and 1; 5 and 9
    assert (none.cost, none.feasible, none.excess) == (0 + 11, False, 1)  # 0 and 0; 10 and 10 + 1
    found = solve(problem)
    assert (found.cost, found.status) == (12, "optimal")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"load_group": np.array([0, 1])}, "`load_group` must have a number for each of 4 loads"),
        ({"load_group": np.zeros(4)}, "`load_group` must be integers"),
        ({"load": ()}, "`load_group` must have a number|`edge_load` needs `load`"),
        ({"amount_limit": np.zeros(3)}, "`amount_limit` must be one number for each of the 2 columns of `amount`"),
        ({"amount": [np.zeros((9, 2))]}, r"`amount` must be \(\) or one array for each"),
        ({"edge_amount": [np.zeros((1, 1, 2))] * 99}, r"`edge_amount` must be \(\) or one array for each"),
    ],
)
def test_what_breaks_the_form_is_named(change, message):
    problem = formed_problem(3)
    assert len(problem.edge_cost)
    with pytest.raises(ValueError, match=message):
        solve(problem._replace(**change))

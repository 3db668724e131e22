"""Bad inputs never end in a raw error or a false claim, and what cannot be in a plan is refused by name."""

import math
import re
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import Tracer

from cost.base import Problem
from diffshard.base import PlanError, Solution
from diffshard.plans.file import from_json, to_json
from diffshard.sharding_search.plan import Plan
from experiments.fuzzing import __main__ as command
from experiments.fuzzing import functions, problems, scales
from experiments.fuzzing.bilevel_plans import BilevelPlanDamage
from experiments.fuzzing.instances import InstanceDamage, whole_instance
from experiments.fuzzing.outcomes import HELD, REFUSED, TAKEN
from experiments.fuzzing.plans import PlanDamage
from experiments.fuzzing.truth import Truth
from tests.diffshard.plans.small_plan import small_plan
from tests.experiments.printed_tables import printed_rows

NUM_CASES = 200


@pytest.fixture(scope="module")
def plan_damage():
    return PlanDamage()


def faults(outcome, known):
    outcomes = {seed: outcome(seed) for seed in range(NUM_CASES)}
    return {seed: found for seed, found in outcomes.items() if found not in known}, set(outcomes.values())


def test_damaged_plans_are_refused_or_taken(plan_damage):
    found, seen = faults(plan_damage.outcome, {REFUSED, TAKEN})
    assert found == {}
    assert seen == {REFUSED, TAKEN}  # damage does harm, but not always


def test_damaged_bilevel_plans_are_refused_or_taken(tmp_path):
    found, seen = faults(BilevelPlanDamage(tmp_path).outcome, {REFUSED, TAKEN})
    assert found == {}
    assert seen == {REFUSED, TAKEN}


def test_damaged_instances_are_refused_or_taken():
    found, seen = faults(InstanceDamage().outcome, {REFUSED, TAKEN})
    assert found == {}
    assert seen == {REFUSED, TAKEN}


def test_what_solvers_say_about_random_problems_is_true():
    found, _ = faults(problems.outcome, {HELD})
    late = {seed for seed, outcome in found.items() if outcome.startswith("overrun")}  # the machine may be busy
    assert {seed: outcome for seed, outcome in found.items() if seed not in late} == {}


@pytest.mark.parametrize("kind", ["scales", "no-greedy"])
def test_what_exact_says_about_badly_scaled_problems_is_true(kind):
    with command.outcomes(kind) as outcome:
        assert faults(outcome, {HELD})[0] == {}


# Seeds of cases that were faults once: bounds above the optimum.
FAULTS_OF_OLD = {"problems": (101_929, 107_999, 108_079, 108_819), "no-greedy": (407_237, 508_346)}


@pytest.mark.parametrize("kind", FAULTS_OF_OLD)
def test_faults_that_were_mended_do_not_come_back(kind):
    with command.outcomes(kind) as outcome:
        found = {seed: outcome(seed) for seed in FAULTS_OF_OLD[kind]}
    assert {seed: said for seed, said in found.items() if said != HELD and not said.startswith("overrun")} == {}


def test_random_functions_are_right_by_every_executor_or_refused(capsys):
    command.main(["--kinds", "functions", "--cases", "3", "--seed", "3", "--time-limit", "3600"])
    printed = capsys.readouterr().out
    assert "functions: 3 cases: 3 held, 0 faults" in printed
    assert {(row[0], row[1]) for row in printed_rows(printed)} >= {("2x4", "program"), ("2x2x2", "propagation")}


@pytest.mark.parametrize(("change", "outcome"), [(0.0, HELD), (1e-6, "wrong")])
def test_a_wrong_result_of_a_random_function_is_a_fault(monkeypatch, change, outcome):
    monkeypatch.setattr(functions, "EXECUTORS", ("program",))
    monkeypatch.setattr(
        functions.RandomFunction, "__call__", lambda self, x, *_: jnp.tanh(x) + change * (not is_traced(x))
    )
    assert outcome in functions.FunctionRuns().outcome(1)


def is_traced(x):
    return isinstance(x, Tracer)


def test_a_case_depends_on_its_seed_alone():
    damage = InstanceDamage().damage
    assert damage.document_of(5) == damage.document_of(5) != whole_instance()
    assert len({str(damage.document_of(seed)) for seed in range(50)}) > 40
    first, again = scales.problem_of(3), scales.problem_of(3)
    np.testing.assert_array_equal(first.node_cost[0], again.node_cost[0])


def test_the_truth_is_exact():
    usages = {"usage_node": np.array([0, 1]), "usage": [np.array([0.1, 0.1]), np.array([0.2])]}
    problem = Problem(
        [np.array([1e17, 0.1]), np.array([-1e17])], np.array([[0, 1]]), [np.array([[0.25], [np.inf]])],
        **usages, usage_interval=np.array([[0, 2], [1, 3]]), memory_limit=0.3,
    )  # fmt: skip
    assert Truth(problem).cost_of((0, 0)) is None  # 0.1 + 0.2 is more than 0.3, as floats
    free = Truth(problem._replace(memory_limit=np.nextafter(0.3, 1)))
    assert free.cost_of((0, 0)) == free.least_cost() == Fraction(1, 4)
    assert free.cost_of((1, 0)) is None


@pytest.mark.parametrize(
    ("changes", "claim"),
    [
        ({}, None),
        ({"cost": 2.0}, "wrong cost"),
        ({"feasible": False}, "not feasible though it is"),
        ({"lower_bound": 1.5}, "bound above the optimum"),
        ({"status": "infeasible"}, "infeasible though it is not"),
        ({"choice": (1,), "cost": 3.0}, "optimal though it is not"),
    ],
)
def test_false_claims_are_found(changes, claim):
    problem = Problem([np.array([1.0, 3.0])], np.zeros((0, 2), int), [])
    true = Solution((0,), 1.0, 1.0, 0.0, True, 0.0, ((0.0, 1.0, -math.inf),), "optimal")
    assert problems.false_claim(problem, true._replace(**changes)) == claim


def test_the_command_prints_what_it_counted(capsys):
    command.main(["--cases", "12", "--seed", "3", "--kinds", "instances"])
    counts = re.match(r"instances: 12 cases: (\d+) refused, (\d+) taken, 0 faults", capsys.readouterr().out)
    assert counts is not None
    assert sum(map(int, counts.groups())) == 12


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("compute_s",), "nan", "`compute_s` must be a finite number"),
        (("collectives", 0, "seconds"), -1.0, r"`collectives\[0\].seconds` must be a finite number"),
        (("collectives", 0, "axis"), "rows", r"`collectives\[0\].axis` is 'rows'"),
        (("collectives", 0, "kind"), "gather", r"`collectives\[0\].kind` must be one of"),
        (("lower_bound_s",), "inf", "`lower_bound_s`"),
        (("memory_limit_bytes",), 0, "`memory_limit_bytes` must be a positive number"),
        (("mesh_axes",), {"data": 2, "rows": 4}, "`hardware` has no link for the axis 'rows'"),
        (("specs", 0), [["rows"], []], "names 'rows', which is no axis"),
        (("specs", 0), [["data"], ["data"]], "splits two dimensions over one axis"),
        (("arguments", 0, "dtype"), "float99", r"`arguments\[0\].dtype` is 'float99'"),
        (("arguments", 0, "shape"), [16], r"`arguments\[0\].spec` has 2 dimensions, where the array has 1"),
        (("operations", 4, "results"), [], r"`operations\[4\]` must have as many"),
        (("operations", 4, "compute_s"), "nan", r"`operations\[4\].compute_s` must be a finite number"),
        (("operations", 6, "results", 0), -1, r"`operations\[6\].results\[0\]` is -1, not the number of one"),
        (("compute_s",), 0, "`compute_s` is 0.0, where the operations take 0.006 together"),
        (("status",), "proven", "`status` is 'proven', not one of"),
        (("operations", 0, "kind"), "constant", "`operations` must begin with the 3 arguments"),
        (("version",), True, "plan version True"),
        (("version",), 2.0, "plan version 2.0"),
        (("mesh_axes",), {"data": 10**18, "model": 4}, "not axes with their numbers of devices"),
        (("peak_bytes",), 10**400, "too large a number"),
    ],
)
def test_what_cannot_be_is_refused_by_name(place, value, message):
    document = to_json(small_plan())
    *way, last = place
    inner = document
    for key in way:
        inner = inner[key]
    inner[last] = value
    with pytest.raises(PlanError, match=message):
        from_json(document, "plan.json", Plan)

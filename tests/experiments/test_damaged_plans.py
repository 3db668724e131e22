"""Files of plans that are damaged in one place never end in a raw error, and what cannot be is refused by name."""

import pytest

from diffshard.base import PlanError
from diffshard.plans.file import from_json, to_json
from diffshard.sharding_search.plan import Plan
from experiments import damaged_plans
from tests.diffshard.plans.small_plan import small_plan


@pytest.fixture(scope="module")
def damage():
    return damaged_plans.Damage(damaged_plans.small_plan())


def test_damaged_files_are_refused_or_taken(damage):
    outcomes = {seed: damage.outcome(seed) for seed in range(200)}
    known = {damaged_plans.REFUSED, damaged_plans.TAKEN}
    assert {seed: outcome for seed, outcome in outcomes.items() if outcome not in known} == {}
    assert known <= set(outcomes.values())  # damage does harm, but not always


def test_a_case_depends_on_its_seed_alone(damage):
    assert damage.document_of(5) == damage.document_of(5) != damage.document
    assert len({str(damage.document_of(seed)) for seed in range(50)}) > 40


def test_the_command_prints_what_it_counted(monkeypatch, capsys, damage):
    monkeypatch.setattr(damaged_plans, "small_plan", lambda: damage.plan)
    damaged_plans.main(["--cases", "12", "--seed", "3"])
    outcomes = [damage.outcome(seed) for seed in range(3, 15)]
    refused, taken = outcomes.count(damaged_plans.REFUSED), outcomes.count(damaged_plans.TAKEN)
    assert capsys.readouterr().out == f"12 damaged files: {refused} refused, {taken} taken, 0 raw errors\n"


def test_the_command_tries_the_cases_from_its_seed_on(monkeypatch, capsys, damage):
    tried = []
    monkeypatch.setattr(damaged_plans, "small_plan", lambda: damage.plan)
    monkeypatch.setattr(damaged_plans.Damage, "outcome", lambda _, seed: tried.append(seed) or f"no error, seed {seed}")
    damaged_plans.main(["--cases", "3", "--seed", "7"])
    assert tried == [7, 8, 9]
    first, *others = capsys.readouterr().out.splitlines()
    assert first == "3 damaged files: 0 refused, 0 taken, 3 raw errors"
    assert [line.split() for line in others] == [["1", "no", "error,", "seed", seed] for seed in "789"]


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("compute_s",), "nan", "`compute_s` must be a finite number"),
        (("collectives", 0, "seconds"), -1.0, r"`collectives\[0\].seconds` must be a finite number"),
        (("collectives", 0, "axis"), "rows", r"`collectives\[0\].axis` is 'rows'"),
        (("collectives", 0, "kind"), "gather", r"`collectives\[0\].kind` must be one of"),
        (("gap",), -0.5, "`gap` must be a number, zero or more"),
        (("lower_bound_s",), "inf", "`lower_bound_s`"),
        (("memory_limit_bytes",), 0, "`memory_limit_bytes` must be positive"),
        (("mesh_axes",), {"data": 2, "rows": 4}, "`hardware` has no link for the axis 'rows'"),
        (("specs", 0), [["rows"], []], "names 'rows', which is no axis"),
        (("specs", 0), [["data"], ["data"]], "splits two dimensions over one axis"),
        (("arguments", 0, "dtype"), "float99", r"`arguments\[0\].dtype` is 'float99'"),
        (("arguments", 0, "shape"), [16], r"`arguments\[0\].spec` has 2 dimensions, where the array has 1"),
        (("operations", 4, "results"), [], r"`operations\[4\]` must have as many"),
        (("operations", 0, "kind"), "operation", "`operations` must begin with the 3 arguments"),
        (("version",), True, "plan version True"),
        (("version",), 2.0, "plan version 2.0"),
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

"""Plans of the bilevel search through files, and files that are none."""

import json
import math

import pytest

import diffshard
from diffshard.base import PlanError
from diffshard.bilevel_search.plans.base import from_json, to_json
from diffshard.bilevel_search.plans.plan import BilevelPlan
from diffshard.successive_halving import HalvingRecord
from tests.diffshard.bilevel_search.plans.small_bilevel_plan import proposed_plan, validated_plan
from tests.diffshard.plans.small_plan import small_plan


def test_a_saved_plan_is_read_back_with_its_validation_runs(tmp_path):
    plan = validated_plan()
    assert plan.validation is not None
    finite = plan._replace(
        validation=plan.validation._replace(table=plan.validation.table[:3])
    )  # nan is not equal to itself
    finite.save(tmp_path / "plan.json")
    again = diffshard.BilevelPlan.load(tmp_path / "plan.json")
    assert again == finite
    assert str(again) == str(finite)
    assert again.validation is not None
    assert isinstance(again.validation.table[0].record, HalvingRecord)
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_numbers_that_json_lacks_come_back(tmp_path):
    plan = validated_plan()
    assert plan.validation is not None
    winner = plan.validation.winner._replace(loss_increase=-math.inf)
    validation = plan.validation._replace(table=(winner, *plan.validation.table[1:]))
    plan = plan._replace(loss_increase=-math.inf, message="inf", validation=validation)
    plan.save(tmp_path / "plan.json")
    again = diffshard.BilevelPlan.load(tmp_path / "plan.json")
    assert again.loss_increase == -math.inf
    assert again.message == "inf"
    assert again.validation is not None
    diverged = again.validation.table[-1]
    assert math.isnan(diverged.loss)
    assert diverged.record.scores[0][0] == math.inf


def test_each_kind_of_file_says_what_it_is(tmp_path):
    proposed_plan().save(tmp_path / "bilevel.json")
    small_plan().save(tmp_path / "sharding.json")
    with pytest.raises(PlanError, match=r"is a diffshard bilevel plan.*`diffshard.BilevelPlan.load`"):
        diffshard.Plan.load(tmp_path / "bilevel.json")
    with pytest.raises(PlanError, match=r"is a diffshard plan.*`diffshard.Plan.load`"):
        diffshard.BilevelPlan.load(tmp_path / "sharding.json")


@pytest.mark.parametrize(
    ("field", "value"),
    [("seconds", "1"), ("seconds", None), ("feasible", 1), ("choice", [0]), ("choice", [0.5, 0, 0, 0]), ("groups", {}),
     ("groups", [{"name": "a"}] * 4), ("validation", {}), ("validation", [1]), ("mesh_axes", {"data": "2"}),
     ("hardware", 3), ("hardware", {"name": "x"}), ("exact_share", 1.5), ("surprise", 1)],
)  # fmt: skip
def test_fields_of_the_wrong_type_are_damage(field, value):
    found = to_json(validated_plan())
    found[field] = value
    with pytest.raises(PlanError, match=r"`plan\.json` is a damaged plan"):
        from_json(found, "plan.json", BilevelPlan)


def test_validation_runs_without_finalists_are_damage():
    found = to_json(validated_plan())
    found["validation"]["table"] = found["validation"]["table"][2:]
    with pytest.raises(PlanError, match="no candidate of `validation` was trained to the end"):
        from_json(found, "plan.json", BilevelPlan)


@pytest.mark.parametrize(
    ("field", "message"),
    [("seconds", "it lacks `seconds` of BilevelPlan"), ("nodes", "it lacks `nodes` of BilevelPlan"),
     ("choice", "it lacks `choice` of BilevelPlan"), ("validation", "it has no `validation`")],
)  # fmt: skip
def test_missing_fields_are_damage(field, message):
    found = to_json(validated_plan())
    del found[field]
    with pytest.raises(PlanError, match=rf"is a damaged plan: {message}\.$"):
        from_json(found, "plan.json", BilevelPlan)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [(["seconds"], -1.0, "`seconds` must be a finite number, zero or more, not -1.0"),
     (["seconds"], "inf", "`seconds` must be .*, not inf"),
     (["cost_ratio"], "nan", "`cost_ratio` must be .*, not nan"), (["choice"], [0, 0, 0, -1], "a number below 0"),
     (["choice"], [0, 0], "`choice` has 2 numbers for 4 nodes"),
     (["mesh_axes", "data"], 0, "must be a whole number, 1 or more, not 0"),
     (["exact_share"], 1.0, "`exact_share` is 1.0"),
     (["max_loss_increase"], 0.0, "`max_loss_increase` must be a positive"),
     (["nodes", 0, "seconds"], -1.0, r"`nodes\[0\].seconds` must be .*, not -1.0"),
     (["nodes", 0, "traffic", "sent_bytes"], "inf", r"`nodes\[0\].traffic.sent_bytes` must be .*, not inf"),
     (["nodes", 0, "traffic", "direction"], "up", "is 'up', none of forward, backward, gradient"),
     (["nodes", 0, "traffic", "count"], -1, r"`nodes\[0\].traffic.count` must be .*, not -1"),
     (["validation", "table", 0, "exact_share"], 1.5,
      r"`validation.table\[0\].exact_share` must be a share from 0 to 1"),
     (["validation", "table", 1, "choice"], [0], "`choice` of candidate 'exact' has 1 numbers for 4 nodes"),
     (["validation", "steps"], -1, "`validation.steps` must be a whole number, 0 or more, not -1"),
     (["validation", "steps"], 10**400, "`validation.steps` must be a whole number, 0 or more, not 1000"),
     (["validation", "steps"], 23, "`steps` of `validation` is 23, fewer than the 24 of its candidates"),
     (["validation", "table", 2, "record", "scores"], [],
      "`scores` of candidate 'all int8' are 0, not from 1 to the 2"),
     (["validation", "table", 2, "record", "scores"], [1, 2, 3],
      "`scores` of candidate 'all int8' are 3, not from 1 to"),
     (["validation", "table", 2, "record", "scores"], [{"a": 1}], "has {'a': 1}, which is no number and no list of"),
     (["validation", "table", 2, "record", "scores"], [[0.1, "late"]], "'late'.*, which is no number and no list of"),
     (["validation", "table", 0, "record", "scores"], [1.0], "longest trained come first"),
     (["validation", "table", 0, "choice"], [0, 0, 0, 0], "candidate 'proposal', which won, has"),
     (["validation", "table", 0, "seconds"], 7.0, "`seconds` is .*'proposal', which won, has 7.0"),
     (["validation", "table", 0, "exact_share"], 0.5,
      "`exact_share` is 0.0, but candidate 'proposal', which won, has 0.5"),
     (["loss_increase"], "nan", "`loss_increase` is nan, but candidate 'proposal', which won, has 0.0125"),
     (["validation", "exact_losses"], [3.0, "inf"], r"`validation.exact_losses\[1\]` must be a finite number, not inf"),
     (["mesh_axes", "data"], 10**18, "`mesh_axes` is"), (["choice", 0], 10**400, "which is no strategy"),
     (["nodes", 0, "traffic", "axes"], ["rows"], "has 'rows', which is no axis of `mesh_axes`"),
     (["feasible"], False, "`message` does not say why")],
)  # fmt: skip
def test_values_that_no_search_gives_are_damage(path, value, message):
    found = to_json(validated_plan())
    where = found
    for step in path[:-1]:
        where = where[step]
    where[path[-1]] = value
    with pytest.raises(PlanError, match=message):
        from_json(found, "plan.json", BilevelPlan)


def test_a_plan_without_nodes_is_damage():
    with pytest.raises(PlanError, match="it has no `nodes`"):
        from_json({**to_json(proposed_plan()), "nodes": [], "choice": []}, "plan.json", BilevelPlan)


def test_a_file_of_an_older_version_is_refused():
    with pytest.raises(PlanError, match=r"version 3; this diffshard reads version 4\. Update diffshard, or"):
        from_json({**to_json(proposed_plan()), "version": 3}, "plan.json", BilevelPlan)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not JSON"), ("[" * 100_000, "is not JSON"), ("9" * 5_000, "is not JSON"), ("[]", "not a plan file"),
     ('{"format": ["diffshard plan"]}', "not a plan file"), ('{"format": "else"}', "not a plan file"),
     (json.dumps({"format": "diffshard bilevel plan", "version": 5}), "version 5; this diffshard reads version 4")],
)  # fmt: skip
def test_files_that_are_no_plan(text, message, tmp_path):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(PlanError, match=message):
        diffshard.BilevelPlan.load(tmp_path / "plan.json")

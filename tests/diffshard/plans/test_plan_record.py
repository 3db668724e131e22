"""Plans that are one record: each has a page, and says where another one of its kind differs."""

import dataclasses

import pytest

import diffshard
from tests.diffshard.plans.page_checker import checked_page
from tests.diffshard.plans.small_files import RECORDS

KINDS = ("tables", "groups", "assignment", "placement", "budget")


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_is_a_page_with_its_certificate_and_text(kind):
    plan = RECORDS[kind]()
    texts = " ".join(checked_page(plan.html()).texts)
    title, *lines = str(plan).splitlines()
    assert title in texts
    assert "\n".join(lines).strip("\n") in texts
    assert plan._repr_html_().startswith("<iframe")


def test_a_difference_names_each_value_that_is_another_one():
    plan = RECORDS["groups"]()
    assert plan.diff(plan) == ""
    assert plan.diff(dataclasses.replace(plan, search_s=9.0)) == ""
    other = dataclasses.replace(plan, computing_s=(2.0, 3.5), exchanging_s=(1.0, 0.25))
    assert plan.diff(other) == "computing_s[1]: 3.0 → 3.5\nexchanging_s[1]: 0.0 → 0.25"


def test_a_long_difference_is_cut():
    one = diffshard.pipelines.place([1.0] * 60, [[0.0, 1.0], [1.0, 0.0]])
    moved = dataclasses.replace(one, assignment=tuple(1 - device for device in one.assignment))
    lines = one.diff(moved).splitlines()
    assert lines[0] == f"assignment[0]: {one.assignment[0]} → {moved.assignment[0]}"
    assert lines[40:] == ["and 20 more values"]


def test_plans_of_two_kinds_are_not_compared():
    with pytest.raises(diffshard.PlanError, match="A GroupPlan can be compared with its own kind, not a Placement"):
        RECORDS["groups"]().diff(RECORDS["placement"]())

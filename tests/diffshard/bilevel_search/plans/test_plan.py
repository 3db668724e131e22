"""What a plan of the bilevel search says, as text and as a page, and whether its numbers are the space's."""

import html
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import diffshard
from cost.base import Problem
from diffshard.bilevel_search.plans.plan import lossy_plan
from diffshard.bilevel_search.plans.views import format_page
from diffshard.bilevel_search.relaxation import best_of
from diffshard.command.line import main
from search_spaces.communication.call_sites import alternatives
from tests.diffshard.bilevel_search.perturbed import Perturbed, batch_of, start
from tests.diffshard.bilevel_search.plans.small_bilevel_plan import (
    SLOW_LINKS,
    STRATEGIES,
    named_choice,
    proposed_plan,
    slow_space,
    validated_plan,
)
from tests.diffshard.plans.page_checker import checked_page
from tests.search_spaces.communication.small_communication import MESH, seconds, sent_bytes, small_space


def test_groups_add_up_to_the_space():
    space = slow_space()
    plan, choice, exact = proposed_plan(space), named_choice(space), space.exact_choice()
    assert dict(zip(plan.node_names, plan.strategies, strict=True)) == STRATEGIES
    assert plan.mesh_axes == MESH
    assert plan.hardware == SLOW_LINKS
    assert sum(group.seconds for group in plan.nodes) == pytest.approx(seconds(space, choice))
    assert plan.seconds == pytest.approx(seconds(space, choice))
    assert plan.baseline_seconds == pytest.approx(seconds(space, exact))
    assert plan.cost_ratio == pytest.approx(plan.seconds / plan.baseline_seconds)
    assert plan.sent_bytes == pytest.approx(sent_bytes(space, choice))
    assert plan.exact_sent_bytes == pytest.approx(sent_bytes(space, exact))
    half = plan._replace(exact_share=0.5)
    assert half.sent_bytes == pytest.approx((plan.sent_bytes + plan.exact_sent_bytes) / 2)


def test_traffic_is_what_runs():
    groups = proposed_plan().nodes
    traffic = {group.name: group.traffic for group in groups if group.traffic}
    exact_bytes = {group.name: group.exact_sent_bytes for group in groups}
    forward = traffic["mlp/all_reduce forward"]
    assert (forward.direction, forward.kind, forward.axes, forward.count) == ("forward", "all_reduce", ("model",), 2)
    # Each device's 8 rows of 16 float32, in an all-reduce over 4 devices, in 2 layers.
    assert exact_bytes["mlp/all_reduce forward"] == 2 * (2 * 3 / 4) * 8 * 16 * 4
    # Two layers of 16 x 16 and 16 x 16 float32 on each device as one vector, over 2 devices.
    gradient = traffic["matrices over data gradient"]
    assert (gradient.axes, gradient.count) == (("data",), 1)
    assert exact_bytes["matrices over data gradient"] == 2 * 1 / 2 * 2 * 2 * 16 * 16 * 4


def test_a_branch_that_is_not_chosen_sends_nothing():
    functions = {"sum": lambda x: jax.lax.psum(x, "model"), "own": lambda x: 4.0 * x}

    def loss_fn(params, batch):
        return jnp.square(alternatives("mixer", functions, batch[0] @ params["head"])).mean()

    space = small_space(loss_fn, {"head": jnp.zeros((16, 16))}, specs={"head": PartitionSpec()})
    exact = tuple(space.exact_choice())
    own = tuple(c if group.strategies else 1 for c, group in zip(exact, space.groups, strict=True))
    plan = lossy_plan(space, best_of(space.problem, {own: 0.0}, None), None)
    inside = [g for g in plan.nodes if g.traffic and g.traffic.direction != "gradient" and g.exact_sent_bytes]
    assert {group.traffic.direction for group in inside if group.traffic} == {"forward", "backward"}
    assert all(group.seconds == 0 and group.traffic.sent_bytes == 0 for group in inside if group.traffic)
    assert sum(group.seconds for group in plan.nodes) == pytest.approx(seconds(space, own))
    assert plan.sent_bytes == pytest.approx(sent_bytes(space, own))
    assert re.search(r"mixer.* alternatives +1x  own +- +- +0 s +0 s", str(plan))


def _plan_in_branches(functions, chosen: dict[str, int]):
    """A plan of alternatives around sums; the numbers of those that are chosen by their names."""

    def loss_fn(params, batch):
        return jnp.square(alternatives("mixer", functions, batch[0] @ params["head"])).mean()

    space = small_space(loss_fn, {"head": jnp.zeros((16, 16))}, specs={"head": PartitionSpec()})
    choice = list(space.exact_choice())
    for name, number in chosen.items():
        (v,) = (v for v, group in enumerate(space.groups) if f"{name}/alternatives" in group.name)
        choice[v] = number
    return lossy_plan(space, best_of(space.problem, {tuple(choice): 0.0}, None), None)


def _counts(plan) -> dict[str, float]:
    return {
        group.name: group.traffic.count
        for group in plan.nodes
        if group.traffic and group.traffic.direction == "forward"
    }


@pytest.mark.parametrize(("chosen", "times"), [(0, 1), (1, 2), (2, 0)])
def test_only_what_runs_in_the_chosen_branch_is_counted(chosen, times):
    functions = {
        "once": lambda x: jax.lax.psum(x, "model"),
        "twice": lambda x: jax.lax.psum(jnp.tanh(jax.lax.psum(x, "model")), "model"),
        "never": jnp.tanh,
    }
    plan = _plan_in_branches(functions, {"mixer": chosen})
    assert _counts(plan) == {"mixer/alternatives forward": 1, "mixer/all_reduce forward": times}
    back = {g.traffic.count for g in plan.nodes if g.traffic and g.traffic.direction == "backward"}
    assert back == {times}


@pytest.mark.parametrize(("outer", "inner", "times"), [(0, 0, (0, 0)), (0, 1, (0, 0)), (1, 0, (1, 0)), (1, 1, (1, 1))])
def test_alternatives_within_alternatives_run_where_both_are_chosen(outer, inner, times):
    def inside(x):
        return alternatives("inner", {"own": jnp.tanh, "sum": lambda x: jax.lax.psum(x, "model")}, 2.0 * x)

    plan = _plan_in_branches({"own": jnp.sin, "inside": inside}, {"mixer": outer, "inner": inner})
    found = _counts(plan)
    assert next(n for name, n in found.items() if "inner/alternatives" in name) == times[0]
    assert next(n for name, n in found.items() if "all_reduce" in name) == times[1]


def test_notes_of_the_space_are_shown(tmp_path):
    @jax.custom_vjp
    def own(x):
        return jax.lax.psum(x, "model")

    own.defvjp(lambda x: (own(x), None), lambda _, cotangent: (cotangent,))
    plan = _plan_in_branches({"own": jnp.tanh, "sum": lambda x: own(x)}, {})
    (note,) = plan.notes
    where, sentence = note.split("), ", 1)
    assert "test_plan.py:" in where
    assert sentence == "mixer: custom_vjp_call stays exact and its bytes are not counted."
    assert " ".join(str(plan).split()).endswith(" ".join(f"Notes {note}".split()))  # a long note takes several lines
    assert f"<li>{html.escape(note)}</li>" in format_page(plan)
    plan.save(tmp_path / "plan.json")
    assert diffshard.BilevelPlan.load(tmp_path / "plan.json").notes == plan.notes


def test_text_tells_predicted_from_measured():
    predicted, measured = str(proposed_plan()), str(validated_plan())
    assert "Plan of communication on 8 devices (data 2 x model 4), slow links" in predicted
    assert "+0.0125 over the exact choice's, predicted by the search, not measured; 0.02 allowed" in predicted
    assert "+0.0125 over the exact choice's, measured by training; 0.02 allowed" in measured
    assert "Groups of operations: 4, 3 of them differ from the exact choice" in predicted
    assert re.search(r"mlp/all_reduce +all_reduce model +2x  int8 +432 B +1.50 KiB", predicted)
    assert "Candidates" not in predicted
    assert "Candidates: 4 trained from the start for 24 steps in all" in measured
    assert "schedule" not in measured
    assert "schedule  the first 50% of training runs the exact" in str(measured_schedule())
    assert "note" not in predicted
    assert "too much" in str(proposed_plan()._replace(message="too much"))


def measured_schedule():
    return validated_plan()._replace(exact_share=0.5)


def test_spaces_without_sites_have_the_simple_form():
    problem = Problem([np.array([1.0, 3.0]), np.array([3.0, 1.0])], np.array([[0, 1]]), [np.array([[0.0, 0.5]] * 2)])
    search = diffshard.bilevel(
        lambda params, batch: jnp.sum(params * batch), space=problem, weights_optimizer=optax.sgd(0.1)
    )
    plan, _ = search.finish(search.init(jax.random.key(0), jnp.ones(2), jnp.ones(2))._replace(logits=[-_UP, _UP]))
    assert str(plan).splitlines() == [
        "Plan of 2 choices",
        "",
        "  step  2.50 s predicted, 58.8% of the mean strategies' 4.25 s",
        "  loss  the same with every choice",
        "",
        "Choices",
        "",
        "  name  chosen   takes",
        "  0     0       1.00 s",
        "  1     1       1.50 s",
    ]
    checked_page(format_page(plan))


_UP = jnp.array([-1.0, 1.0])


def test_a_space_of_ones_own_is_shown_against_its_exact_choice():
    search = diffshard.bilevel(
        None,
        space=Perturbed([[0.0, 0.1]], [[2.0, 1.0]]),
        weights_optimizer=optax.sgd(0.1),
        max_loss_increase=1.0,
    )
    plan, _ = search.finish(search.init(jax.random.key(0), start(), batch_of(0)))
    assert "100.0% of the exact choice's 2.00 s" in str(plan)
    assert "nothing was learnt" in str(plan)


@pytest.mark.parametrize(
    "plan", [proposed_plan(), validated_plan(), measured_schedule()], ids=["search", "validation", "late"]
)
def test_page_is_well_formed_and_self_contained(plan):
    page = format_page(plan)
    assert not re.search(r"https?://|<script|<link|<img|url\(|@import|<int4>", page)
    found = checked_page(page)
    text = " ".join(found.texts)
    for group in plan.nodes:
        assert group.name in text
    dots = [attributes for _, attributes in found.elements if attributes.get("class") == "dot"]
    assert len(dots) == (2 if plan.validation else 0)  # the proposal and exact were trained to the end
    assert ("not measured" in text) == (plan.validation is None)
    assert ("runs the exact choice" in text) == bool(plan.exact_share)
    # The bars are to one scale, which the exact choice fills.
    widths = [float(w) for w in re.findall(r'<i style="width:([\d.]+)%', page)]
    assert sum(widths[:4]) == pytest.approx(100.0, abs=0.01)
    chosen = sum(group.seconds for group in plan.nodes)
    assert sum(widths[4:]) == pytest.approx(100 * chosen / plan.baseline_seconds, abs=0.01)


def test_dots_of_equal_time_and_loss_stay_inside():
    plan = validated_plan()
    assert plan.validation is not None
    one = plan.validation.table[1]._replace(seconds=plan.seconds, loss=2.5125)
    alike = plan._replace(validation=plan.validation._replace(table=(plan.validation.table[0], one)))
    dots = [
        attributes for _, attributes in checked_page(format_page(alike)).elements if attributes.get("class") == "dot"
    ]
    assert len(dots) == 2
    places = [float(place) for dot in dots for place in re.findall(r"(?:left|bottom):([\d.]+)%", dot["style"])]
    assert places == [50.0] * 4


def test_the_command_shows_and_draws_it(tmp_path, capsys):
    plan = validated_plan()
    plan.save(tmp_path / "plan.json")
    assert main(["show", str(tmp_path / "plan.json")]) == 0
    assert capsys.readouterr().out == f"{plan}\n"
    assert main(["show", str(tmp_path / "plan.json"), "--html", str(tmp_path / "plan.html")]) == 0
    assert (tmp_path / "plan.html").read_text() == format_page(plan)
    assert capsys.readouterr() == ("", f"wrote {tmp_path / 'plan.html'}\n")

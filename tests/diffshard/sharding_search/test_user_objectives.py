"""Searches for a user's objective in place of the seconds of a step."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType

import diffshard
from diffshard.plans.page import format_page
from diffshard.sharding_search.mesh_candidates import mesh_candidates
from tests.diffshard.sharding_search.small_searches import assert_equal, train_arguments, train_step

MESH = AbstractMesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
LINKS = {"x": diffshard.Link(1e-6, 1e-9), "y": diffshard.Link(1e-6, 3e-9)}
HARDWARE = diffshard.Hardware("example", 1e10, 1e10, 1e12, LINKS, exposed_share=0.25)


def step(weights, x):
    gradients = jax.grad(lambda weights: jnp.tanh(jnp.tanh(x @ weights[0]) @ weights[1]).sum())(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)


ARGUMENTS = [jax.ShapeDtypeStruct((64, 64), "float32")] * 2, jax.ShapeDtypeStruct((128, 64), "float32")


def energy_j(step):
    return 10.0 * step.compute_s + 500.0 * sum(step.link_s.values())


def planned(objective=None, **options):
    return diffshard.search(step, MESH, hardware=HARDWARE, objective=objective, **options).plan(*ARGUMENTS)


def searched(plan):
    """Returns the objective of a plan, which has one."""
    assert plan.objective is not None
    return plan.objective


def link_s(plan):
    return sum(c.link_s for c in plan.collectives)


def test_a_plan_is_found_for_energy_with_a_bound_that_holds():
    fastest, frugal = planned(), planned(energy_j)
    energies = [10.0 * plan.compute_s + 500.0 * link_s(plan) for plan in (fastest, frugal)]
    assert searched(frugal).value == pytest.approx(energies[1])
    assert energies[1] < 0.9 * energies[0]
    assert frugal.step_s > fastest.step_s
    assert searched(frugal).lower_bound <= searched(frugal).value
    assert frugal.gap == searched(frugal).gap < 0.01
    assert fastest.objective is None


def test_the_seconds_of_a_step_as_an_objective_give_the_fastest_plan():
    fastest, same = planned(), planned(lambda step: 1e3 * step.seconds)
    assert same.step_s == pytest.approx(fastest.step_s, rel=1e-3)
    assert searched(same).value == pytest.approx(1e3 * same.step_s)


def test_an_objective_of_memory_takes_less_memory():
    fastest = planned()
    small = planned(lambda step: step.seconds * 1e6 + step.peak_bytes / 10)
    assert small.peak_bytes < fastest.peak_bytes
    assert searched(small).value <= fastest.step_s * 1e6 + fastest.peak_bytes / 10


def test_a_plan_for_an_objective_runs_says_so_and_is_saved(tmp_path):
    mesh = jax.make_mesh((4, 2), ("x", "y"), (AxisType.Auto,) * 2)
    state, batch = train_arguments()
    planned_step = diffshard.search(train_step, mesh, hardware=HARDWARE, objective=energy_j)
    plan = planned_step.plan(state, batch)
    assert_equal(planned_step(*plan.shard(state, batch)), train_step(state, batch))
    line = next(line for line in str(plan).splitlines() if line.startswith("  searched "))
    assert line.startswith(f"  searched energy_j {searched(plan).value:.6g}, bound ")
    assert "energy_j, which was made small" in format_page(plan)
    plan.save(tmp_path / "plan.json")
    assert diffshard.Plan.load(tmp_path / "plan.json").objective == plan.objective


def test_what_is_not_convex_has_no_bound():
    plan = planned(lambda step: jnp.sqrt(sum(step.link_s.values()) + 1e-9) * (1 + 1e6 * step.compute_s))
    assert searched(plan).lower_bound == -math.inf
    assert "no bound: it turned out not to be convex" in str(plan)


def test_a_start_is_where_an_objective_begins_and_not_the_answer():
    fastest = planned()
    frugal = planned(energy_j, start=fastest)
    assert searched(frugal).value == pytest.approx(searched(planned(energy_j)).value, rel=1e-3)
    assert planned(start=frugal).objective is None


@pytest.mark.parametrize(
    ("objective", "error", "words"),
    [
        (3, TypeError, "`objective` must be a function of a `RelaxedStep`, not 3"),
        (lambda step: step.memory_bytes, TypeError, "`objective` must return a floating scalar, but it returns float"),
        (lambda step: jnp.log(step.blocking_s["x"] - 1e9), ValueError, "`objective` must be finite at every mixture"),
        (lambda step: jnp.round(step.seconds), ValueError, "`objective` has no gradient"),
        (
            lambda step: step.link_s["z"],
            ValueError,
            "`objective` reads 'z'; seconds on links are by the axes of the mesh, 'x', 'y'",
        ),
        (lambda step: step.link_s["xx"], ValueError, r"the axes of the mesh, 'x', 'y'. Did you mean 'x'\?"),
        (lambda step: 1e30 * step.seconds, ValueError, r"`objective` is 9.1e\+25 at the first plan; .* divide it by a"),
        (lambda step: 1e300 * step.seconds, ValueError, r"at the first plan; it must stay between -1e18 and 1e18"),
        (lambda step: step.peak_bytes**4, ValueError, r"`objective` is 1.4e\+19 at the first plan"),
        (lambda step: step.joules, AttributeError, r"`objective` reads 'joules' of a step, which has .*seconds"),
        (lambda step: step.secs, AttributeError, r"`objective` reads 'secs' of a step, .* Did you mean 'seconds'\?"),
    ],
)
def test_objectives_that_cannot_be_minimised_are_refused(objective, error, words):
    with pytest.raises(error, match=words):
        planned(objective)


@pytest.mark.parametrize("objective", [lambda step: step.seconds + step.link_s["x"], lambda step: step.peak_bytes])
def test_a_step_without_operations_has_an_objective_of_nothing(objective):
    plan = diffshard.search(lambda: (), MESH, hardware=HARDWARE, objective=objective).plan()
    assert (searched(plan).value, searched(plan).lower_bound) == (0.0, 0.0)


def test_a_plan_with_an_objective_above_its_bound_is_damaged(tmp_path):
    plan = planned(energy_j)
    wrong = dataclasses.replace(plan, objective=dataclasses.replace(searched(plan), lower_bound=1e300))
    wrong.save(tmp_path / "plan.json")
    with pytest.raises(diffshard.PlanError, match=r"`objective.lower_bound` must be at most its value"):
        diffshard.Plan.load(tmp_path / "plan.json")


CLUSTER = diffshard.Cluster(
    [diffshard.Hosts(2, devices=4, hardware=dataclasses.replace(HARDWARE, links={}))],
    inside=diffshard.Link(2e-6, 1e-9),
    between=diffshard.Link(2e-5, 1e-8),
)


def values_of_each_shape(objective):
    """The objective of the plan of each shape's own search, by the sizes of its axes."""
    return {
        tuple(c.axes.values()): searched(
            diffshard.search(step, c.mesh, hardware=c.hardware, objective=objective).plan(*ARGUMENTS)
        ).value
        for c in mesh_candidates(CLUSTER, None)
    }


def test_an_objective_chooses_the_shape_of_the_mesh_with_one_bound_for_all(tmp_path):
    plan = diffshard.search(step, devices=CLUSTER, objective=energy_j).plan(*ARGUMENTS)
    alone = values_of_each_shape(energy_j)
    assert len({round(value, 9) for value in alone.values()}) > 1
    assert searched(plan).value == pytest.approx(min(alone.values()), rel=1e-3)
    shapes = {tuple(s.mesh_axes.values()): searched(s) for s in plan.shapes}
    assert set(shapes) == set(alone)
    for axes, found in shapes.items():
        assert found.value == pytest.approx(alone[axes], rel=1e-3)
        assert found.lower_bound <= alone[axes] * (1 + 1e-6)
    assert searched(plan).lower_bound == min(found.lower_bound for found in shapes.values())
    assert [found.value for found in shapes.values()] == sorted(found.value for found in shapes.values())
    assert f"mesh     the best of {len(alone)} shapes" in str(plan)
    assert "energy_j" in format_page(plan).split("Shapes of the mesh")[1]
    plan.save(tmp_path / "plan.json")
    assert diffshard.Plan.load(tmp_path / "plan.json").shapes == plan.shapes


def test_a_step_runs_on_the_mesh_that_an_objective_has_chosen():
    planned_step = diffshard.search(train_step, devices=jax.devices(), hardware="h100", objective=energy_j)
    args = train_arguments()
    plan = planned_step.plan(*args)
    assert len(plan.shapes) > 1
    assert_equal(planned_step(*plan.shard(*args)), jax.jit(train_step)(*args))

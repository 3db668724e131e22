"""The predicted timeline of a plan: its parts, its bound, its text, page and file."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType

import diffshard
from diffshard.checks.timeline import COMPUTE
from diffshard.plans.printing import format_s

MESH = AbstractMesh((4,), ("x",), axis_types=(AxisType.Auto,))
LINKS = {"x": diffshard.Link(1e-6, 1e-9)}


def step(weights, x):
    gradients = jax.grad(lambda weights: jnp.tanh(jnp.tanh(x @ weights[0]) @ weights[1]).sum())(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)


def planned(exposed_share=0.25, **options):
    hardware = diffshard.Hardware("small", 1e12, 1e12, 1e12, LINKS, exposed_share=exposed_share)
    arguments = [jax.ShapeDtypeStruct((512, 512), "float32")] * 2, jax.ShapeDtypeStruct((2048, 512), "float32")
    return diffshard.search(step, MESH, hardware=hardware, **options).plan(*arguments)


@pytest.fixture(scope="module")
def plan():
    return planned()


def test_a_timeline_is_arithmetic_and_waits_and_no_shorter_than_its_bound(plan):
    timeline = plan.timeline
    assert timeline.lower_bound_s <= timeline.busy_s[COMPUTE] == pytest.approx(timeline.computing_s)
    waited_s = sum(wait.seconds for wait in timeline.waits)
    assert timeline.computing_s + waited_s == pytest.approx(timeline.seconds, rel=2e-2)
    assert waited_s > 0
    assert list(timeline.waits) == sorted(timeline.waits, key=lambda wait: -wait.seconds)
    assert timeline.seconds >= max(timeline.busy_s.values())
    assert 0 <= timeline.gap < 1
    for wait in timeline.waits:
        assert any((wait.kind, axis) == (c.kind, c.axis) for c in plan.collectives for axis in wait.axes)


def test_a_plan_says_what_its_program_waits_for(plan, tmp_path):
    (line,) = (line for line in str(plan).splitlines() if line.startswith("  timeline"))
    assert "as a program: computing" in line
    assert plan.timeline.waits[0].kind in str(plan)
    page = plan.html()
    assert "What runs when" in page
    assert f"<b>{format_s(plan.timeline.seconds)}</b>of the same step played as a program" in page
    assert abs(plan.timeline.seconds - plan.step_s) > 0.05 * plan.step_s
    difference = f"The predicted step, {format_s(plan.step_s)}, is what the search makes small: it waits for 25%"
    assert difference in page
    equal = dataclasses.replace(plan, timeline=dataclasses.replace(plan.timeline, seconds=plan.step_s))
    assert "is what the search makes small" not in equal.html()
    plan.save(tmp_path / "plan.json")
    assert diffshard.Plan.load(tmp_path / "plan.json").timeline == plan.timeline


def test_there_is_none_where_collectives_hold_arithmetic_or_xla_orders_the_program():
    assert planned(exposed_share=1.0).timeline is None
    assert planned(executor="constraints").timeline is None


def test_small_collectives_between_scanned_layers_are_priced_one_after_the_other():
    def layers(x, ups, downs):
        return jax.lax.scan(lambda x, w: (x + jax.nn.gelu(x @ w[0]) @ w[1], None), x, (ups, downs))[0]

    shapes = (8, 2048), (24, 2048, 8192), (24, 8192, 2048)
    arguments = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes]
    plan = diffshard.search(layers, MESH.update(axis_names=("model",)), hardware="h100").plan(*arguments)
    reductions = [c for c in plan.collectives if c.kind == "all_reduce"]
    alone_s = plan.hardware.link("model").lines("all_reduce")[0].latency_s
    assert sum(c.count for c in reductions) == 24
    assert sum(c.seconds for c in reductions) >= 24 * alone_s
    assert plan.timeline is not None
    assert plan.step_s == pytest.approx(plan.timeline.seconds, rel=0.05)  # it was a quarter of it

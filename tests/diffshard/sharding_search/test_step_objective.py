"""What a step waits for where its links are busier than its arithmetic, and the search for such steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

import diffshard
from cost.evaluation import evaluate
from cost.quantities import amounts_of, with_weights
from diffshard.sharding_search.options import Options
from diffshard.sharding_search.step_objective import (
    STEP_QUANTITIES,
    is_bound_by_links,
    seconds_of,
    step_s,
    waiting_transfers,
)
from diffshard.sharding_search.tracing import space_of, trace_function
from search_spaces.sharding.explaining import StepPrediction, Transfer


def step(weights, x):
    gradients = jax.grad(lambda weights: jnp.tanh(jnp.tanh(x @ weights[0]) @ weights[1]).sum())(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)


def planned_on_slow_links(batch, **options):
    """Plans the step on 8 devices whose links cannot keep up with the gathers that look almost free."""
    weights, x = [jax.ShapeDtypeStruct((512, 512), "float32")] * 2, jax.ShapeDtypeStruct((batch, 512), "float32")
    mesh = AbstractMesh((8,), ("x",), axis_types=(AxisType.Auto,))
    links = {"x": diffshard.Link(1e-9, 1e-9)}
    hardware = diffshard.Hardware(
        "slow links", 1e12, 1e12, 1e12, links, exposed_share=options.pop("exposed_share", 0.01)
    )
    return diffshard.search(step, mesh, hardware=hardware).plan(weights, x, **options)


def transfer(seconds, link_s):
    return Transfer("all_gather", "x", 1.0, 1.0, seconds, link_s, 0, 0, 0, None)


@pytest.mark.parametrize(
    ("compute_s", "waited_s"),
    [(8.0, [1.0, 1.0, 5.0]), (7.0, [1.0, 1.0, 5.0]), (2.0, [3.0, 3.0, 5.0])],
)
def test_a_step_waits_for_what_its_links_take_beyond_its_arithmetic(compute_s, waited_s):
    # Two collectives of 4 s that can overlap with arithmetic, and one of 5 s that cannot.
    prediction = StepPrediction(np.array([compute_s]), (transfer(1, 4), transfer(1, 4), transfer(5, 5)), np.zeros(0))
    assert [t.seconds for t in waiting_transfers(prediction)] == pytest.approx(waited_s)
    assert step_s(prediction) == pytest.approx(compute_s + sum(waited_s))
    assert is_bound_by_links(prediction) == (waited_s[0] > 1.0)


def test_a_search_that_is_bound_by_links_also_looks_for_fewer_collectives():
    plan, other = planned_on_slow_links(8), planned_on_slow_links(8, exposed_share=1.0)
    # Gathers look almost free, but the links could not keep up: activations are far smaller than weights here.
    assert plan.step_s <= other.step_s * (1 + 1e-6)
    assert plan.lower_bound_s <= plan.step_s
    assert plan.gap == pytest.approx((plan.step_s - plan.lower_bound_s) / plan.step_s)


def test_progress_ends_with_the_gap_of_the_step_and_not_of_the_last_problem():
    told = []
    plan = planned_on_slow_links(2048, progress=lambda *entry: told.append(entry))
    _, cost_s, bound_s = told[-1]
    assert plan.gap < 2e-3  # pairs of strategies are few here, so that branches close what tangents leave: 14%
    assert cost_s == pytest.approx(plan.step_s, rel=1e-3)
    assert (cost_s - bound_s) / cost_s == pytest.approx(plan.gap, abs=1e-4)


def test_a_step_that_is_bound_by_links_takes_less_than_by_the_best_of_five_weights():
    # The best weighted mean of both sums leaves 13.6 ms here, which is what a search for five weights found.
    shapes = (512, 512), (512, 2048), (4096, 512)
    *weights, x = (jax.ShapeDtypeStruct(shape, "float32") for shape in shapes)
    mesh = AbstractMesh((2, 2, 2), ("x", "y", "z"), axis_types=(AxisType.Auto,) * 3)
    links = {axis: diffshard.Link(1e-9, i * 2e-9) for i, axis in enumerate("xyz", 1)}
    hardware = diffshard.Hardware("slow links", 1e12, 1e12, 1e12, links, exposed_share=0.01)
    plan = diffshard.search(step, mesh, hardware=hardware).plan(weights, x)
    assert plan.step_s < 12e-3
    assert plan.gap < 0.1


def space_of_step(exposed_share=0.25, limit=float("inf")):
    mesh = AbstractMesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    links = {"x": diffshard.Link(1e-6, 1e-9), "y": diffshard.Link(1e-6, 3e-9)}
    hardware = diffshard.Hardware("example", 1e12, 1e11, 1e12, links, exposed_share=exposed_share)
    arguments = [jax.ShapeDtypeStruct((64, 64), "float32")] * 2, jax.ShapeDtypeStruct((128, 64), "float32")
    options = Options(fn=step, mesh=mesh, hardware=hardware, memory_limit_bytes=limit)
    return space_of(options, trace_function(options, arguments))


@pytest.mark.parametrize("exposed_share", [1.0, 0.25])
def test_quantities_of_a_step_add_up_to_its_problem(exposed_share):
    space = space_of_step(exposed_share)
    weights = {name: np.ones(quantity.shape) for name, quantity in space.quantities.items()}
    weights |= {"overlapped_s": np.zeros(2), "memory_bytes": np.zeros_like(weights["memory_bytes"])}
    problem = with_weights(space.preference_problem, space.quantities, weights)
    for found, expected in zip(problem.node_cost, space.problem.node_cost, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-9)
    for found, expected in zip(problem.edge_cost, space.problem.edge_cost, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-20)


@pytest.mark.parametrize("seed", range(5))
def test_the_seconds_of_amounts_are_those_of_the_prediction(seed):
    space = space_of_step()
    generator = np.random.default_rng(seed)
    choice = np.array([generator.integers(len(cost)) for cost in space.problem.node_cost])
    prediction = space.predict(choice.tolist())
    amounts = amounts_of({name: space.quantities[name] for name in STEP_QUANTITIES}, space.problem, choice)
    relaxed = {name: jnp.asarray(amount) for name, amount in amounts.items()}
    assert float(seconds_of(relaxed)) == pytest.approx(step_s(prediction), rel=1e-5)
    link_s = {axis: sum(t.link_s for t in prediction.transfers if t.axis == axis) for axis in ("x", "y")}
    preference = evaluate(space.preference_problem, choice).cost
    assert evaluate(space.step_problem, choice).cost == pytest.approx(step_s(prediction) + preference, rel=1e-9)
    sent_s = amounts["blocking_s"] + amounts["overlapped_s"]
    assert dict(zip(("x", "y"), sent_s.tolist(), strict=True)) == pytest.approx(link_s)

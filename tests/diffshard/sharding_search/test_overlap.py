"""What a step waits for where its links are busier than its arithmetic."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

import diffshard
from diffshard.sharding_search.overlap import is_bound_by_links, step_s, waiting_transfers
from search_spaces.sharding.explaining import StepPrediction, Transfer


def transfer(seconds, link_s):
    return Transfer("all_gather", "x", 1.0, 1.0, seconds, link_s, 0, 0)


@pytest.mark.parametrize(
    ("compute_s", "waited_s"),
    [(8.0, [1.0, 1.0, 5.0]), (7.0, [1.0, 1.0, 5.0]), (2.0, [3.0, 3.0, 5.0])],
)
def test_a_step_waits_for_what_its_links_take_beyond_its_arithmetic(compute_s, waited_s):
    # Two collectives of 4 s that can run beside arithmetic, and one of 5 s that cannot.
    prediction = StepPrediction(np.array([compute_s]), (transfer(1, 4), transfer(1, 4), transfer(5, 5)), np.zeros(0))
    assert [t.seconds for t in waiting_transfers(prediction)] == pytest.approx(waited_s)
    assert step_s(prediction) == pytest.approx(compute_s + sum(waited_s))
    assert is_bound_by_links(prediction) == (waited_s[0] > 1.0)


def test_a_search_that_is_bound_by_links_also_looks_for_fewer_collectives():
    def step(weights, x):
        gradients = jax.grad(lambda weights: jnp.tanh(jnp.tanh(x @ weights[0]) @ weights[1]).sum())(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)

    weights, x = [jax.ShapeDtypeStruct((512, 512), "float32")] * 2, jax.ShapeDtypeStruct((8, 512), "float32")
    mesh = AbstractMesh((8,), ("x",), axis_types=(AxisType.Auto,))
    links = {"x": diffshard.Link(1e-9, 1e-9)}
    hardware = diffshard.Hardware("slow links", 1e12, 1e12, 1e12, links, exposed_share=0.01)
    plan = diffshard.search(step, mesh, hardware=hardware).plan(weights, x)
    without = dataclasses.replace(hardware, exposed_share=1.0)
    other = diffshard.search(step, mesh, hardware=without).plan(weights, x)
    # Gathers look almost free, but the links could not keep up: activations are far smaller than weights here.
    assert plan.step_s <= other.step_s * (1 + 1e-6)
    assert plan.lower_bound_s <= plan.step_s
    assert plan.gap == pytest.approx((plan.step_s - plan.lower_bound_s) / plan.step_s)

"""What a step waits for where its links are busier than its arithmetic."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

import diffshard
from diffshard.base import Solution
from diffshard.sharding_search.overlap import fastest_step, is_bound_by_links, step_s, waiting_transfers
from search_spaces.sharding.explaining import StepPrediction, Transfer


def transfer(seconds, link_s):
    return Transfer("all_gather", "x", 1.0, 1.0, seconds, link_s, 0, 0, 0, None)


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


def test_progress_ends_with_the_gap_of_the_step_and_not_of_the_last_problem():
    def step(weights, x):
        gradients = jax.grad(lambda weights: jnp.tanh(jnp.tanh(x @ weights[0]) @ weights[1]).sum())(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)

    weights, x = [jax.ShapeDtypeStruct((512, 512), "float32")] * 2, jax.ShapeDtypeStruct((2048, 512), "float32")
    mesh = AbstractMesh((8,), ("x",), axis_types=(AxisType.Auto,))
    links = {"x": diffshard.Link(1e-9, 1e-9)}
    hardware = diffshard.Hardware("slow links", 1e12, 1e12, 1e12, links, exposed_share=0.01)
    told = []
    plan = diffshard.search(step, mesh, hardware=hardware).plan(weights, x, progress=lambda *entry: told.append(entry))
    _, cost_s, bound_s = told[-1]
    assert plan.gap > 0.05  # each problem is solved to optimality; what is left is between the two sums
    assert cost_s == pytest.approx(plan.step_s, rel=1e-3)
    assert (cost_s - bound_s) / cost_s == pytest.approx(plan.gap, rel=1e-2)


class _TripleSpace:
    """A space whose choices have seconds of arithmetic, of collectives that it waits for, and of those beside."""

    def __init__(self, seconds, exposed_share):
        self.seconds, self.hardware = seconds, SimpleNamespace(exposed_share=exposed_share)

    def priced(self, compute_share, exposed_share):
        compute_s, waited_s, link_s = self.seconds.T
        return [compute_share * compute_s + waited_s + exposed_share * link_s]

    @property
    def problem(self):
        return self.priced(1.0, self.hardware.exposed_share)

    def predict(self, choice):
        compute_s, waited_s, link_s = self.seconds[choice[0]]
        transfers = transfer(waited_s, waited_s), transfer(self.hardware.exposed_share * link_s, link_s)
        return StepPrediction(np.array([compute_s]), transfers, np.zeros(0))


def least(costs):
    choice = int(np.argmin(costs[0]))
    return Solution((choice,), costs[0][choice], costs[0][choice], 0.0, True, 0.0, (), "optimal")


def test_the_weight_between_both_sums_finds_what_neither_finds_alone():
    # T = A + max(C + O/4, O). The first has the least C + A + O/4, but links of 8 s; the second has the least A + O.
    space: Any = _TripleSpace(np.array([[1.0, 0, 8], [10, 0, 1], [5, 0, 4.5]]), 0.25)
    found = fastest_step(space, least)
    assert found.choice == (2,)
    assert found.lower_bound <= found.cost == step_s(space.predict(found.choice)) == 5 + 4.5 / 4


def test_no_further_weight_is_tried_when_the_time_is_over():
    space: Any = _TripleSpace(np.array([[1.0, 0, 8], [10, 0, 1], [5, 0, 4.5]]), 0.25)
    assert fastest_step(space, least, lambda: True).choice == (0,)


@pytest.mark.parametrize("seed", range(20))
def test_the_bound_holds_and_is_the_dual_of_the_maximum(seed):
    rng = np.random.default_rng(seed)
    seconds = rng.uniform(size=(50, 3)) * [1.0, 0.2, 5.0]
    space: Any = _TripleSpace(seconds, 0.25)
    found = fastest_step(space, least)
    compute_s, waited_s, link_s = seconds.T
    first_s, second_s = waited_s + compute_s + 0.25 * link_s, waited_s + link_s
    weights = np.linspace(0, 1, 1001)[:, None]
    dual_s = (weights * first_s + (1 - weights) * second_s).min(1).max()
    steps_s = np.maximum(first_s, second_s)
    assert found.lower_bound <= dual_s * (1 + 1e-3)
    assert found.lower_bound >= 0.9 * dual_s
    assert found.lower_bound <= steps_s.min() <= found.cost
    assert found.cost == pytest.approx(steps_s[found.choice])

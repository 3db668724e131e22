"""Measured steps say which rates of the hardware are wrong, and no more than they can know."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import diffshard
from diffshard.elastic.rates import (
    PLAN_ERROR,
    Measurement,
    PlanTerms,
    learn,
    likeness,
    log_seconds,
    predict,
    rate_names,
    scaled,
    terms_of,
)

AXES = {"data": 2, "model": 4}


def step(weights, x):
    """A step with products and collectives on both axes."""

    def loss(weights):
        return jnp.mean((jax.nn.relu(x @ weights["up"]) @ weights["down"]) ** 2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


WEIGHTS = {name: jax.ShapeDtypeStruct((512, 512), jnp.float32) for name in ("up", "down")}
SPECS = {
    "batch over data": ({"up": P(), "down": P()}, P("data", None)),
    "batch over model": ({"up": P(), "down": P()}, P("model", None)),
    "weights over model": ({"up": P(None, "model"), "down": P("model", None)}, P("data", None)),
}


@functools.cache
def plan_with(name: str, preset: str = "cpu", slowness: tuple[float, ...] = (0.0,) * 6) -> diffshard.Plan:
    hardware = scaled(diffshard.preset(preset, AXES), dict(zip(rate_names(AXES), slowness, strict=True)))
    mesh = AbstractMesh(tuple(AXES.values()), tuple(AXES))
    x = jax.ShapeDtypeStruct((256, 512), jnp.float32)
    searched = diffshard.search(step, mesh, hardware=hardware, in_shardings=SPECS[name])
    return searched.plan(WEIGHTS, x)


def terms_with(name: str, preset: str = "cpu") -> PlanTerms:
    return terms_of(plan_with(name, preset), np.zeros(6))


@pytest.mark.parametrize("preset", ["cpu", "h100", "t4"])
@pytest.mark.parametrize("name", SPECS)
def test_the_terms_of_a_plan_add_up_to_its_predicted_seconds(name, preset):
    log_s, shares = log_seconds(terms_with(name, preset), np.zeros(6))
    np.testing.assert_allclose(np.exp(log_s), plan_with(name, preset).step_s, rtol=1e-6)
    np.testing.assert_allclose(shares.sum(), 1.0)


def test_terms_predict_what_the_search_prices_at_other_rates():
    slowness = (np.log(3.0), 0.0, 0.0, 0.0, np.log(0.5), np.log(3.0))
    log_s, _ = log_seconds(terms_with("weights over model"), np.array(slowness))
    np.testing.assert_allclose(np.exp(log_s), plan_with("weights over model", slowness=slowness).step_s, rtol=0.05)


def test_what_is_no_arithmetic_and_no_link_is_as_much_slower_as_the_memory():
    """A launch is a part of a plan's terms: a search at corrected rates has to price it as they do."""
    axes, products = {"data": 1}, jax.ShapeDtypeStruct((16, 16), jnp.float32)
    hardware = dataclasses.replace(diffshard.preset("h100", axes), kernel_launch_s=1e-5)
    slowness = np.full(2, np.log(3.0))
    slower = scaled(hardware, dict(zip(rate_names(axes), slowness, strict=True)))
    plan, slower_plan = (
        diffshard.search(lambda a, b: jnp.sin(a @ b), AbstractMesh((1,), ("data",)), hardware=one).plan(
            products, products
        )
        for one in (hardware, slower)
    )
    np.testing.assert_allclose(np.exp(log_seconds(terms_of(plan, np.zeros(2)), slowness)[0]), slower_plan.step_s)
    assert hardware.host_memory_bytes_per_s is not None
    assert slower.host_memory_bytes_per_s == pytest.approx(hardware.host_memory_bytes_per_s / 3)


@pytest.mark.parametrize("beside", [0.5, 5.0])
def test_the_gradient_is_that_of_finite_differences_whatever_bounds_the_step(beside):
    terms = PlanTerms(
        np.array([1.0, 0.5, 0, 0]), np.array([0, 0, 0.1, 0.2]), np.array([0, 0, 0.3, beside]), 0.2, np.zeros(4), {}
    )
    at, small = np.array([0.1, -0.2, 0.3, 0.05]), 1e-6
    _, gradient = log_seconds(terms, at)
    differences = [
        (log_seconds(terms, at + small * e)[0] - log_seconds(terms, at - small * e)[0]) / (2 * small) for e in np.eye(4)
    ]
    np.testing.assert_allclose(gradient, differences, atol=1e-6)


def test_plans_are_alike_as_far_as_they_spend_their_seconds_in_the_same_way():
    one, other = terms_with("batch over data"), terms_with("weights over model")
    assert likeness(one, one) == 1.0
    assert 0.0 <= likeness(one, other) == likeness(other, one) < 1.0
    assert likeness(one, terms_with("batch over model")) < 1.0


def test_a_step_that_takes_three_times_as_long_slows_all_rates_and_most_what_it_spends_its_time_on():
    terms = terms_with("batch over data")
    log_s, shares = log_seconds(terms, np.zeros(6))
    belief = learn([terms], [Measurement(0, 0, log_s + np.log(3.0), 0.02)], 1)
    rates = belief.mean[:6]
    assert np.all(rates > 0.1)
    assert np.argmax(rates) == np.argmax(shares)
    predicted, _ = predict(belief, [terms], 0, 0)
    assert abs(predicted - log_s - np.log(3.0)) < 0.01


def test_a_rate_that_a_measured_plan_does_not_use_stays_uncertain():
    terms = PlanTerms(np.array([1.0, 0.0]), np.zeros(2), np.zeros(2), 1.0, np.zeros(2), {})
    belief = learn([terms], [Measurement(0, 0, 0.0, 0.02)], 1)
    deviations = np.sqrt(np.diag(belief.covariance))[:2]
    assert deviations[0] < 0.2 < 0.8 < deviations[1]


def test_measurements_of_several_plans_tell_a_wrong_link_from_wrong_arithmetic():
    truth = np.array([np.log(1 / 3), 0.0, 0.0, 0.0, 0.0, np.log(3.0)])  # arithmetic is faster, bytes of model slower
    plans = [terms_with(name) for name in SPECS]
    measurements = [Measurement(0, i, log_seconds(terms, truth)[0], 0.02) for i, terms in enumerate(plans)]
    mean = learn(plans, measurements, 1).mean
    assert mean[5] - mean[0] > np.log(3.0)  # of a ratio that is off by 9
    for i, terms in enumerate(plans):
        before, after = log_seconds(terms, np.zeros(6))[0], predict(learn(plans, measurements, 1), plans, i, 0)[0]
        assert abs(after - measurements[i].log_s) < max(0.05, 0.2 * abs(before - measurements[i].log_s))


def test_the_own_error_of_a_plan_is_known_in_the_next_environment():
    plans = [terms_with("batch over data"), terms_with("weights over model")]
    log_s = [log_seconds(terms, np.zeros(6))[0] for terms in plans]
    measured = [Measurement(0, 0, log_s[0], 0.02), Measurement(0, 1, log_s[1] + 0.3, 0.02)]
    slower = Measurement(1, 0, log_s[0] + np.log(2.0), 0.02)
    belief = learn(plans, [*measured, slower], 2)
    predicted, gradient = predict(belief, plans, 1, 1)
    alone = learn(plans, [Measurement(0, 0, log_s[0] + np.log(2.0), 0.02)], 1)
    assert predicted > predict(alone, plans, 1, 0)[0] + 0.1
    variance = gradient @ belief.covariance @ gradient
    assert 0.02**2 < variance < PLAN_ERROR**2  # its rates are open again, its own error is not
    assert belief.mean[6 + 0] - belief.mean[0] > 0.3  # arithmetic is slower in the new environment

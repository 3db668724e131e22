"""`bilevel` takes the training step that `search` takes, trains it, and gradients choose its number formats."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import diffshard
from diffshard.bilevel_search.relaxed_formats import relaxed_within

ROWS, WIDTH, STEPS = 16, 16, 2


def train_step(params, batch):
    def loss_of(params):
        hidden = jnp.tanh(batch[0] @ params["first"])
        return jnp.mean((hidden @ params["second"] - batch[1]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss


def params():
    keys = jax.random.split(jax.random.key(0))
    names = ("first", "second")
    return {n: jax.random.normal(k, (WIDTH, WIDTH)) / math.sqrt(WIDTH) for n, k in zip(names, keys, strict=True)}


def batch(seed):
    return tuple(jax.random.normal(key, (ROWS, WIDTH)) for key in jax.random.split(jax.random.key(seed)))


def search(limit, fn=train_step, every=2, products=("float8",), **options):
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])
    own = diffshard.preset("h100", dict(mesh.shape))
    hardware = dataclasses.replace(  # on which even small products gain
        own, kernel_launch_s=0.0, memory_bytes_per_s=1e18, links={"data": diffshard.Link(0.0, 1e-18)}
    )
    formats = diffshard.formats.Formats(limit, steps=STEPS, products=products, **options)
    return diffshard.bilevel(fn, mesh, formats=formats, choice_every=every, hardware=hardware)


def run(searching, updates, key=0):
    """Returns the states before, between and after updates, and their metrics."""
    states, metrics = [searching.init(jax.random.key(key), params(), batch(0))], []
    for i in range(updates):
        state, own = searching.update(states[-1], batch(i), batch(100 + i))
        states.append(state)
        metrics.append(own)
    return states, metrics


@pytest.fixture(scope="module")
def free():
    """A search that every format is within the limit of, after six updates."""
    searching = search(1e9)
    return searching, *run(searching, 6)


def test_the_plan_runs_the_step_that_was_trained_and_goes_on_from_its_state(free):
    searching, states, metrics = free
    plan, trained = searching.finish(states[-1])
    assert {group.name: group.loss_increase for group in plan.formats.groups} == searching.increases(states[-1])
    assert sum(group.num_rounded for group in plan.formats.groups) > 0
    step = plan.apply(train_step, jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2]))
    _, loss = step(plan.shard(trained), plan.shard(batch=batch(6)))
    _, expected = jax.jit(train_step)(trained, batch(6))
    assert float(loss) == pytest.approx(float(expected), rel=0.02)
    assert float(expected) < metrics[0].train_loss


def test_a_training_in_which_nothing_is_drawn_is_that_of_the_step():
    searching, state = search(1e-12), params()
    states, metrics = run(searching, STEPS)  # nothing is known before the first look
    for i, own in enumerate(metrics):
        state, loss = jax.jit(train_step)(state, batch(i))
        assert own.train_loss == pytest.approx(float(loss), rel=1e-6)
        assert own.num_drawn == 0
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), searching.trained(states[-1]), state)


def test_what_is_chosen_changes_what_is_measured(free):
    _, states, metrics = free
    tight, tight_metrics = run(search(1e-12), 6)
    np.testing.assert_array_equal(states[STEPS].slopes, tight[STEPS].slopes)  # both look at the exact choice first
    assert sum(own.num_drawn for own in metrics) > sum(own.num_drawn for own in tight_metrics)
    assert np.any(states[-1].slopes != tight[-1].slopes)
    assert metrics[-1].cost_ratio < tight_metrics[-1].cost_ratio <= 1.0


def test_looks_come_as_often_as_they_are_asked_for_and_each_group_is_looked_at(free):
    _, states, metrics = free
    assert [i + 1 for i, own in enumerate(metrics) if own.has_looked] == [STEPS, STEPS + 2, STEPS + 4]
    assert np.all(states[STEPS].num_looks == 1)
    assert states[-1].num_looks.sum() > states[STEPS].num_looks.sum()


def test_the_same_key_draws_the_same_formats(free):
    searching, states, metrics = free
    again, same = run(searching, 6)
    assert [own.num_drawn for own in same] == [own.num_drawn for own in metrics]
    np.testing.assert_array_equal(again[-1].slopes, states[-1].slopes)


def test_a_step_without_a_finite_loss_leaves_the_training_as_it_was(free):
    searching, states, _ = free
    endless = jax.tree.map(lambda x: jnp.full_like(x, jnp.inf), batch(0))
    state, metrics = searching.update(states[-1], endless, batch(1))
    assert metrics.refused
    assert not metrics.has_looked
    for own, other in zip(jax.tree.leaves(state.arrays), jax.tree.leaves(states[-1].arrays), strict=True):
        np.testing.assert_array_equal(own, other)


@pytest.mark.parametrize("seed", range(4))
def test_relaxed_weights_are_the_least_of_seconds_less_entropy_within_the_limit(seed):
    draw = np.random.default_rng(seed)
    rows = np.array([0, 1, 0, 2, 1, 2])
    gains, increases, temperature = draw.uniform(0, 2, 6), draw.uniform(0, 1, 6), 0.4
    limit = 0.5 * float(relaxed_within(gains, increases, 1e9, temperature, rows)[0] @ increases)

    def cost(weights):
        exact = 1 - np.array([weights[rows == row].sum() for row in range(3)])
        entropy = -sum(p * np.log(p) for p in (*weights, *exact))
        return -gains @ weights - temperature * entropy

    weights, price = relaxed_within(gains, increases, limit, temperature, rows)
    assert price > 0
    assert float(weights @ increases) == pytest.approx(float(limit), rel=1e-9)
    for _ in range(3000):
        other = np.clip(weights + draw.normal(0, draw.choice([0.1, 0.01, 0.001]), 6), 1e-9, 1.0)
        if other @ increases <= limit and all(other[rows == row].sum() < 1 for row in range(3)):
            assert cost(other) >= cost(weights) - 1e-9


def test_formats_that_may_not_be_chosen_have_no_weight():
    weights, price = relaxed_within(np.array([-np.inf, 1.0]), np.array([np.nan, 0.1]), 1.0, 0.1, np.array([0, 1]))
    assert weights[0] == 0.0
    assert weights[1] > 0.99
    assert price == 0.0


def test_a_narrow_step_trains_in_the_place_of_the_one_that_is_planned():
    searching = search(1.0, measured_fn=train_step)
    wide = jax.eval_shape(lambda: ({n: jnp.zeros((64, 64)) for n in ("first", "second")}, (jnp.zeros((32, 64)),) * 2))
    state = searching.init(jax.random.key(0), params(), batch(0), planned_for=wide)
    for i in range(STEPS):
        state, _ = searching.update(state, batch(i), batch(100 + i))
    plan, trained = searching.finish(state)
    assert plan.arguments[0].shape == (64, 64)
    assert trained["first"].shape == (WIDTH, WIDTH)


def test_a_state_that_stops_being_finite_is_refused_although_the_loss_is_finite():
    def broken(params, batch):
        after, loss = train_step(params, batch)
        return jax.tree.map(lambda p: jnp.where(batch[1][0, 0] > 50, jnp.nan, p), after), loss

    searching = search(1.0, fn=broken)
    state = searching.init(jax.random.key(0), params(), batch(0))
    bad = batch(0)[0], batch(0)[1].at[0, 0].set(100.0)
    after, metrics = searching.update(state, bad, batch(1))
    assert math.isfinite(metrics.train_loss)
    assert metrics.refused
    jax.tree.map(np.testing.assert_array_equal, searching.trained(after), searching.trained(state))
    assert not searching.update(after, batch(2), batch(3))[1].refused


def test_a_look_that_is_not_finite_does_not_count(free):
    searching, states, _ = free
    endless = jax.tree.map(lambda x: jnp.full_like(x, jnp.inf), batch(0))
    state = states[STEPS + 1]  # the next update looks
    after, metrics = searching.update(state, batch(STEPS + 1), endless)
    assert not metrics.has_looked
    assert not metrics.refused
    np.testing.assert_array_equal(after.num_looks, state.num_looks)
    assert np.all(np.isfinite(after.slopes))


def test_a_state_of_arrays_of_jax_goes_on(free):
    searching, states, _ = free
    state = jax.tree.map(jnp.asarray, states[STEPS + 1])
    after, metrics = searching.update(state, batch(STEPS + 1), batch(101 + STEPS))
    assert metrics.has_looked
    np.testing.assert_allclose(after.slopes, states[STEPS + 2].slopes, rtol=1e-5)


def test_another_limit_needs_no_other_search_and_is_checked(free):
    searching, states, _ = free
    assert searching.with_limit(1e-12).relaxed(states[-1]).weights.sum() < searching.relaxed(states[-1]).weights.sum()
    for limit in (0.0, -0.1, math.nan):
        with pytest.raises(ValueError, match=r"`Formats.max_loss_increase` must be a positive finite number"):
            searching.with_limit(limit)


def test_what_cannot_be_is_said_before_anything_trains(free):
    searching, states, _ = free
    with pytest.raises(TypeError, match=r"`formats` is for a training step.*`max_loss_increase`"):
        diffshard.bilevel(
            train_step, jax.make_mesh((1,), ("x",)), formats=diffshard.formats.Formats(1.0), max_loss_increase=1.0
        )
    bilevel: Any = diffshard.bilevel
    with pytest.raises(TypeError, match=r"needs `formats=diffshard.formats.Formats\(...\)` .* or `space`"):
        bilevel(train_step, jax.make_mesh((1,), ("x",)), hardware="h100")
    with pytest.raises(TypeError, match="`hardware` is no option for a `space`"):
        bilevel(train_step, jax.make_mesh((1,), ("x",)), space=object(), hardware="h100")
    with pytest.raises(ValueError, match="`choice_every` must be a positive integer, got 0"):
        search(1.0, every=0)
    with pytest.raises(ValueError, match=r"`Formats.increases` is for `search`"):
        search(1.0, increases={"a": 1.0})
    with pytest.raises(ValueError, match="call `init"):
        search(1.0).update(states[0], batch(0), batch(1))
    with pytest.raises(ValueError, match="No look ahead with a finite loss was taken in 0 updates"):
        searching.finish(states[0])
    with pytest.raises(TypeError, match=r"give arrays and no `jax.ShapeDtypeStruct`"):
        searching.init(jax.random.key(0), *jax.eval_shape(lambda: (params(), batch(0))))
    with pytest.raises(ValueError, match=r"`val_batch\[0\]` has other arrays"):
        searching.update(states[-1], batch(0), jax.tree.map(lambda x: x[:2], batch(0)))
    with pytest.raises(ValueError, match="is none: no result replaces"):
        search(1.0, fn=lambda params, batch: train_step(params, batch)[1]).init(jax.random.key(0), params(), batch(0))

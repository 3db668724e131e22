"""Zeno: scores against a loop, what is left out, equality with the plain mean, and the same under a plan."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import diffshard
from diffshard.checks.collectives import hlo_collectives

N, STEP_SIZE, PENALTY = 4, 0.05, 0.004


def loss_fn(params, batch):
    x, y = batch
    return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] - y) ** 2)


def params():
    keys = jax.random.split(jax.random.key(0), 2)
    return {"up": jax.random.normal(keys[0], (8, 16)) / 3, "down": jax.random.normal(keys[1], (16, 8)) / 4}


def data(seed, num_examples):
    x = jax.random.normal(jax.random.key(seed), (num_examples, 8))
    return x, jnp.roll(x, 1, axis=1)


def gradients():
    return diffshard.robust_gradients.replica_gradients(loss_fn, N)(params(), data(1, 32))[1]


def mean(gradients, num_dropped, check=None, **options):
    options = {"step_size": STEP_SIZE, "penalty": PENALTY, **options}
    check = data(2, 8) if check is None else check
    return diffshard.robust_gradients.zeno_mean(loss_fn, params(), gradients, check, num_dropped=num_dropped, **options)


def damaged(gradients, faults):
    """Returns gradients with the faults of some replicas: functions of an array, by replica."""
    for replica, fault in faults.items():
        gradients = jax.tree.map(lambda g, i=replica, f=fault: g.at[i].set(f(g[i])), gradients)
    return gradients


def assert_close(actual, expected, tolerance=1e-6):
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=tolerance, atol=tolerance), actual, expected)


def test_each_replica_has_the_gradient_of_its_consecutive_part_of_the_batch():
    losses, by_replica = diffshard.robust_gradients.replica_gradients(loss_fn, N)(params(), data(1, 32))
    for i in range(N):
        part = jax.tree.map(lambda a, i=i: a[8 * i : 8 * (i + 1)], data(1, 32))
        loss, expected = jax.value_and_grad(loss_fn)(params(), part)
        assert_close((losses[i], jax.tree.map(lambda g, i=i: g[i], by_replica)), (loss, expected))


def test_scores_are_those_of_a_plain_loop_and_the_worst_are_left_out():
    received = damaged(gradients(), {1: lambda g: -g, 2: lambda g: 30 * g})
    actual, report = mean(received, 2)
    scores = []
    for i in range(N):
        gradient = jax.tree.map(lambda g, i=i: g[i], received)
        moved = jax.tree.map(lambda p, g: p - STEP_SIZE * g, params(), gradient)
        squared_norm = sum(float(np.sum(np.square(g))) for g in jax.tree.leaves(gradient))
        descent = float(loss_fn(params(), data(2, 8)) - loss_fn(moved, data(2, 8)))
        scores.append(descent - PENALTY * squared_norm)
    np.testing.assert_allclose(report.scores, scores, rtol=1e-4, atol=1e-6)
    assert report.kept.tolist() == [True, False, False, True]
    assert_close(actual, jax.tree.map(lambda g: (g[0] + g[3]) / 2, received))


def test_without_dropping_the_mean_is_that_of_the_whole_batch():
    gradients_of = diffshard.robust_gradients.zeno(loss_fn, num_replicas=N, num_dropped=0, step_size=STEP_SIZE)
    loss, actual, report = gradients_of(params(), data(1, 32), data(2, 8))
    assert report.kept.all()
    assert_close((loss, actual), jax.value_and_grad(loss_fn)(params(), data(1, 32)))


def test_permuted_replicas_give_the_same_mean_and_permuted_scores():
    received, order = damaged(gradients(), {0: lambda g: -3 * g}), jnp.array([2, 0, 3, 1])
    one, other = mean(received, 1), mean(jax.tree.map(lambda g: g[order], received), 1)
    assert_close(other[0], one[0])
    assert_close(other[1].scores, one[1].scores[order])
    assert (other[1].kept == one[1].kept[order]).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e38])
def test_a_gradient_that_is_not_finite_or_overflows_is_never_part_of_the_mean(value):
    received = damaged(gradients(), {1: lambda g: g.at[0, 0].set(value), 3: lambda g: jnp.full_like(g, value)})
    actual, report = mean(received, 1)  # two are faulty: more than are dropped
    assert report.kept.tolist() == [True, False, True, False]
    assert report.scores[1] == report.scores[3] == -np.inf
    assert_close(actual, jax.tree.map(lambda g: (g[0] + g[2]) / 2, received))


def test_with_no_finite_gradient_the_mean_is_zero():
    actual, report = mean(jax.tree.map(lambda g: g * np.nan, gradients()), 1)
    assert not report.kept.any()
    assert_close(actual, jax.tree.map(jnp.zeros_like, params()))


def test_with_no_finite_gradient_the_loss_is_not_a_number():
    gradients_of = diffshard.robust_gradients.zeno(loss_fn, num_replicas=N, num_dropped=1, step_size=STEP_SIZE)
    loss, actual, report = gradients_of(params(), jax.tree.map(lambda a: a * jnp.nan, data(1, 32)), data(2, 8))
    assert not report.kept.any()
    assert jnp.isnan(loss)
    assert_close(actual, jax.tree.map(jnp.zeros_like, params()))


def test_of_equal_scores_exactly_the_asked_number_is_dropped():
    equal = jax.tree.map(lambda g: jnp.broadcast_to(g[:1], g.shape), gradients())
    assert mean(equal, 2)[1].kept.tolist() == [True, True, False, False]


def test_the_default_penalty_drops_large_multiples_and_none_would_keep_them():
    small = {"step_size": 1e-3}  # so small that the curvature of the loss does not stop large gradients
    received = damaged(gradients(), {2: lambda g: 20 * g})
    assert mean(received, 1, **small, penalty=None)[1].kept.tolist() == [True, True, False, True]
    assert mean(received, 1, **small, penalty=0.0)[1].kept[2]


def descent_of(params, batch):
    """A loss whose gradient promises as much as its entry says, on every batch."""
    del batch
    return -params["x"]


def kept_with_memory(promises, memory, num_dropped=1):
    """Which replicas are kept at each step `[T, N]`, where they promise the given descents `[T, N]`."""

    def step(standings, promised):
        options = {"num_dropped": num_dropped, "step_size": 1.0, "penalty": 0.0, "memory": memory}
        _, report = diffshard.robust_gradients.zeno_mean(
            descent_of, {"x": jnp.zeros(())}, {"x": -promised}, None, standings, **options
        )
        return report.standings, report.kept

    return jax.lax.scan(step, jnp.zeros(promises.shape[1]), promises)[1]


def test_a_replica_that_is_a_little_wrong_at_every_step_is_known_by_its_standing():
    """Six replicas promise 0.4 and two promise -0.4, below a noise of 1 that differs at each step."""
    promises = 0.4 + jax.random.normal(jax.random.key(0), (200, 8)) - 0.8 * (jnp.arange(8) > 5)
    assert kept_with_memory(promises, 0.0, 2)[100:, 6:].mean() > 0.3
    assert kept_with_memory(promises, 0.97, 2)[100:, 6:].mean() < 0.05


def test_an_outlier_is_left_out_whatever_its_standing():
    promises = jnp.ones((50, 4)).at[:, 3].set(0.5) + 0.1 * jax.random.normal(jax.random.key(0), (50, 4))
    promises = promises.at[40, 0].set(-100.0).at[45, 1].set(jnp.nan)
    kept = kept_with_memory(promises, 0.95)
    assert kept[39].tolist() == kept[41].tolist() == [True, True, True, False]
    assert kept[40].tolist() == [False, True, True, True]
    assert kept[45].tolist() == [True, False, True, True]


def test_without_memory_the_ranking_is_that_of_the_scores():
    promises = jax.random.normal(jax.random.key(1), (20, 5))
    expected = jnp.argsort(jnp.argsort(promises, axis=1), axis=1) >= 2
    assert (kept_with_memory(promises, 0.0, 2) == expected).all()


def train_step_of(num_dropped):
    optimizer = optax.adam(1e-2)
    gradients_of = diffshard.robust_gradients.zeno(
        loss_fn, num_replicas=2, num_dropped=num_dropped, step_size=STEP_SIZE
    )

    def train_step(state, batch, check_batch):
        params, optimizer_state = state
        loss, gradients, report = gradients_of(params, batch, check_batch)
        updates, optimizer_state = optimizer.update(gradients, optimizer_state, params)
        return (optax.apply_updates(params, updates), optimizer_state), loss, report

    return train_step, (params(), optimizer.init(params()))


def test_a_planned_step_computes_the_same_and_only_the_mean_travels_between_replicas():
    train_step, state = train_step_of(1)
    batch = data(1, 4096)
    batch = batch[0].at[:2048].mul(jnp.nan), batch[1]  # the first replica's part is bad
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    hardware = diffshard.preset("h100", dict(mesh.shape))
    step = diffshard.search(train_step, mesh, hardware=hardware)
    plan = step.plan(state, batch, data(2, 64))
    actual = step(*plan.shard(state, batch, data(2, 64)))
    expected = jax.jit(train_step)(state, batch, data(2, 64))
    assert_close(actual, expected, 1e-4)
    assert actual[2].kept.tolist() == [False, True]
    products = [o for o in plan.operations if o.signature.startswith("dot_general") and "-> float32[2," in o.signature]
    assert products
    assert all(o.results[0][0] == ("data",) for o in products)
    collectives = hlo_collectives(step.lower(state, batch, data(2, 64)).compile().as_text(), mesh.shape)
    gathered = [c for c in collectives if c.kind == "all_gather" and c.num_bytes >= 2 * 4 * 8 * 16]
    assert not gathered


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_replicas": 0}, "`num_replicas` must be a whole number, 1 or more, not 0"),
        ({"num_replicas": 2.0}, "`num_replicas` must be a whole number, 1 or more, not 2.0"),
        ({"num_dropped": 4}, "`num_dropped` must be a whole number from 0 to 3.*not 4"),
        ({"num_dropped": -1}, "`num_dropped` must be a whole number from 0 to 3"),
        ({"step_size": 0}, "`step_size` must be a positive, finite number"),
        ({"step_size": "small"}, "`step_size` must be a positive, finite number"),
        ({"penalty": -1e-3}, "`penalty` must be a finite number, zero or more"),
        ({"penalty": np.nan}, "`penalty` must be a finite number, zero or more"),
        ({"memory": 1}, "`memory` must be a number from 0 to below 1, not 1"),
    ],
)
def test_bad_numbers_are_told_before_anything_is_computed(options, message):
    with pytest.raises(ValueError, match=message):
        diffshard.robust_gradients.zeno(loss_fn, **{"num_replicas": N, "num_dropped": 1, "step_size": 0.1, **options})


def test_bad_arguments_of_calls_are_told():
    gradients_of = diffshard.robust_gradients.zeno(loss_fn, num_replicas=N, num_dropped=1, step_size=0.1)
    with pytest.raises(ValueError, match=r"`num_replicas` must divide .* 4 and `batch\[0\]` of shape \(30, 8\)"):
        gradients_of(params(), data(1, 30), data(2, 8))
    with pytest.raises(ValueError, match=r"`batch\[1\]` of shape \(\)"):
        gradients_of(params(), (data(1, 32)[0], jnp.float32(0)), data(2, 8))
    with pytest.raises(ValueError, match="`batch` must hold at least one array"):
        gradients_of(params(), (), data(2, 8))
    with pytest.raises(TypeError, match="`loss_fn` must be a function, not int"):
        diffshard.robust_gradients.replica_gradients(3, N)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="`gradients` must have the structure of `params`"):
        mean({"up": gradients()["up"]}, 1)
    with pytest.raises(ValueError, match=r"leading dimension of replicas.*'down'.* \(16, 8\) for \(16, 8\)"):
        mean({**gradients(), "down": params()["down"]}, 1)
    with pytest.raises(ValueError, match="`num_dropped` must be a whole number from 0 to 3"):
        mean(gradients(), N)
    gradients_with_memory = diffshard.robust_gradients.zeno(
        loss_fn, num_replicas=N, num_dropped=1, step_size=0.1, memory=0.9
    )
    with pytest.raises(ValueError, match=r"`standings` must have the shape \(4,\), not \(3,\)"):
        gradients_with_memory(params(), data(1, 32), data(2, 8), jnp.zeros(3))

"""What runs: operations, groups, gradients as on one device, simulated as on a mesh, residuals, mixtures, schedules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from search_spaces.communication.base import INT4, INT8
from search_spaces.communication.space import CommunicationSpace
from search_spaces.communication.strategies import Encode, ErrorFeedback, Exact, Schedule
from tests.search_spaces.communication.small_communication import (
    BATCH,
    KEY,
    PARAMS,
    SPACE,
    SPECS,
    WIDTH,
    arguments,
    assert_close,
    loss_fn,
    mesh,
    one_site_space,
    plain_loss,
    run_step,
    sent_bytes,
    small_space,
)


def test_sites_and_groups_of_the_small_network():
    assert [(operation.name, operation.trips, operation.shape) for operation in SPACE.operations] == [
        ("mlp/all_reduce forward", 2, (8, WIDTH)),
        ("mlp/all_reduce backward", 2, (8, WIDTH)),
        ("head gradient", 1, (WIDTH, WIDTH)),
        ("layers/down gradient", 1, (2, 16, WIDTH)),
        ("layers/up gradient", 1, (2, WIDTH, 16)),
    ]
    assert [group.operations for group in SPACE.groups] == [(0,), (1,), (2,), (3, 4)]
    assert SPACE.strategy_names(3) == ("exact", "int8", "int8 with error feedback", "exact every 2 steps")
    assert [group.operations for group in small_space(tie=None).groups] == [(0,), (1,), (2,), (3,), (4,)]


def test_sites_of_a_type_over_different_axes_choose_apart():
    """Their links differ in speed."""

    def loss(params, batch):
        with jax.named_scope("mean"):
            x = lax.psum(batch[0] @ params["head"], "model")
            return jnp.square(lax.pmean(x, "data")).mean()

    space = small_space(loss, {"head": PARAMS["head"]}, specs={"head": P()})
    forward = [group for group in space.groups if group.name.startswith("mean/all_reduce forward")]
    assert [group.name for group in forward] == ["mean/all_reduce forward", "mean/all_reduce forward 2"]
    assert [space.operations[group.operations[0]].axes for group in forward] == [("model",), ("data",)]


def _largest_difference(a, b):
    return max(jax.tree.leaves(jax.tree.map(lambda x, y: float(jnp.abs(x - y).max()), a, b)))


@pytest.mark.parametrize("on_mesh", [False, True])
def test_exact_strategies_give_the_gradients_of_one_device(on_mesh):
    space = SPACE.on_mesh(mesh()) if on_mesh else SPACE
    loss, gradients, _ = run_step(space, space.exact_choice())
    expected, expected_gradients = jax.jit(jax.value_and_grad(plain_loss))(PARAMS, BATCH)
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    assert_close(gradients, expected_gradients, 1e-6)


def test_meshes_may_be_explicit_and_axes_of_one_device():
    space = SPACE.on_mesh(jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2))
    loss, gradients, _ = run_step(space, space.exact_choice())
    assert_close((loss, gradients), run_step(SPACE, SPACE.exact_choice())[:2], 1e-6)
    alone = CommunicationSpace(loss_fn, {"data": 1, "model": 1}, PARAMS, BATCH, SPECS, P("data"))
    assert not alone.operations
    assert float(alone.loss(PARAMS, BATCH, [], KEY)) == pytest.approx(float(loss), rel=1e-6)


def test_shapes_are_enough_and_random_keys_may_be_data():
    shapes = jax.eval_shape(lambda: (PARAMS, BATCH))
    assert small_space(params=shapes[0], batch=shapes[1]).groups == SPACE.groups

    def noisy(params, batch):
        data, key = batch
        return loss_fn(params, data) + jax.random.normal(key)

    space = small_space(noisy, batch=(BATCH, KEY), batch_specs=(P("data"), P()))
    loss = jax.jit(lambda p, b: space.loss(p, b, space.exact_choice(), KEY))(PARAMS, (BATCH, jax.random.key(3)))
    assert float(loss) == pytest.approx(
        float(plain_loss(PARAMS, BATCH) + jax.random.normal(jax.random.key(3))), rel=1e-5
    )


@pytest.mark.parametrize("choice", [(1, 1, 1, 1), (1, 0, 2, 3)])
def test_simulation_is_the_mesh(choice):
    """Sums in another order differ by an ulp, which rounding makes a code's step for a few numbers."""
    simulated, real = run_step(SPACE, choice), run_step(SPACE.on_mesh(mesh()), choice)
    assert float(simulated[0]) == pytest.approx(float(real[0]), rel=1e-5)
    exact = run_step(SPACE, (0, 0, 0, 0))
    for a, b, e in zip(*map(jax.tree.leaves, (simulated[1], real[1], exact[1])), strict=True):
        assert np.mean(np.abs(a - b) > 1e-6) < 0.02
        assert np.abs(a - b).max() < 0.02 * np.abs(e).max()
        assert np.abs(a - e).max() > 1e-5  # lossy indeed


def test_a_traced_choice_is_the_known_one():
    choice, compiled = jnp.array([1, 1, 2, 3]), []

    @jax.jit
    def run(choice):
        compiled.append(choice)
        return SPACE.loss_and_gradients(PARAMS, BATCH, list(choice), SPACE.init_residuals(PARAMS), KEY, 1)

    assert_close(run(choice), run_step(SPACE, choice.tolist(), step=1), 1e-6)
    run(jnp.array([0, 0, 1, 1]))
    assert len(compiled) == 1


@pytest.mark.parametrize("gradients", [1, 2, 3])
def test_what_was_sent_and_what_is_left_make_the_sum_of_gradients(gradients):
    exact = run_step(SPACE, (0, 0, 0, 0))[1]
    run = jax.jit(lambda s, t: SPACE.loss_and_gradients(PARAMS, BATCH, (0, 0, gradients, gradients), s, KEY, t)[1:])
    state, sent, sizes = SPACE.init_residuals(PARAMS), [], []
    for step in range(3):
        arrived, state = run(state, step)
        sent.append(np.asarray(arrived["head"]))
        sizes.append(np.abs(sent[-1]).max())
    total, residuals = np.sum(sent, axis=0), np.asarray(state["head"]).sum(axis=0)
    missing = np.abs(total + residuals - 3 * np.asarray(exact["head"])).max()
    if gradients == 1:
        assert not residuals.any()
        assert missing > 1e-4
    else:
        assert missing < 1e-5
        assert np.abs(residuals).max() > 1e-4
    if gradients == 3:
        assert [size > 0 for size in sizes] == [False, True, False]


def test_narrow_gradients_travel_as_they_are_and_residuals_stay_wide():
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    space = small_space(params=params, strategies={"gradient": (Exact(), ErrorFeedback(INT4))})
    exact, fed_back = [0] * 4, [0, 0, 1, 1]
    assert sent_bytes(space, exact) < 0.8 * sent_bytes(SPACE, exact)
    run = jax.jit(lambda choice, s: space.loss_and_gradients(params, BATCH, list(choice), s, KEY)[1:])
    plain, residuals = run(jnp.array(exact), space.init_residuals(params))
    assert plain["head"].dtype == jnp.bfloat16
    assert not residuals["head"].any()
    first, residuals = run(jnp.array(fed_back), residuals)
    second, residuals = run(jnp.array(fed_back), residuals)
    assert residuals["head"].dtype == jnp.float32
    total = first["head"].astype(jnp.float32) + second["head"] + residuals["head"].sum(axis=0)
    twice = 2 * plain["head"].astype(jnp.float32)
    rounding = 2**-6 * float(jnp.abs(twice).max())  # of sums of eight in bfloat16
    assert float(jnp.abs(total - twice).max()) < rounding
    assert float(jnp.abs(residuals["head"].sum(axis=0)).max()) > 2 * rounding


def test_a_schedule_switches():
    schedule = Schedule(Exact(), Encode(INT8), 5, 20)
    space = small_space(
        strategies={direction: (Exact(), schedule) for direction in ("forward", "backward", "gradient")}
    )
    lossy = small_space(strategies={direction: (Encode(INT8),) for direction in ("forward", "backward", "gradient")})
    run = jax.jit(lambda step: space.loss(PARAMS, BATCH, [1] * 4, KEY, step))
    assert float(run(4)) == pytest.approx(float(space.loss(PARAMS, BATCH, [0] * 4, KEY)), rel=1e-6)
    assert float(run(5)) == pytest.approx(float(lossy.loss(PARAMS, BATCH, [0] * 4, KEY)), rel=1e-6)
    exact_bytes, lossy_bytes = sent_bytes(space, [0] * 4), sent_bytes(lossy, [0] * 4)
    assert sent_bytes(space, [1] * 4) == pytest.approx(0.25 * exact_bytes + 0.75 * lossy_bytes)


@pytest.mark.parametrize("on_mesh", [False, True])
def test_gradients_of_a_mixture(on_mesh):
    space, params, batch = one_site_space(2)
    space = space.on_mesh(mesh()) if on_mesh else space
    weights = [jnp.array([0.3, 0.7]), jnp.array([1.0, 0.0]), jnp.full(4, 0.25)]
    loss = jax.jit(lambda params, weights: space.loss(params, batch, weights, KEY))
    of_weights = jax.jit(jax.grad(loss, 1))(params, weights)
    for j in range(2):
        bump = [1e-2 * jnp.eye(2)[j], jnp.zeros(2), jnp.zeros(4)]
        up, down = (loss(params, jax.tree.map(lambda w, b, s=s: w + s * b, weights, bump)) for s in (1, -1))
        assert float(of_weights[0][j]) == pytest.approx(float(up - down) / 2e-2, rel=1e-3)
    assert not of_weights[1].any()
    assert not of_weights[2].any()


def test_a_mixture_of_exact_strategies_has_the_plain_gradient():
    loss = jax.jit(lambda params, weights: SPACE.loss(params, BATCH, weights, KEY))
    gradients = jax.jit(jax.grad(loss))
    exact = jax.jit(jax.grad(plain_loss))(PARAMS, BATCH)
    pure = [jnp.eye(len(group.names))[0] for group in SPACE.groups]
    even = [jnp.full(len(group.names), 1 / len(group.names)) for group in SPACE.groups]
    assert_close(gradients(PARAMS, pure), exact, 1e-6)
    assert _largest_difference(gradients(PARAMS, even), exact) > 1e-5


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_residuals_stay_float32_and_gradients_have_the_parameters_type(dtype):
    """A state of another type after a step would not fit the step's own branches, loops or compiled code."""
    with jax.enable_x64(True):
        params, batch = jax.tree.map(lambda x: x.astype(dtype), arguments())
        space = small_space(params=params, batch=batch)
        choice, state = [1] * len(space.groups), space.init_residuals(params)
        results = jax.eval_shape(lambda p: space.loss_and_gradients(p, batch, choice, state, KEY), params)
        assert {x.dtype for x in jax.tree.leaves(results[1])} == {jnp.dtype(dtype)}
        assert jax.tree.map(lambda x: x.dtype, results[2]) == jax.tree.map(lambda x: x.dtype, state)
        assert state

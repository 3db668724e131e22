"""`search(..., state="offload")` may leave an optimiser's moments in the host's memory, if the limit asks for it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import diffshard
from cost.memory import least_memory
from diffshard.sharding_search.options import Options
from diffshard.sharding_search.tracing import space_of, trace_function

LAYERS, WIDTH, ROWS = 4, 32, 8
OPTIMIZER = optax.adam(1e-3)


def train_step(state, x):
    params, optimizer_state = state

    def loss_of(params):
        y = x
        for layer in params:
            y = y + jnp.tanh(y @ layer["up"]) @ layer["down"]
        return jnp.mean(y**2)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    updates, optimizer_state = OPTIMIZER.update(gradients, optimizer_state, params)
    return (optax.apply_updates(params, updates), optimizer_state), loss


def init():
    keys = jax.random.split(jax.random.key(0), 2 * LAYERS)
    up, down = (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)
    pairs = zip(keys[::2], keys[1::2], strict=True)
    params = [{"up": jax.random.normal(a, up) / 8, "down": jax.random.normal(b, down) / 16} for a, b in pairs]
    return params, OPTIMIZER.init(params)


BATCH = jax.random.normal(jax.random.key(1), (ROWS, WIDTH))


def mesh():
    return jax.make_mesh((8,), ("data",), (AxisType.Auto,))


def hardware():
    slow = {"flops_per_s": 1e12, "memory_bytes_per_s": 1e11}
    return dataclasses.replace(diffshard.preset("h100", dict(mesh().shape)), **slow)


@functools.cache
def least_bytes(state):
    """Returns the least memory that a plan takes with these strategies."""
    options = Options(
        fn=train_step, mesh=mesh(), hardware=hardware(), memory_limit_bytes=np.inf, donate_argnums=(0,), state=state
    )
    problem = space_of(options, trace_function(options, (jax.eval_shape(init), BATCH))).problem
    return float(np.max(least_memory(problem)[1]))


def options(limit_bytes):
    limited = {"memory_limit_bytes": limit_bytes, "time_limit_s": 20}
    return {"hardware": hardware(), "donate_argnums": 0, "state": "offload", "progress": "none", **limited}


@pytest.fixture(scope="module")
def searched():
    """Returns a step that is planned for less memory than any plan takes with its state on the devices."""
    step = diffshard.search(train_step, mesh(), **options(0.9 * least_bytes(None) + 0.1 * least_bytes("offload")))
    return step, step.plan(jax.eval_shape(init), BATCH)


def test_a_limit_below_what_sharding_needs_is_kept_and_the_plan_says_how(searched):
    _, plan = searched
    assert plan.peak_bytes <= plan.memory_limit_bytes < least_bytes(None)
    on_host = [tensor for tensor in plan.arguments if tensor.on_host]
    assert on_host
    assert all(".mu" in tensor.path or ".nu" in tensor.path for tensor in on_host)
    assert sum(tensor.on_host for tensor in plan.outputs) == len(on_host)
    assert f"{len(on_host)} arrays; copied to the device" in " ".join(str(plan).split())
    assert plan.host_s > 0
    assert plan.timeline is not None
    assert "link to host memory" in plan.timeline.busy_s
    assert " on host" in plan.html()


def test_where_memory_is_too_small_offloading_the_state_is_proposed_unless_it_is_done_or_cannot_be():
    for changed, is_proposed in (({"state": None}, True), ({}, False), ({"state": None, "hardware": "tpu_v5e"}, False)):
        step = diffshard.search(train_step, mesh(), **options(1.0) | changed)
        with pytest.raises(diffshard.InfeasibleError) as raised:
            step.plan(jax.eval_shape(init), BATCH)
        assert ('`state="offload"`' in str(raised.value)) == is_proposed


@pytest.mark.parametrize("executor", ["program", "constraints", "propagation"])
def test_results_are_those_of_one_device_and_the_state_stays_on_the_host(executor, tmp_path, searched):
    _, plan = searched
    plan.save(tmp_path / "plan.json")
    step = diffshard.Plan.load(tmp_path / "plan.json", mesh()).apply(train_step, executor=executor, check="numbers")
    state, expected = step.plan(init(), BATCH).shard(init(), BATCH)[0], init()
    for _ in range(2):
        state, loss = step(state, step.plan(init(), BATCH).shard(x=BATCH))
        expected, expected_loss = jax.jit(train_step)(expected, BATCH)
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), state, expected)
    kinds = [array.sharding.memory_kind == "pinned_host" for array in jax.tree.leaves(state)]
    assert kinds == [tensor.on_host for tensor in plan.arguments[: len(kinds)]]


def test_state_is_made_saved_and_restored_where_the_plan_has_it(tmp_path, searched):
    _, plan = searched

    def resumed():
        return diffshard.resume(tmp_path, train_step, mesh(), init, BATCH, **options(plan.memory_limit_bytes))

    with resumed() as training:
        state, _ = training.step(training.restore(), BATCH)
        training.save(1, state)
    with resumed() as training:
        again = training.restore()
        assert training.plan.host_bytes > 0
    jax.tree.map(np.testing.assert_array_equal, again, state)
    kinds = [array.sharding.memory_kind for array in jax.tree.leaves(again)]
    assert kinds == [array.sharding.memory_kind for array in jax.tree.leaves(state)]
    assert "pinned_host" in kinds


def test_nothing_is_on_the_host_where_the_memory_suffices():
    plan = diffshard.search(train_step, mesh(), **options(1e12)).plan(jax.eval_shape(init), BATCH)
    assert plan.host_bytes == plan.host_s == 0


def test_what_cannot_be_is_refused_before_tracing():
    with pytest.raises(ValueError, match="`state` must be \"offload\" or None, not 'host'"):
        diffshard.search(train_step, mesh(), state="host")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r'`state` is "offload", but `hardware` .* does not say how fast'):
        diffshard.search(train_step, mesh(), hardware="cpu", state="offload")
    with pytest.raises(ValueError, match="`state` cannot be given together with `pipeline`"):
        diffshard.search(train_step, mesh(), state="offload", pipeline=diffshard.Pipeline())  # pyright: ignore[reportCallIssue, reportArgumentType]


def test_a_plan_whose_state_cannot_be_on_the_host_is_refused(searched):
    _, plan = searched
    moved = [dataclasses.replace(tensor, on_host=True) for tensor in plan.arguments]
    with pytest.raises(diffshard.PlanError, match="in the host's memory, but only state can be there"):
        dataclasses.replace(plan, arguments=tuple(moved)).apply(train_step).plan(init(), BATCH)


def test_a_search_while_training_keeps_the_state_on_the_host_wherever_it_moves(searched):
    step, _ = searched
    state, expected, losses = init(), [], []
    for _ in range(6):
        state, loss = train_step(state, BATCH)
        expected.append(float(loss))
    state = init()
    with diffshard.elastic.search_while_training(step, 10**7, window_steps=1, time_limit_s=3) as training:
        for _ in range(6):
            state, loss = training(state, BATCH)
            losses.append(float(loss))
            assert any(array.sharding.memory_kind == "pinned_host" for array in jax.tree.leaves(state))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)

"""A plan runs as constraints or as an explicit program for each device, with equal results."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

import diffshard
from diffshard.checks.verify import verify

SLOW = diffshard.Hardware(
    # Arithmetic that costs, so that plans split it.
    "slow", 1e7, float("inf"), float("inf"), {axis: diffshard.Link(1e-9, 1e-7) for axis in ("x", "y")}
)  # fmt: skip
OPTIMIZER = optax.adam(1e-3)


def mesh_2x2():
    return jax.make_mesh((2, 2), ("x", "y"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])


def train_step(state, batch, key):
    """Scanned, rematerialised layers with dropout, a lookup and its scatter, an optimiser."""
    params, opt_state = state

    def loss_fn(params):
        x = params["table"][batch]

        @jax.checkpoint
        def layer(x, layer_and_key):
            (w, out), key = layer_and_key
            h = jax.nn.relu(x @ w)
            return x + jnp.where(jax.random.bernoulli(key, 0.9, h.shape), h, 0.0) @ out, None

        keys = jax.random.split(key, len(params["layers"][0]))
        x, _ = jax.lax.scan(layer, x, (params["layers"], keys))
        log_probabilities = jax.nn.log_softmax(x @ params["table"].T)
        return -jnp.take_along_axis(log_probabilities, batch[..., None], axis=-1).mean()

    loss, gradients = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = OPTIMIZER.update(gradients, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss


def arguments():
    keys = jax.random.split(jax.random.key(0), 4)
    layers = (0.3 * jax.random.normal(keys[0], (3, 16, 32)), 0.2 * jax.random.normal(keys[1], (3, 32, 16)))
    params = {"table": jax.random.normal(keys[2], (64, 16)), "layers": layers}
    return (params, OPTIMIZER.init(params)), jax.random.randint(keys[3], (8, 4), 0, 64), jax.random.key(7)


@functools.cache
def searched(executor):
    """Returns the step planned for an executor; it keeps its plan, so that all tests share one search."""
    return searched_anew(executor)


def searched_anew(executor, mesh=None, hardware=SLOW, **options):
    mesh = mesh_2x2() if mesh is None else mesh
    options = {"time_limit_s": 1, **options}  # any plan that splits arithmetic will do
    return diffshard.search(train_step, mesh, hardware=hardware, executor=executor, **options)


def run(step, steps=2):
    state, batch, key = arguments()
    plan = step.plan(state, batch, key)
    losses = []
    for _ in range(steps):
        state, loss = step(*plan.shard(state, batch, key))
        losses.append(float(loss))
    return state, losses


@pytest.mark.parametrize("executor", ["constraints", "program", "propagation"])
def test_all_train_as_one_device_does(executor):
    state, losses = run(searched(executor))
    expected, plain = arguments()[0], []
    for _ in losses:
        expected, loss = jax.jit(train_step)(expected, *arguments()[1:])
        plain.append(float(loss))
    np.testing.assert_allclose(losses, plain, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-3, atol=2e-5)


@pytest.mark.parametrize("solver", [None, "greedy", "primal"])
def test_the_collectives_of_the_program_are_those_of_the_plan(solver):
    step = searched("program") if solver is None else searched_anew("program", solver=solver, time_limit_s=0.1)
    plan = step.plan(*arguments())
    verification = verify(step.lower(*arguments()), mesh_2x2().shape, plan.collectives, plan.peak_bytes)
    assert any(row.predicted for row in verification.sent)
    # XLA folds an all-reduce over x and one over y of its result into one over both axes, of as many bytes.
    folded = sum(row.compiled for row in verification.sent if row.axis == "x+y" and not row.predicted)
    for row in verification.sent:
        if row.predicted:
            assert row.predicted * 0.9 - folded <= row.compiled <= row.predicted * 1.1, row
    total = sum(row.predicted for row in verification.sent)
    assert sum(row.compiled for row in verification.sent) == pytest.approx(total, rel=0.1)


def test_a_saved_plan_runs_as_a_program(tmp_path):
    plan = searched("constraints").plan(*arguments())
    plan.save(tmp_path / "plan.json")
    loaded = diffshard.Plan.load(tmp_path / "plan.json", mesh_2x2())
    assert loaded == plan
    _, losses = run(loaded.apply(train_step, executor="program"))
    np.testing.assert_allclose(losses, run(searched("program"))[1], rtol=1e-6)


def test_a_plan_runs_by_the_executor_that_it_names(tmp_path):
    plan = searched("program").plan(*arguments())
    assert plan.executor == "program"
    plan.save(tmp_path / "plan.json")
    loaded = diffshard.Plan.load(tmp_path / "plan.json", mesh_2x2())
    assert loaded == plan
    programs = {
        name: loaded.apply(train_step, executor=name).lower(*arguments()).as_text()
        for name in (None, "constraints", "program", "propagation")
    }
    # Only the explicit program has a region for each device, only constraints have shardings inside the function.
    assert {name for name, text in programs.items() if "manual_computation" in text} == {None, "program"}
    assert {name for name, text in programs.items() if "sdy.sharding_constraint" in text} == {"constraints"}


def test_a_file_with_an_unknown_executor_is_damaged(tmp_path):
    plan = searched("constraints").plan(*arguments())
    plan.save(tmp_path / "plan.json")
    text = (tmp_path / "plan.json").read_text()
    (tmp_path / "plan.json").write_text(text.replace('"executor":"constraints"', '"executor":"magic"'))
    with pytest.raises(diffshard.PlanError, match="`executor` is 'magic'"):
        diffshard.Plan.load(tmp_path / "plan.json")


def test_a_plan_for_an_abstract_mesh_can_be_lowered():
    mesh = AbstractMesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    step = searched_anew("program", mesh, solver="greedy")
    assert "manual_computation" in step.lower(*arguments()).as_text()


def test_donated_arguments_are_given_up():
    step = searched_anew("program", donate_argnums=0, solver="greedy")
    state, batch, key = arguments()
    state, batch, key = step.plan(state, batch, key).shard(state, batch, key)
    step(state, batch, key)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_an_unknown_executor_is_refused():
    with pytest.raises(ValueError, match=r"`executor` must be one of .*'constraints', 'program'.*, not 'xla'"):
        searched("xla")


@pytest.mark.parametrize("check_vma", [False, True])
def test_a_users_shard_map_runs_in_the_program_unless_it_tracks_varying_values(check_vma):
    mesh, spec = mesh_2x2(), PartitionSpec("x", "y")

    def fn(w, x):
        doubled = jax.shard_map(
            lambda block: 2 * block + jax.lax.psum(block, "y"), mesh=mesh, in_specs=spec, out_specs=spec,
            check_vma=check_vma,
        )  # fmt: skip
        return jnp.tanh(doubled(x @ w)) @ w.T

    arrays = 0.2 * jnp.cos(jnp.arange(256.0)).reshape(16, 16), jnp.sin(jnp.arange(128.0)).reshape(8, 16)
    step = diffshard.search(fn, mesh, hardware=SLOW, executor="program")
    if check_vma:
        with pytest.raises(ValueError, match=r'`executor` "program" cannot run .* with `check_vma=True` \(.*test_exec'):
            step.lower(*arrays)
        return
    np.testing.assert_allclose(step(*step.plan(*arrays).shard(*arrays)), jax.jit(fn)(*arrays), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("hardware", [SLOW, "cpu", "tpu_v5e", "h100", None])
def test_a_program_is_the_default_on_every_hardware(hardware):
    plan = searched_anew(None, hardware=hardware, solver="greedy").plan(*arguments())
    assert plan.executor == "program"


def test_what_has_no_form_on_blocks_is_left_to_the_partitioner():
    mesh, spec = mesh_2x2(), PartitionSpec("x", "y")

    def fn(x):
        return jax.shard_map(jnp.sin, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=True)(x)

    step = diffshard.search(fn, mesh, hardware=SLOW)
    x = jnp.arange(16.0).reshape(4, 4)
    plan = step.plan(x)
    assert plan.executor == "constraints"
    assert any("shard_map (1x" in note and "XLA partitions the function" in note for note in plan.notes)
    np.testing.assert_allclose(step(x), jnp.sin(x), rtol=1e-6)


def test_an_argmax_of_a_whole_dimension_has_a_form_on_blocks():
    def fn(x):
        return x * jnp.argmax(x, axis=1)[:, None]

    step = diffshard.search(fn, mesh_2x2(), hardware=SLOW, in_shardings=PartitionSpec(("x", "y")))
    x = jnp.sin(jnp.arange(16.0)).reshape(4, 4)
    plan = step.plan(x)
    assert plan.executor == "program"
    np.testing.assert_allclose(step(plan.shard(x)), fn(x), rtol=1e-6)


@pytest.mark.filterwarnings("ignore::diffshard.plans.WholeWorkWarning")  # what runs whole is meant
def test_a_plan_for_a_program_splits_only_what_has_a_form_on_one_devices_part():
    def fn(x):
        """Multiplies neighbours in each image: windows have a form on parts for sums and maxima only."""
        return lax.reduce_window(x, 1.0, lax.mul, (1, 2, 1), (1, 2, 1), "VALID")

    mesh = mesh_2x2()
    options = {"hardware": SLOW, "in_shardings": PartitionSpec(("x", "y"))}
    x = jnp.sin(jnp.arange(128.0)).reshape(8, 4, 4)
    step = diffshard.search(fn, mesh, **options)
    plan = step.plan(x)
    assert plan.executor == "program"
    (form,) = (operation for operation in plan.operations if operation.signature.startswith("reduce_window"))
    assert form.operands[0] == ((), (), ())
    # A quarter of 8 x 4 x 4 floats is on each device, and the other three quarters of a gather are priced.
    assert sum(c.num_bytes * c.count for c in plan.collectives if c.kind == "all_gather") >= 8 * 16 * 4
    np.testing.assert_allclose(step(plan.shard(x)), fn(x), rtol=1e-5, atol=1e-5)
    # Partitioned by XLA the same operation runs on parts of the batch, and a program of that plan says what it does.
    constraints = diffshard.search(fn, mesh, executor="constraints", **options).plan(x)
    assert any(axes for operation in constraints.operations for spec in operation.operands for axes in spec)
    moved = constraints.apply(fn, executor="program").plan(x)
    assert any("reduce_window (1x" in note and "runs whole on every device" in note for note in moved.notes)

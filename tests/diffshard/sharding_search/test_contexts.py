"""Planned functions under context meshes and under JAX's transformations, run by each executor."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import diffshard
from tests.diffshard.sharding_search.small_searches import SLOW, assert_equal, weights

EXECUTORS = ("constraints", "program", "propagation")
KINDS = {
    "auto": (AxisType.Auto, AxisType.Auto),
    "explicit": (AxisType.Explicit, AxisType.Explicit),
    "mixed": (AxisType.Explicit, AxisType.Auto),
}


def mesh_of(kind):
    return jax.make_mesh((2, 2), ("x", "y"), axis_types=KINDS[kind], devices=jax.devices()[:4])


def step(params, x):
    def loss_of(params):
        hidden = jnp.where(x @ params > 0, x @ params, 0.0)
        return jnp.mean((hidden - hidden.mean(0)) ** 2) + jnp.var(params)

    loss, grads = jax.value_and_grad(loss_of)(params)
    return params - 0.1 * grads, loss


def arguments():
    return np.asarray(weights(32, 64)), np.asarray(weights(128, 32))  # JAX's would lie on a context mesh


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("kind", KINDS)
def test_steps_run_under_a_context_mesh(kind, executor):
    mesh = mesh_of(kind)
    expected = step(*arguments())
    planned = diffshard.search(step, mesh, hardware=SLOW, executor=executor, in_shardings=(P(None, "y"), P("x")))
    with jax.set_mesh(mesh):
        assert_equal(planned(*arguments()), expected)
    assert_equal(planned(*arguments()), expected)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_plan_does_not_depend_on_the_context_mesh(tmp_path, executor):
    mesh = mesh_of("auto")
    outside = diffshard.search(step, mesh, hardware=SLOW, executor=executor).plan(*arguments())
    with jax.set_mesh(mesh):
        inside = diffshard.search(step, mesh, hardware=SLOW, executor=executor).plan(*arguments())
    assert [o.signature for o in inside.operations] == [o.signature for o in outside.operations]
    inside.save(tmp_path / "plan.json")
    loaded = diffshard.Plan.load(tmp_path / "plan.json", mesh)
    assert_equal(loaded.apply(step)(*arguments()), step(*arguments()))


def test_constraints_of_the_user_are_kept_under_a_context_mesh():
    mesh = mesh_of("auto")

    def constrained(x):
        return jnp.where(jax.lax.with_sharding_constraint(jnp.sin(x), P("y", None)) > 0, x, 0.0)

    with jax.set_mesh(mesh):
        plan = diffshard.search(constrained, mesh, hardware=SLOW).plan(weights(8, 8))
    constraints = [o.results[0] for o in plan.operations if o.signature.startswith("sharding_constraint")]
    assert constraints == [(("y",), ())]


@pytest.mark.parametrize("executor", EXECUTORS)
def test_rules_for_logical_axes_leave_a_step_as_it_is(executor):
    planned = diffshard.search(
        step, mesh_of("auto"), hardware=SLOW, executor=executor, logical_axis_rules=(("embed", "x"),)
    )
    assert_equal(planned(*arguments()), step(*arguments()))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_planned_functions_are_transformed(executor):
    planned = diffshard.search(step, mesh_of("auto"), hardware=SLOW, executor=executor)
    params, x = arguments()
    expected = step(params, x)
    assert_equal(planned(params, x), expected)  # by propagation the first call needs numbers
    assert jax.eval_shape(planned, params, x)[1].shape == ()
    assert_equal(jax.jit(planned)(params, x), expected)
    repeated = jax.lax.scan(lambda params, _: planned(params, x), params, length=2)[0]
    assert_equal(repeated, step(expected[0], x)[0])
    planned_loss = diffshard.search(lambda p: jnp.tanh(p).sum(), mesh_of("auto"), hardware=SLOW, executor=executor)
    if executor == "propagation":
        planned_loss(params)
    slope = jax.grad(planned_loss)(params)
    np.testing.assert_allclose(slope, 1 - jnp.tanh(params) ** 2, rtol=1e-4, atol=1e-6)


def test_arrays_on_a_mixed_mesh_have_its_explicit_axes_in_their_types():
    mesh = mesh_of("mixed")
    planned = diffshard.search(step, mesh, hardware=SLOW, in_shardings=(P("x", "y"), None))
    params, _ = planned(*arguments())
    assert jax.typeof(params).sharding.spec == P("x", None)
    assert params.sharding.is_equivalent_to(NamedSharding(mesh, P("x", "y")), 2)

"""Arrays come to where a plan wants them: by `shard`, by shardings for `jax.jit`, or by being moved."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import diffshard
from tests.diffshard.sharding_search.small_calls import Classifier, keyword_step, search
from tests.diffshard.sharding_search.small_searches import (
    SLOW,
    assert_equal,
    mesh_2x2,
    train_arguments,
    train_step,
    weights,
)


def test_an_array_that_lies_elsewhere_is_moved_and_told_once():
    state, batch = train_arguments()
    step = search(train_step)
    step.plan(state, batch)
    elsewhere = jax.device_put(batch, jax.devices()[5])
    expected = train_step(state, batch)
    with pytest.warns(UserWarning, match=r"`batch` is placed as .*moved at every call.*plan.shard"):
        assert_equal(step(state, elsewhere), expected)
    for _ in range(2):  # the suite makes errors of warnings
        assert_equal(step(state, elsewhere), expected)


def test_the_shardings_of_a_plan_are_pytrees_that_jit_takes():
    state, batch = train_arguments()
    mesh = mesh_2x2()
    plan = search(train_step).plan(state, batch)
    placed = jax.jit(lambda: state, out_shardings=plan.in_shardings[0])()
    for leaf, tensor in zip(jax.tree.leaves(placed), plan.arguments, strict=False):
        assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, tensor.partition_spec), leaf.ndim)
    run = jax.jit(train_step, in_shardings=plan.in_shardings, out_shardings=plan.out_shardings)
    assert_equal(run(placed, batch), train_step(state, batch))


def test_a_loaded_plan_learns_its_pytrees_from_the_function(tmp_path):
    state, batch = train_arguments()
    plan = search(train_step).plan(state, batch)
    plan.save(tmp_path / "plan.json")
    loaded = diffshard.Plan.load(tmp_path / "plan.json", mesh_2x2())
    with pytest.raises(diffshard.PlanError, match=r"loaded plan does not know the pytrees.*apply"):
        loaded.in_shardings  # noqa: B018
    again = loaded.apply(train_step).plan(*jax.eval_shape(lambda: (state, batch)))
    assert (again.in_shardings, again.out_shardings) == (plan.in_shardings, plan.out_shardings)


def test_static_arguments_and_constants_have_no_shardings():
    plan = search(lambda n, model, x: model.layers[0].weight @ x.T * n, static_argnums=0).plan(
        2, Classifier(jax.random.key(0)), weights(16, 8)
    )
    model, x = plan.in_shardings
    assert isinstance(x, NamedSharding)
    assert isinstance(model.layers[0].weight, NamedSharding)
    assert (model.layers[1], model.is_residual) == (None, None)


def test_some_arguments_are_placed_by_position_or_by_name():
    params, x, offset = weights(8, 4), weights(16, 8), jnp.arange(4.0)
    plan = search(keyword_step, static_argnames="power").plan(params, x, 0.1, offset=offset, power=3)
    specs = {tensor.path: NamedSharding(plan.placed_mesh, tensor.partition_spec) for tensor in plan.arguments}
    assert plan.shard(params).sharding.is_equivalent_to(specs["params"], 2)
    assert plan.shard(offset=offset).sharding.is_equivalent_to(specs["offset"], 1)
    placed, power = plan.shard(x=x, power=3)
    assert placed.sharding.is_equivalent_to(specs["x"], 2)
    assert power == 3
    for arguments, named, message in [
        ((), {"y": x}, "arguments params, x, scale, offset, power, and was given 'y'"),
        ((params, x, 0.1, offset, 3, 4), {}, "was given 6"),
        ((x,), {}, r"made for `params` of float32\[8, 4\], and was given `params` of float32\[16, 8\]"),
    ]:
        with pytest.raises(diffshard.PlanError, match=message):
            plan.shard(*arguments, **named)


def test_shardings_of_a_plan_for_an_abstract_mesh_are_on_it():
    state, batch = train_arguments()
    mesh = AbstractMesh((2, 2), ("x", "y"))
    plan = diffshard.search(train_step, mesh, hardware=SLOW, in_shardings=(None, PartitionSpec("x"))).plan(state, batch)
    assert plan.in_shardings[1].spec == PartitionSpec("x", None)
    assert dict(plan.in_shardings[1].mesh.shape) == {"x": 2, "y": 2}


def test_many_arrays_that_lie_elsewhere_are_told_in_one_warning():
    state, batch = jax.device_put(train_arguments(), jax.devices()[5])
    step = search(train_step)
    step.plan(*jax.eval_shape(lambda: (state, batch)))
    with pytest.warns(UserWarning, match="moved at every call, and 7 more arrays") as told:
        step(state, batch)
    assert len(told) == 1

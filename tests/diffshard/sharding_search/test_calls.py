"""Arguments as people write them: keywords, pytrees that look at their leaves, modules, traces, arrays elsewhere."""

import dataclasses
import functools
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import diffshard
from diffshard.sharding_search import planned_function
from diffshard.sharding_search.options import Options
from diffshard.sharding_search.tracing import trace_function
from tests.diffshard.sharding_search.small_searches import (
    SLOW,
    assert_equal,
    mesh_2x2,
    train_arguments,
    train_step,
    weights,
)


@jax.tree_util.register_pytree_node_class
class LossScale:
    """A pytree whose constructor looks at its leaves."""

    def __init__(self, scale):
        if scale.ndim or not jnp.issubdtype(scale.dtype, jnp.floating):
            raise TypeError(f"The scale must be a number, not {scale}.")
        self.scale = scale

    def tree_flatten(self):  # noqa: D102
        return (self.scale,), None

    @classmethod
    def tree_unflatten(cls, _, leaves):  # noqa: D102
        return cls(*leaves)


def scaled_step(params, scale, x):
    loss, grads = jax.value_and_grad(lambda p: jnp.tanh(x @ p).sum() * scale.scale)(params)
    return params - 0.1 * grads / scale.scale, LossScale(scale.scale * 0.5), loss


def search(fn, **options):
    return diffshard.search(fn, mesh_2x2(), hardware=SLOW, **options)


def test_a_pytree_whose_constructor_looks_at_its_leaves_is_planned_run_and_planned_again_from_a_file(tmp_path):
    arguments = weights(8, 4), LossScale(jnp.float32(4.0)), weights(16, 8)
    step = search(scaled_step, donate_argnums=(0, 1))
    expected = scaled_step(*arguments)
    plan = step.plan(*arguments)
    path = tmp_path / "plan.json"
    plan.save(path)
    loaded = diffshard.Plan.load(path, mesh_2x2())
    arguments = plan.shard(*arguments)
    assert isinstance(arguments[1], LossScale)
    assert_equal(loaded.apply(scaled_step)(weights(8, 4), LossScale(jnp.float32(4.0)), arguments[2]), expected)
    assert_equal(step(*arguments), expected)


def test_the_first_use_may_be_under_a_trace():
    state, batch = train_arguments()
    expected = train_step(state, batch)
    shapes = jax.eval_shape(search(train_step), state, batch)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), shapes) == jax.tree.map(lambda x: (x.shape, x.dtype), expected)
    step = search(train_step)
    assert_equal(jax.jit(lambda state, batch: step(state, batch))(state, batch), expected)
    assert_equal(step(state, batch), expected)


def keyword_step(params, x, /, scale, *, offset, power=2):
    return params - scale * jax.grad(lambda p: ((x @ p + offset) ** power).sum())(params)


def test_keywords_mean_what_they_mean_to_the_function():
    params, x, offset = weights(8, 4), weights(16, 8), jnp.arange(4.0)
    step = search(keyword_step, static_argnames="power", donate_argnames="params")
    plan = step.plan(params, x, jnp.float32(0.1), offset=offset)
    assert [tensor.path for tensor in plan.arguments] == ["params", "x", "scale", "offset"]
    for power in (2, 3):
        params = weights(8, 4)
        expected = keyword_step(params, x, 0.1, offset=offset, power=power)
        assert_equal(step(params, x, scale=jnp.float32(0.1), offset=offset, power=power), expected)
    assert len(step._prepared) == 3  # without a power, with 2 and with 3
    assert step.plan(params, x, scale=jnp.float32(0.1), offset=offset) is plan
    expected = keyword_step(params, x, 0.1, offset=offset)
    placed = plan.shard(params)
    assert_equal(step(placed, x, scale=jnp.float32(0.1), offset=offset), expected)
    assert placed.is_deleted()


def test_a_static_argument_is_static_however_it_is_given():
    def power_of(x, n, m=1):
        return x ** (n + m)

    x = weights(8, 4)
    by_number, by_name = search(power_of, static_argnums=(1, 2)), search(power_of, static_argnames=("n", "m"))
    for step in (by_number, by_name):
        for result in (step(x, 2), step(x, n=2), step(n=2, x=x), step(x, 1, m=2), step(x, m=2, n=1)):
            np.testing.assert_allclose(result, x**3, rtol=1e-6)


def test_a_plan_with_keywords_is_saved_and_applied(tmp_path):
    params, x, offset = weights(8, 4), weights(16, 8), jnp.arange(4.0)
    plan = search(keyword_step, static_argnames="power").plan(params, x, 0.1, offset=offset, power=3)
    plan.save(tmp_path / "plan.json")
    step = diffshard.Plan.load(tmp_path / "plan.json", mesh_2x2()).apply(keyword_step)
    expected = keyword_step(params, x, 0.1, offset=offset, power=3)
    assert_equal(step(params, x, 0.1, offset=offset, power=3), expected)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"static_argnames": "powr"},
            ValueError,
            r"`static_argnames` has 'powr'.*it has params, x, scale, offset, power",
        ),
        ({"donate_argnames": ("x", "y")}, ValueError, "`donate_argnames` has 'y'"),
        ({"donate_argnames": "power", "static_argnames": "power"}, ValueError, "share a name"),
        ({"donate_argnums": 2, "static_argnames": "scale"}, ValueError, "share a position"),
    ],
)
def test_names_of_arguments_are_checked(options, error, message):
    with pytest.raises(error, match=message):
        search(keyword_step, **options)


def test_arguments_that_the_function_does_not_take_are_refused():
    with pytest.raises(TypeError, match=r"keyword_step does not take these arguments: .*'y'"):
        search(keyword_step).plan(weights(8, 4), weights(16, 8), 0.1, offset=1.0, y=1.0)
    with pytest.raises(TypeError, match=r"\[0\]\[0\]\['a'\] is .* neither an array nor hashable"):
        search(lambda x: x["b"]).plan({"a": bytearray(b"x"), "b": weights(8, 4)})


class Classifier(eqx.Module):
    """A module with functions, flags and numbers as leaves."""

    layers: list
    dropout: eqx.nn.Dropout
    slope: float
    is_residual: bool

    def __init__(self, key):
        keys = jax.random.split(key, 2)
        self.layers = [eqx.nn.Linear(8, 8, key=keys[0]), jax.nn.relu, eqx.nn.Linear(8, 8, key=keys[1])]
        self.dropout = eqx.nn.Dropout(0.5, inference=True)
        self.slope = 0.5
        self.is_residual = True

    def __call__(self, x, key):  # noqa: D102
        hidden = x
        for layer in self.layers:
            hidden = layer(hidden)
        hidden = self.dropout(hidden, key=key)
        return hidden + x * self.slope if self.is_residual else hidden


class TrainState(NamedTuple):
    """A module beside the state of its optimiser."""

    model: Classifier
    opt_state: optax.OptState


def module_step(optimizer, state, x, key):
    def loss_of(model):
        return (jax.vmap(model, in_axes=(0, None))(x, key) ** 2).mean()

    loss, grads = eqx.filter_value_and_grad(loss_of)(state.model)
    updates, opt_state = optimizer.update(grads, state.opt_state, eqx.filter(state.model, eqx.is_inexact_array))
    return TrainState(eqx.apply_updates(state.model, updates), opt_state), loss


def test_equinox_modules_train_inside_and_outside_of_filter_jit():
    optimizer = optax.adam(1e-2)
    model = Classifier(jax.random.key(0))
    state = TrainState(model, optimizer.init(eqx.filter(model, eqx.is_inexact_array)))
    x, key = weights(16, 8), jax.random.key(1)
    plain_step = functools.partial(module_step, optimizer)
    expected, expected_loss = plain_step(*plain_step(state, x, key)[:1], x, key)
    for wrap in (lambda step: step, eqx.filter_jit):
        step = search(plain_step)
        run = wrap(step)
        after, loss = run(run(state, x, key)[0], x, key)
        assert_equal(loss, expected_loss)
        assert_equal(eqx.filter(after, eqx.is_array), eqx.filter(expected, eqx.is_array))
        assert after.model.layers[1] is jax.nn.relu
        assert (after.model.slope, after.model.is_residual) == (0.5, True)
        assert len(step._prepared) == 1
    (tensors,) = {tuple(t.spec for t in ts) for ts in (prepared_state(step.plan(state, x, key).arguments),)}
    assert tensors == tuple(t.spec for t in prepared_state(step.plan(state, x, key).outputs))  # it is the next state


def prepared_state(tensors):
    return [t for t in tensors if "model" in t.path or "opt_state" in t.path]


def test_a_flag_of_a_module_is_a_constant_of_its_plan():
    model = Classifier(jax.random.key(0))
    x, key = weights(16, 8), jax.random.key(1)
    step = search(lambda model, x: jax.vmap(model, in_axes=(0, None))(x, key))
    other = eqx.tree_at(lambda m: m.is_residual, model, False)
    for module in (model, other, model):
        np.testing.assert_allclose(step(module, x), jax.vmap(module, in_axes=(0, None))(x, key), rtol=1e-5, atol=1e-6)
    assert len(step._prepared) == 2


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


def test_a_large_argument_of_which_nothing_comes_back_is_noted():
    def loss_of(params, x):
        return jnp.tanh(x @ params["w"]).sum()

    def trained(params, x):
        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss_of)(params, x))

    params, x = {"w": jax.ShapeDtypeStruct((1024, 1024), jnp.float32)}, jax.ShapeDtypeStruct((8, 1024), jnp.float32)
    (note,) = search(loss_of).plan(params, x).notes
    assert note.startswith("`params`: none of the results replaces it")
    assert search(trained).plan(params, x).notes == ()
    assert search(loss_of).plan({"w": jax.ShapeDtypeStruct((1024, 8), jnp.float32)}, x).notes == ()


class Scaled(eqx.Module):
    """A module with a number that decides the type of its result."""

    weight: jax.Array
    power: float


def test_constants_of_other_types_are_other_constants():
    step = search(lambda module: module.weight**module.power)
    weight = jnp.arange(8)
    for power in (2, 2.0, 2):
        result = step(Scaled(weight, power))
        assert result.dtype == (weight**power).dtype
    assert len(step._prepared) == 2


def test_a_later_call_is_not_taken_apart_again(monkeypatch):
    state, batch = train_arguments()
    step = search(train_step)
    state, _ = step(state, batch)
    monkeypatch.setattr(planned_function, "split", None)
    step(state, batch)


def test_an_array_that_becomes_a_constant_is_planned_anew():
    step = search(lambda x, mode: -x if mode == "negative" else x * 2)
    x = weights(8, 4)
    assert_equal(step(x, 1.0), 2 * x)
    assert_equal(step(x, "negative"), -x)


def test_settings_of_jax_are_part_of_what_is_planned():
    step = search(lambda x: x * np.float64(2.0))
    x = np.ones((4, 4))
    assert step(x).dtype == jnp.float32
    with jax.enable_x64(True):
        assert step(x).dtype == jnp.float64
    assert step(x).dtype == jnp.float32


def test_static_arguments_without_a_hash_and_arguments_given_twice_are_refused_by_name():
    with pytest.raises(TypeError, match=r"`n` is static and must be hashable, which \[1\] is not"):
        search(lambda x, n: x, static_argnums=1)(weights(8, 4), [1])
    params, x, offset = weights(8, 4), weights(16, 8), jnp.arange(4.0)
    plan = search(keyword_step).plan(params, x, 0.1, offset=offset)
    with pytest.raises(diffshard.PlanError, match="`params` was given by position and by name"):
        plan.shard(params, params=params)


def test_a_plan_of_an_older_version_knows_where_static_arguments_stand():
    x, y = weights(8, 4), weights(4, 8)
    plan = search(lambda x, n, y: x @ y * n, static_argnums=1).plan(x, 2, y)
    placed = dataclasses.replace(plan, parameters=()).shard(x, 2, y)
    assert placed[1] == 2
    assert isinstance(placed[2].sharding, NamedSharding)


def test_random_keys_are_not_loaded():
    options = Options(fn=lambda w, x, old, new: w + x, mesh=mesh_2x2(), hardware=SLOW, memory_limit_bytes=1e9)
    traced = trace_function(
        options, (weights(8, 4), weights(8, 4), jax.random.PRNGKey(0), jax.random.split(jax.random.key(0), 4))
    )
    assert traced.loaded == {1}


def test_a_plan_for_other_arguments_says_which():
    params, x, offset = weights(8, 4), weights(16, 8), jnp.arange(4.0)
    plan = search(keyword_step, static_argnames="power").plan(params, x, 0.1, offset=offset)
    with pytest.raises(diffshard.PlanError, match=r"does not fit the function.*'power', which is no argument"):
        plan.apply(lambda params, x: x)
    assert plan.shard(params, power=3)[1] == 3  # a static argument that had its default in the plan
    assert_equal(plan.apply(keyword_step)(params, x, 0.1, offset=offset), keyword_step(params, x, 0.1, offset=offset))


def test_a_given_plan_does_not_speak_of_searching():
    x = weights(8, 4)
    step = search(lambda x: 2 * x).plan(x).apply(lambda x: 2 * x)
    step(x)
    with pytest.raises(diffshard.PlanError, match=r"`x` of float32\[8, 4\]"):  # and no warning, which were an error
        step(weights(4, 4))


def test_the_batch_of_a_step_that_returns_its_state_is_not_noted():
    def trained(params, x):
        return jax.tree.map(lambda p, g: p - g, params, jax.grad(lambda p: jnp.tanh(x @ p).sum())(params))

    params, x = jax.ShapeDtypeStruct((64, 8), jnp.float32), jax.ShapeDtypeStruct((2**14, 64), jnp.float32)
    assert search(trained).plan(params, x).notes == ()

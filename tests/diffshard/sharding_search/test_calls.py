"""Arguments as people write them: keywords, pytrees that look at their leaves, modules, traces, arrays elsewhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diffshard
from diffshard.sharding_search import planned_function
from diffshard.sharding_search.options import Options
from diffshard.sharding_search.tracing import trace_function
from tests.diffshard.sharding_search.small_calls import keyword_step, search
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


def test_keywords_in_another_order_than_their_names_keep_their_arrays():
    def fn(x, *, second, first):
        return x @ first + second

    x, first, second = weights(16, 8), weights(8, 4), weights(16, 4)
    step = search(fn)
    plan = step.plan(x, second=second, first=first)
    assert [(t.path, t.shape) for t in plan.arguments] == [("x", (16, 8)), ("first", (8, 4)), ("second", (16, 4))]
    assert_equal(step(x, first=first, second=second), fn(x, second=second, first=first))


def test_arguments_of_one_starred_parameter_are_numbered():
    def fn(w, *batch):
        x, target = batch
        return ((x["image"] @ w - target) ** 2).mean()

    w, image, target = weights(8, 4), weights(16, 8), weights(16, 4)
    step = search(fn)
    plan = step.plan(w, {"image": image}, target)
    assert [tensor.path for tensor in plan.arguments] == ["w", "batch[0]['image']", "batch[1]"]
    assert plan.parameters == ("w", "batch[0]", "batch[1]")
    assert list(plan.local_parts("batch[0]")) == ["batch[0]['image']"]
    assert_equal(step(*plan.shard(w, {"image": image}, target)), fn(w, {"image": image}, target))
    with pytest.raises(
        diffshard.PlanError, match=r"`batch\[1\]` of float32\[16, 4\], and was given .* float32\[16, 3\]"
    ):
        plan.shard(w, {"image": image}, target[:, :3])


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
        ({"donate_argnames": "power", "static_argnames": "power"}, ValueError, "share the argument 'power'"),
        ({"donate_argnums": 2, "static_argnames": "scale"}, ValueError, "share the argument 'scale' of"),
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
    assert search(loss_of).plan(params, jax.ShapeDtypeStruct((1024, 1024), jnp.float32)).notes == ()  # of equal size


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
    with pytest.raises(TypeError, match=r"`n` has arrays, which cannot be static.*Leave it out of `static_argnums`"):
        search(lambda x, n: x, static_argnums=1)(weights(8, 4), {"w": weights(8, 4)})
    params, x, offset = weights(8, 4), weights(16, 8), jnp.arange(4.0)
    plan = search(keyword_step).plan(params, x, 0.1, offset=offset)
    with pytest.raises(diffshard.PlanError, match="`params` was given by position and by name"):
        plan.shard(params, params=params)


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

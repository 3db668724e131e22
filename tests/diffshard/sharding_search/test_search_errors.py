"""What a search and a plan refuse, and what the errors say."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import diffshard
from tests.diffshard.sharding_search.small_searches import SLOW, mesh_2x2, train_arguments, train_step


def test_abstract_mesh_plans_and_says_that_it_cannot_run():
    state, batch = train_arguments()
    mesh = AbstractMesh((16, 16), ("x", "y"))
    step = diffshard.search(train_step, mesh, hardware="h100")
    shapes = jax.eval_shape(lambda: (state, batch))
    plan = step.plan(*shapes)
    assert dict(plan.mesh_axes) == {"x": 16, "y": 16}
    with pytest.raises(ValueError, match=r"`mesh`.*abstract"):
        step(state, batch)
    with pytest.raises(diffshard.PlanError, match="abstract"):
        plan.shard(state, batch)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not JSON"), ("[]", "format"), ('{"format": "diffshard plan", "version": 99}', "version 99"),
     ('{"format": "diffshard plan", "version": 4}', "damaged")],
)  # fmt: skip
def test_foreign_files_are_refused(tmp_path, text, message):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(diffshard.PlanError, match=message):
        diffshard.Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"hardware": "h1000"}, ValueError, "`hardware` 'h1000'"),
        ({"hardware": SLOW, "solver": "magic"}, ValueError, "`solver` must be one of"),
        ({"hardware": SLOW, "time_limit_s": 0}, ValueError, "`time_limit_s`"),
        ({"hardware": SLOW, "memory_limit_bytes": -1.0}, ValueError, "`memory_limit_bytes`"),
        ({"hardware": SLOW, "donate_argnums": -1}, ValueError, "`donate_argnums`"),
        ({"hardware": SLOW, "in_shardings": PartitionSpec("modle")}, ValueError, "'modle'.*'x', 'y'"),
        ({"hardware": SLOW, "in_shardings": ("x",)}, TypeError, r"`in_shardings\[0\]`"),
        ({"hardware": SLOW, "in_shardings": PartitionSpec("x", "x")}, ValueError, "'x' splits two"),
        ({"hardware": SLOW, "solver": 5}, ValueError, "`solver`"),
        ({"hardware": SLOW, "donate_argnums": 1, "static_argnums": 1}, ValueError, "share the argument"),
        ({"hardware": SLOW, "donate_argnums": 1.5}, ValueError, r"`donate_argnums` must be positions.*\(1.5,\)"),
        ({"hardware": SLOW, "static_argnums": "0"}, ValueError, "`static_argnums` must be positions"),
        ({"hardware": SLOW, "donate_argnums": "state"}, ValueError, r"not \('state',\); `donate_argnames` takes"),
        ({"hardware": SLOW, "static_argnames": 0}, ValueError, "`static_argnames` has 0"),
        ({"hardware": SLOW, "time_limit_s": "1"}, ValueError, "`time_limit_s` .*not '1'"),
        ({"hardware": SLOW, "time_limit_s": True}, ValueError, "`time_limit_s` .*not True"),
        ({"hardware": SLOW, "memory_limit_bytes": "1"}, ValueError, "`memory_limit_bytes` .*not '1'"),
        ({"hardware": SLOW, "key": 10**23}, ValueError, "`key` must be a seed below 2\\^63"),
        ({"hardware": SLOW, "key": "seed"}, ValueError, "`key` must be a seed.*'seed'"),
        ({"harware": SLOW}, TypeError, "`harware` is no argument.*Did you mean 'hardware'?"),
        ({"hardware": SLOW, "memory_limit": 1e9}, TypeError, "`memory_limit` .*Did you mean 'memory_limit_bytes'?"),
    ],
)
def test_bad_options_are_refused_before_tracing(options, error, message):
    with pytest.raises(error, match=message):
        diffshard.search(train_step, mesh_2x2(), **options)


def test_a_mesh_without_devices_along_an_axis_is_refused():
    with pytest.raises(ValueError, match="`mesh` must have a device or more along each axis; 'y' has 0"):
        diffshard.search(train_step, AbstractMesh((2, 0), ("x", "y")), hardware=SLOW)


def test_numbers_of_all_kinds_and_none_are_options():
    numbers: list[Any] = [np.float32(1e-6), np.float64(1e-9), np.float32(1e12), np.int64(10**9), np.int64(0)]
    latency_s, s_per_byte, flops_per_s, memory_bytes, zero = numbers
    link = diffshard.Link(latency_s, s_per_byte)
    hardware = diffshard.Hardware("test", flops_per_s, 10**13, memory_bytes, {"x": link, "y": link})
    step = diffshard.search(
        lambda x: x @ x,
        mesh_2x2(),
        hardware=hardware,
        memory_limit_bytes=10**400,
        time_limit_s=10**400,
        donate_argnums=zero,
        static_argnums=None,
        donate_argnames=None,
        static_argnames=None,
        key=zero,
    )
    assert step.plan(jnp.ones((4, 4))).memory_limit_bytes == np.inf


def test_given_sharding_that_does_not_divide_is_refused():
    step = diffshard.search(lambda x: x + 1, mesh_2x2(), hardware=SLOW, in_shardings=(PartitionSpec("x"),))
    with pytest.raises(
        ValueError, match=r"Dimension 0 of x, whose sharding is given, is 7, which .* of 2 devices do not divide"
    ):
        step.plan(jnp.zeros(7))


def test_a_batch_without_rows_is_refused():
    def step(weights, batch):
        return weights - jax.grad(lambda weights: jnp.sum(batch["x"] @ weights))(weights)

    searched = diffshard.search(step, mesh_2x2(), hardware=SLOW)
    with pytest.raises(ValueError, match=r"The batch must have rows, but `batch\['x'\]` has the shape \(0, 4\)\. Give"):
        searched.plan(jnp.ones((4, 2)), {"x": jnp.ones((0, 4))})
    searched.plan(jnp.ones((4, 2)), {"x": jnp.ones((8, 4)), "empty": jnp.ones(0)})


def test_shardings_on_another_mesh_are_refused():
    other = jax.make_mesh((2, 4), ("x", "y"), (AxisType.Auto,) * 2)
    with pytest.raises(ValueError, match="not on `mesh`"):
        diffshard.search(train_step, mesh_2x2(), hardware=SLOW, in_shardings=NamedSharding(other, PartitionSpec("x")))


def test_donated_positions_must_exist():
    with pytest.raises(ValueError, match=r"`donate_argnums` \(7,\)"):
        diffshard.search(lambda x: x, mesh_2x2(), hardware=SLOW, donate_argnums=7).plan(jnp.zeros(4))


def test_errors_of_the_function_itself_are_kept():
    step = diffshard.search(lambda x: x @ jnp.zeros((3, 3)), mesh_2x2(), hardware=SLOW)
    with pytest.raises(TypeError, match="dot_general"):
        step.plan(jnp.zeros((4, 4)))


def branching(p, x):
    return x if x.sum() > 0 else p["a"]


def test_errors_of_tracing_name_the_users_function_and_argument():
    step = diffshard.search(branching, mesh_2x2(), hardware=SLOW)
    with pytest.raises(jax.errors.TracerBoolConversionError, match=r"branching at .*test_search_errors.*argument x\."):
        step.plan({"a": jnp.ones((4, 4))}, jnp.ones((4, 4)))
    with pytest.raises(jax.errors.TracerBoolConversionError, match=r"argument batch\[1\]\."):
        diffshard.search(lambda batch: bool(batch[1].sum()), mesh_2x2(), hardware=SLOW).plan((jnp.ones(4), jnp.ones(4)))


def test_static_arguments_of_a_jitted_function_are_given_to_the_search():
    jitted = jax.jit(lambda x, power: x**power, static_argnums=1)
    with pytest.raises(TypeError, match=r"under `jax\.jit` with static arguments.*`static_argnums`"):
        diffshard.search(jitted, mesh_2x2(), hardware=SLOW).plan(jnp.ones((4, 4)), 2)
    step = diffshard.search(jitted, mesh_2x2(), hardware=SLOW, static_argnums=1)
    np.testing.assert_allclose(step(jnp.full((4, 4), 3.0), 2), 9.0)


@pytest.mark.parametrize(("rows", "width"), [(4, 64), (256, 8), (16, 8)])
def test_donating_is_advised_where_it_lowers_the_least_memory(rows, width):
    def step(w, x):
        return w - 0.1 * jax.grad(lambda w: jnp.square(x @ w).mean())(w)

    def message(**options):
        search = diffshard.search(step, mesh_2x2(), hardware=SLOW, memory_limit_bytes=1.0, **options)
        with pytest.raises(diffshard.InfeasibleError, match="needs at least") as error:
            search.plan(jnp.ones((width, width)), jnp.ones((rows, width)))
        return str(error.value)

    plain, donated = message(), message(donate_argnums=0)
    least, donated_least = (
        int(re.findall(r"at least ([\d,]+)", text)[0].replace(",", "")) for text in (plain, donated)
    )
    assert ("donate the state" in plain) == (donated_least < least) == (width == 64)
    assert "donate" not in donated


def test_arrays_that_no_memory_holds_are_refused_by_name():
    x = jax.ShapeDtypeStruct((2**62,) * 20, jnp.float32)
    with pytest.raises(ValueError, match=r"^`x` has the shape \(4611686018427387904, .* and so at least 2\^63 bytes"):
        diffshard.search(lambda x: jnp.sum(x), mesh_2x2(), hardware=SLOW).plan(x)
    y = jax.ShapeDtypeStruct((2**33, 1), jnp.float32)
    with pytest.raises(ValueError, match=r"^dot_general \(.*test_search_errors.py:.*\) has the shape"):
        diffshard.search(lambda y: jnp.sum(y @ y.T), mesh_2x2(), hardware=SLOW).plan(y)


def nested_loops(depth, x):
    """A product within loops of a million steps each."""
    body = (lambda x: x @ x) if depth == 1 else lambda x: nested_loops(depth - 1, x)
    return jax.lax.fori_loop(0, 10**6, lambda i, x: body(x), x)


def test_steps_that_never_end_are_refused():
    def plan(depth):
        x = jax.ShapeDtypeStruct((2**16, 2**16), jnp.float32)
        return diffshard.search(lambda x: nested_loops(depth, x), mesh_2x2(), hardware=SLOW).plan(x)

    with pytest.raises(diffshard.InfeasibleError, match=r"is predicted to take 1e\+18 s or more, .* `hardware` 'slow'"):
        plan(2)
    with pytest.raises(ValueError, match=r"runs 1e\+60 times in one call, because of the loops that it is in"):
        plan(10)

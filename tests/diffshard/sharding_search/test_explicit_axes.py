"""Functions of explicit mesh axes: what they fix is kept, the rest is searched, and arrays keep their types."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

import diffshard
from tests.diffshard.sharding_search.small_searches import SLOW, assert_equal

MESH = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])
SPECS = {"up": P(None, "y"), "down": P("y", None), "layers": P(None, None, None)}


def typed_step(params, x):
    """Needs the types of explicit axes: `einsum` and `dot` would be ambiguous, `reshard` has no other meaning."""

    def loss_of(params):
        hidden = jnp.einsum("bd,df->bf", x, params["up"], out_sharding=P("x", "y"))
        hidden = reshard(jax.nn.gelu(hidden), P("x", None))
        noise = jax.random.normal(jax.random.key(0), hidden.shape, out_sharding=P("x", None))

        def layer(hidden, weights):
            return jnp.tanh(hidden @ weights), None

        hidden, _ = jax.lax.scan(jax.checkpoint(layer), hidden + 0.1 * noise, params["layers"])
        y = jnp.dot(hidden, params["down"], out_sharding=P("x", None))
        y = jax.lax.cond(y.sum() > 0, lambda y: y, lambda y: -y, y)
        return (y**2).mean() + jnp.zeros((4,), out_sharding=P("x")).sum()

    loss, grads = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def arguments(place):
    keys = jax.random.split(jax.random.key(1), 4)
    params = {
        "up": jax.random.normal(keys[0], (16, 32)) / 4,
        "layers": jax.random.normal(keys[1], (3, 32, 32)) / 6,
        "down": jax.random.normal(keys[2], (32, 16)) / 6,
    }
    x = jax.random.normal(keys[3], (8, 16))
    if not place:
        return params, x
    params = {name: jax.device_put(array, NamedSharding(MESH, SPECS[name])) for name, array in params.items()}
    return params, jax.device_put(x, NamedSharding(MESH, P("x", None)))


@pytest.fixture
def explicit_context():
    with jax.set_mesh(MESH):
        yield


@pytest.mark.parametrize("executor", ["constraints", "program", "propagation"])
@pytest.mark.parametrize("place", [True, False])
def test_what_the_user_fixed_is_given_and_the_rest_is_searched(explicit_context, executor, place):
    params, x = arguments(place)
    expected = jax.jit(typed_step)(*arguments(True))
    step = diffshard.search(typed_step, MESH, hardware=SLOW, executor=executor)
    plan = step.plan(params, x)
    specs = {tensor.path: tensor.partition_spec for tensor in plan.arguments}
    if place:
        assert specs["params['up']"] == P(None, "y")
        assert specs["x"] == P("x", None)
    constraints = [o for o in plan.operations if o.signature.startswith("sharding_constraint")]
    assert {o.results[0] for o in constraints} >= {(("x",), ("y",)), (("x",), ())}
    params, x = plan.shard(params, x)
    after, loss = step(*step(params, x)[:1], x)
    assert_equal((after, loss), jax.jit(typed_step)(expected[0], arguments(True)[1]))
    for name, array in after.items():
        assert jax.typeof(array).sharding.spec == specs[f"params['{name}']"]  # types that other explicit code reads
    again = {name: reshard(array, SPECS[name]) for name, array in after.items()}
    assert_equal(jax.jit(typed_step)(again, reshard(x, P("x", None)))[1], step(after, x)[1])


def test_a_function_for_automatic_axes_takes_an_explicit_mesh_as_well():
    def step(w, x):
        return w - 0.1 * jax.grad(lambda w: jnp.tanh(x @ w).sum())(w)  # ambiguous for explicit axes

    w, x = arguments(False)[0]["up"], arguments(False)[1]
    planned = diffshard.search(step, MESH, hardware=SLOW, in_shardings=(P("x", "y"), P("x", "y")))
    result = planned(w, x)
    assert_equal(result, step(w, x))
    assert jax.typeof(result).sharding.spec == P("x", "y")


def test_errors_of_types_are_jax_s_own(explicit_context):
    def ambiguous(w, x):
        return jnp.einsum("bd,df->bf", x, w, out_sharding=P("x", None)) + x @ w

    w = jax.device_put(arguments(False)[0]["up"], NamedSharding(MESH, P("y", "x")))
    x = jax.device_put(arguments(False)[1], NamedSharding(MESH, P(None, "y")))
    with pytest.raises(Exception, match="Contracting dimensions are sharded") as expected:
        jax.jit(ambiguous)(w, x)
    with pytest.raises(type(expected.value), match="Contracting dimensions are sharded"):
        diffshard.search(ambiguous, MESH, hardware=SLOW).plan(w, x)


def test_a_shard_map_of_explicit_axes_is_refused_by_name(explicit_context):
    def step(x):
        x = reshard(x, P("x", None))
        return jax.shard_map(lambda x: 2 * x, in_specs=P("x", None), out_specs=P("x", None))(x)

    with pytest.raises(ValueError, match=r"jax\.shard_map. inside a function of explicit mesh axes"):
        diffshard.search(step, MESH, hardware=SLOW).plan(jnp.ones((8, 8)))


def test_an_abstract_explicit_mesh_is_planned_for():
    mesh = AbstractMesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    plan = diffshard.search(typed_step, mesh, hardware=SLOW).plan(*jax.eval_shape(lambda: arguments(False)))
    assert any(o.signature.startswith("sharding_constraint") for o in plan.operations)


def constraint_specs(fn, *args):
    plan = diffshard.search(fn, MESH, hardware=SLOW).plan(*args)
    return [o.results[0] for o in plan.operations if o.signature.startswith("sharding_constraint")]


def test_each_way_to_fix_a_sharding_is_kept_by_itself(explicit_context):
    x, w = arguments(True)[1], arguments(True)[0]["up"]
    assert constraint_specs(lambda x, w: jnp.dot(x, w, out_sharding=P(None, "x")), x, w) == [((), ("x",))]
    assert constraint_specs(lambda x: jnp.sin(reshard(x, P(None, "y"))), x) == [((), ("y",))]
    assert constraint_specs(lambda x: jnp.sin(reshard(x, P(None, None))), x) == [((), ())]


def test_a_result_that_is_resharded_to_every_device_is_whole(explicit_context):
    x = jax.device_put(jnp.ones((8, 16)), NamedSharding(MESH, P("x", None)))
    result = diffshard.search(lambda x: reshard(2 * x[:, :8], P(None, None)), MESH, hardware=SLOW)(x)
    assert result.sharding.is_fully_replicated


def test_rules_for_logical_axes_are_refused_for_explicit_functions(explicit_context):
    step = diffshard.search(
        lambda x: jnp.dot(x, x.T, out_sharding=P("x")), MESH, hardware=SLOW, logical_axis_rules=(("batch", "x"),)
    )
    with pytest.raises(ValueError, match=r"`logical_axis_rules`.*explicit"):
        step.plan(jnp.ones((8, 8)))

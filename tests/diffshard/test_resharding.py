"""Arrays move between plans and meshes shard by shard, with equal values, at the price of a move."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

import diffshard
from diffshard import resharding as reshard_module


def mesh_of(shape, names, first=0):
    devices = np.array(jax.devices()[first : first + int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(shape))


def init(key):
    keys = jax.random.split(key, 3)
    weights = {"in": jax.random.normal(keys[0], (16, 64)), "out": jax.random.normal(keys[1], (64, 16))}
    return {"weights": weights, "momentum": jax.tree.map(jnp.zeros_like, weights), "key": keys[2]}


def train_step(state, batch):
    def loss(weights):
        return jnp.mean((jnp.tanh(batch @ weights["in"]) @ weights["out"] - batch) ** 2)

    value, gradients = jax.value_and_grad(loss)(state["weights"])
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], gradients)
    weights = jax.tree.map(lambda w, m: w - 0.1 * m, state["weights"], momentum)
    return {"weights": weights, "momentum": momentum, "key": jax.random.split(state["key"])[0]}, value


def generate(weights, prompt):
    return jnp.tanh(prompt @ weights["in"]) @ weights["out"]


HARDWARE = "h100"
STATE = jax.eval_shape(init, jax.random.key(0))


def plan_of(fn, mesh, *args, **options):
    return diffshard.search(fn, mesh, hardware=HARDWARE, solver="greedy", **options).plan(*args)


def training_plan(mesh, **options):
    return plan_of(train_step, mesh, STATE, jax.ShapeDtypeStruct((32, 16), "float32"), **options)


WHOLE = PartitionSpec()


def generation_plan(mesh, dtype="float32", spec=WHOLE):
    weights = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, dtype), STATE["weights"])
    shardings = ({"in": spec, "out": PartitionSpec(*reversed((*spec, *[None] * (2 - len(spec)))))}, None)
    return plan_of(generate, mesh, weights, jax.ShapeDtypeStruct((8, 16), dtype), in_shardings=shardings)


MESHES = {
    "other shape": (mesh_of, (8,), ("all",)),
    "other devices": (mesh_of, (4,), ("four",), 4),
    "fewer": (mesh_of, (2,), ("two",)),
    "one more axis": (mesh_of, (2, 2, 2), ("a", "b", "c")),
}


def test_a_state_is_split_from_the_start():
    plan = training_plan(mesh_of((2, 4), ("data", "model")))
    state, expected = plan.init(init, jax.random.key(3)), init(jax.random.key(3))
    for array, tensor, want in zip(jax.tree.leaves(state), plan.arguments, jax.tree.leaves(expected), strict=False):
        assert array.sharding == NamedSharding(plan.mesh, tensor.partition_spec)
        if not jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(array, want, rtol=1e-6)


@pytest.mark.parametrize("where", MESHES)
@pytest.mark.parametrize("split", [(), (1,), (0,)], ids=str)
def test_weights_arrive_as_the_other_plan_wants_them(where, split):
    make, *shape = MESHES[where]
    devices = (2, 2) if where == "other devices" else (2, 4)
    source = training_plan(mesh_of(devices, ("data", "model")))
    mesh = make(*shape)
    spec = PartitionSpec(*(mesh.axis_names if d in split else None for d in range(2)))
    target = generation_plan(mesh, spec=spec)
    weights = source.init(init, jax.random.key(0))["weights"]
    moved = diffshard.elastic.reshard(weights, source, target)
    for name, array in moved.items():
        np.testing.assert_array_equal(array, weights[name])
    assert moved["in"].sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
    assert {name: a.sharding for name, a in target.shard(moved).items()} == {n: a.sharding for n, a in moved.items()}


@pytest.mark.parametrize(("before", "after"), [((8,), (4,)), ((4,), (8,)), ((2, 3), (5,)), ((8,), (1,))])
def test_pieces_between_sets_of_devices_are_put_together(before, after):
    names, shape = ("a", "b")[: len(before)], (120, 6)
    source = NamedSharding(mesh_of(before, names), PartitionSpec(*names))
    target = NamedSharding(mesh_of(after, ("z",), 8 - after[0]), PartitionSpec("z"))
    array = jax.device_put(jnp.arange(720.0).reshape(shape), source)
    moved = reshard_module._placed(array, target)
    assert moved.sharding == target
    np.testing.assert_array_equal(moved, array)


@pytest.mark.parametrize("shape", [(), (0, 4)])
def test_scalars_and_arrays_without_elements_move(shape):
    source, target = (NamedSharding(mesh_of((4,), ("a",), first), PartitionSpec()) for first in (0, 4))
    moved = reshard_module._placed(jax.device_put(jnp.ones(shape), source), target)
    assert moved.sharding == target
    np.testing.assert_array_equal(moved, np.ones(shape))


def test_a_state_with_keys_moves_and_training_goes_on():
    source, target = training_plan(mesh_of((2, 2), ("data", "model"))), training_plan(mesh_of((4,), ("data",), 4))
    state = source.init(init, jax.random.key(0))
    moved = diffshard.elastic.reshard(state, source, target)
    assert jax.random.key_data(moved["key"]).tolist() == jax.random.key_data(state["key"]).tolist()
    batch = jnp.ones((32, 16))
    step, expected = target.apply(train_step), jax.jit(train_step)(init(jax.random.key(0)), batch)
    _, loss = step(moved, target.shard(batch=batch))
    np.testing.assert_allclose(loss, expected[1], rtol=1e-6)


def test_floats_take_the_dtypes_of_the_other_plan():
    source = generation_plan(mesh_of((8,), ("data",)), spec=PartitionSpec("data"))
    target = generation_plan(mesh_of((4,), ("x",), 4), "bfloat16")
    weights = source.shard(init(jax.random.key(0))["weights"])
    with pytest.raises(diffshard.PlanError, match=r"It is not `weights`: .* bfloat16.* was given .* of float32"):
        diffshard.elastic.reshard(weights, source, target)
    moved = diffshard.elastic.reshard(weights, source, target, cast=True)
    assert {array.dtype for array in moved.values()} == {jnp.dtype("bfloat16")}
    np.testing.assert_array_equal(moved["in"], weights["in"].astype("bfloat16"))
    exact = diffshard.elastic.reshard_price(weights, source, generation_plan(mesh_of((4,), ("x",), 4)))
    rounded = diffshard.elastic.reshard_price(weights, source, target, cast=True)
    assert rounded.num_bytes == exact.num_bytes / 2
    assert 0 < rounded.seconds <= exact.seconds


def test_the_price_counts_what_devices_do_not_hold_yet():
    mesh = mesh_of((8,), ("all",))
    rows, whole = generation_plan(mesh, spec=PartitionSpec("all")), generation_plan(mesh)
    weights = rows.shard(init(jax.random.key(0))["weights"])
    to_whole = diffshard.elastic.reshard_price(weights, rows, whole)
    num_bytes = sum(array.nbytes for array in weights.values())
    assert to_whole.num_bytes == 7 * num_bytes  # each of 8 devices gets seven eighths
    assert to_whole.num_arrays == 2
    assert diffshard.elastic.reshard_price(weights, rows, rows) == (0.0, 0.0, 0)
    back = diffshard.elastic.reshard_price(whole.shard(weights), whole, rows)
    assert back == (0.0, 0.0, 0)  # all devices hold everything


def test_what_cannot_be_moved_is_refused_by_name():
    source, target = training_plan(mesh_of((8,), ("data",))), generation_plan(mesh_of((4,), ("x",), 4))
    state = source.init(init, jax.random.key(0))
    with pytest.raises(diffshard.PlanError, match=r"The tree is no argument of generate\. It is not `weights`"):
        diffshard.elastic.reshard(state, source, target)
    with pytest.raises(diffshard.PlanError, match="`argument` is 'zz', but the plan was made for weights, prompt"):
        diffshard.elastic.reshard(state["weights"], source, target, argument="zz")
    with pytest.raises(diffshard.PlanError, match="is not on the mesh of `from_plan`: put it there by"):
        diffshard.elastic.reshard(init(jax.random.key(0))["weights"], source, target)
    with pytest.raises(TypeError, match="`to_plan` must be a Plan, not int"):
        diffshard.elastic.reshard(state, source, 3)  # type: ignore[arg-type]
    abstract = generation_plan(AbstractMesh((4,), ("x",)))
    with pytest.raises(diffshard.PlanError, match="is abstract"):
        diffshard.elastic.reshard(state["weights"], source, abstract)
    elsewhere = generation_plan(mesh_of((4,), ("x",), 4)).shard(state["weights"])
    with pytest.raises(diffshard.PlanError, match="on devices that the mesh of `from_plan` does not have"):
        diffshard.elastic.reshard(elsewhere, generation_plan(mesh_of((4,), ("x",))), target)


def test_a_tree_that_fits_two_arguments_has_to_be_named():
    two = [jax.ShapeDtypeStruct((16, 16), "float32")] * 2
    plan = plan_of(lambda actor, critic: actor @ critic, mesh_of((8,), ("data",)), *two)
    with pytest.raises(diffshard.PlanError, match="The tree fits 'actor' and 'critic'; name one by `argument`"):
        plan.init(lambda: jnp.ones((16, 16)))
    assert plan.init(lambda: jnp.ones((16, 16)), argument="critic").shape == (16, 16)


def test_a_state_of_other_shapes_is_refused_before_it_is_made():
    plan = training_plan(mesh_of((8,), ("data",)))
    with pytest.raises(diffshard.PlanError, match=r"The tree is no argument of train_step\. It is not `state`"):
        plan.init(lambda key: init(key)["weights"], jax.random.key(0))

"""Plans for programs split what has a form on one device's part, and say what has none."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import diffshard


def mesh():
    return jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


def test_transforms_of_rows_are_split_by_rows():
    def convolve(x, y):
        return jnp.fft.irfft(jnp.fft.rfft(x) * jnp.fft.rfft(y))

    x, y = jax.random.normal(jax.random.key(0), (2, 64, 128))
    planned = diffshard.search(convolve, mesh(), hardware="h100", in_shardings=(P("data"), P("data")))
    plan = planned.plan(x, y)
    transforms = [o for o in plan.operations if o.signature.startswith("fft")]
    assert plan.executor == "program"
    assert [o.operands[0] for o in transforms] == [(("data",), (), ())[: x.ndim]] * 3
    np.testing.assert_allclose(planned(*plan.shard(x, y)), jax.jit(convolve)(x, y), rtol=1e-5, atol=1e-4)


def test_a_plan_names_what_could_be_split_but_has_no_form_on_parts():
    def noise(x):
        return x + jax.random.uniform(jax.random.key(0, impl="rbg"), x.shape)

    x = jax.ShapeDtypeStruct((64, 128), jnp.float32)
    (note,) = diffshard.search(noise, mesh(), hardware="h100").plan(x).notes
    assert note.startswith("random_bits runs whole on every device")
    assert diffshard.search(noise, mesh(), hardware="h100", executor="constraints").plan(x).notes == ()
    small = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    assert diffshard.search(noise, mesh(), hardware="h100").plan(small).notes == ()


def test_a_plan_names_large_operations_of_which_nothing_can_be_split():
    def sampled(key, x):
        return x * jax.random.gamma(key, jnp.full(x.shape, 2.0))

    def notes_for(*shape):
        x = jax.ShapeDtypeStruct(shape, jnp.float32)
        return diffshard.search(sampled, mesh(), hardware="h100").plan(jax.random.key(0), x).notes

    (note,) = notes_for(512, 128)
    assert note.startswith("random_gamma runs whole on every device (1x,")
    assert f"{__file__}:" in note, "the equation is in a function of JAX: the line that calls it is named"
    assert notes_for(64, 128) == ()


def test_depthwise_convolutions_and_their_gradients_are_split_by_channels():
    def step(w, x):
        def loss(w):
            numbers = ("NHWC", "HWIO", "NHWC")
            y = jax.lax.conv_general_dilated(
                x, w, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=w.shape[-1]
            )
            return (y**2).mean()

        return w - jax.grad(loss)(w)

    w, x = jnp.ones((3, 3, 1, 16)), jax.random.normal(jax.random.key(0), (8, 16, 16, 16))
    planned = diffshard.search(step, mesh(), hardware="h100", in_shardings=(None, P(None, None, None, "data")))
    plan = planned.plan(w, x)
    convolutions = [o for o in plan.operations if o.signature.startswith("conv")]
    assert (plan.executor, plan.notes) == ("program", ())
    assert [o.operands[0] for o in convolutions] == [((), (), (), ("data",))] * 2
    np.testing.assert_allclose(planned(*plan.shard(w, x)), jax.jit(step)(w, x), rtol=1e-5, atol=1e-6)


def test_an_array_without_elements_is_gathered_without_a_collective():
    def scaled(x):
        return 2 * x @ jnp.ones((8, 4))

    x = jnp.zeros((0, 8))
    planned = diffshard.search(scaled, mesh(), hardware="h100", in_shardings=P("data"))
    plan = planned.plan(x)
    assert plan.executor == "program"
    assert planned(plan.shard(x)).shape == (0, 4)

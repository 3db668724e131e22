"""A function's callbacks are called once, by one device, whatever runs the planned function."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.sharding import AxisType

import diffshard


def mesh():
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


@pytest.mark.parametrize("executor", ["program", "constraints"])
def test_debug_callbacks_are_called_once(executor):
    seen = []

    def step(x):
        y = jnp.tanh(x)
        jax.debug.callback(lambda a: seen.append(a.shape), y)
        lax.cond(y[0, 0] < 1, lambda: jax.debug.callback(lambda: seen.append("branch")), lambda: None)
        return y @ y

    planned = diffshard.search(step, mesh(), hardware="h100", executor=executor)
    jax.block_until_ready(planned(jnp.ones((64, 64))))
    jax.effects_barrier()
    assert sorted(map(str, seen)) == ["(64, 64)", "branch"]


def test_a_callback_with_results_is_left_to_the_partitioner():
    seen = []

    def step(x):
        return x * io_callback(lambda a: (seen.append(1), a)[1], jax.ShapeDtypeStruct((), jnp.float32), x[0, 0])

    planned, x = diffshard.search(step, mesh(), hardware="h100"), jnp.ones((64, 64))
    plan = planned.plan(x)
    assert plan.executor == "constraints"
    assert any("io_callback" in note and "has no form" in note for note in plan.notes)
    jax.block_until_ready(planned(x))
    assert len(seen) == 1
    with pytest.raises(ValueError, match="io_callback"):
        diffshard.search(step, mesh(), hardware="h100", executor="program")(x)

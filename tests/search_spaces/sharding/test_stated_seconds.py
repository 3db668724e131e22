"""A `shard_map` that states its seconds is priced by them, and so is its backward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from search_spaces.sharding.own_collectives import stated_seconds, stating_seconds


def test_a_gradient_states_the_seconds_of_the_way_back_and_numbers_stay():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])

    def squares(x):
        return stating_seconds(x * x, 2.0, 3.0), stating_seconds(x, 0.5)

    mapped = jax.shard_map(squares, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    plain = jax.shard_map(jnp.sin, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)

    def loss(x):
        return sum(y.sum() for y in mapped(plain(x)))

    equations = jax.make_jaxpr(jax.value_and_grad(loss))(jnp.ones(8)).eqns
    stated = [s for s in map(stated_seconds, equations) if s is not None]
    assert stated == [pytest.approx(2.5), pytest.approx(3.0)]
    x = np.linspace(0, 1, 8).astype(np.float32)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(x), (2 * np.sin(x) + 1) * np.cos(x), rtol=1e-5)
    np.testing.assert_allclose(jax.vmap(lambda y: stating_seconds(y, 1.0))(x), x)

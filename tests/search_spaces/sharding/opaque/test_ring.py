"""Attention whose queries and keys are split over their sequence: equal results, its price, when it is chosen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from search_spaces.sharding.opaque.cudnn import BACKWARD, FORWARD, planned_without_cudnn
from tests.search_spaces.sharding.small_spaces import array, space_of


def step(implementation, **options):
    """Attention's output and the gradients of a weighted sum of it."""

    def run(q, k, v, weights):
        def loss(q, k, v):
            out = jax.nn.dot_product_attention(q, k, v, implementation=implementation, **options)
            return (out.astype(jnp.float32) * weights.astype(jnp.float32)).sum(), out

        gradients, out = jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
        return out, *gradients

    return run


def avals(length, batch=2, heads=4, kv_heads=2, width=8):
    shapes = [(batch, length, n, width) for n in (heads, kv_heads, kv_heads, heads)]
    return [array(*shape, dtype=jnp.float16) for shape in shapes]


def calls(space):
    return [v for v in space.graph.operations() if v.primitive in (FORWARD, BACKWARD)]


def choice_of(space, axis, key_axes):
    """A choice that splits nothing but the sequence in attention: of queries along an axis, of keys along others."""
    choice = [0] * len(space.nodes)
    for vertex in calls(space):
        wanted = ((), (axis,), (), ()), ((), key_axes, (), ())
        strategies = enumerate(space.nodes[vertex.index].strategies)
        choice[vertex.index] = next(i for i, s in strategies if s.operands[:2] == wanted)
    return choice


@pytest.mark.parametrize("executor", ["device_program", "execution"])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=["all", "causal"])
@pytest.mark.parametrize("keys", ["ring", "whole keys"])
@pytest.mark.parametrize(("sizes", "axis"), [((2, 4), 0), ((2, 4), 1)], ids=["2 devices", "4 devices"])
def test_parts_of_a_sequence_give_what_one_device_gives(options, keys, sizes, axis, executor):
    with planned_without_cudnn():
        space = space_of(step("cudnn", **options), *avals(32), sizes=sizes)
    choice = choice_of(space, axis, (axis,) if keys == "ring" else ())
    mesh = jax.make_mesh(sizes, ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    program = getattr(space, executor)(space.layout(choice), mesh)
    seeds = jax.random.split(jax.random.key(0), 4)
    arrays = [jax.random.normal(seed, x.shape, x.dtype) for seed, x in zip(seeds, avals(32), strict=True)]
    exact = jax.jit(step("xla", **options))(*(x.astype(jnp.float32) for x in arrays))
    for result, expected in zip(jax.jit(program)(*arrays), exact, strict=True):
        np.testing.assert_allclose(result.astype(jnp.float32), expected, atol=4e-3, rtol=4e-3)

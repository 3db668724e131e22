"""A Megatron block on 2 x 4 devices: the first matrix split by columns, the second by rows."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

SHAPES = ((32, 64), (64, 32), (16, 32))
"""The shapes of the two matrices and of the batch."""


def block_mesh() -> Mesh:
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def block(w, v, x):
    return jnp.tanh(x @ w) @ v


def parallel_block(mesh: Mesh):
    """The block under `jit`: `w` split by columns, `v` by rows, the batch over "data"."""
    specs = (P(None, "model"), P("model"), P("data"))
    place = functools.partial(jax.tree.map, lambda spec: NamedSharding(mesh, spec))
    return jax.jit(block, in_shardings=place(specs), out_shardings=place(P("data")))

"""Runs a function by a layout drawn at random, and compares the results with those of one device."""

import dataclasses

import jax
import numpy as np
from jax.sharding import AxisType

from cost.base import num_strategies
from tests.search_spaces.sharding.small_spaces import array, space_of

AXES = ("x", "y")


def check_layout(fn, arguments, seed, executor, sizes=(2, 4), tolerance=2e-4):
    """Asserts that a random layout computes what the function computes; the executor is a method of the space."""
    leaves, structure = jax.tree.flatten(arguments)
    avals = jax.tree.unflatten(structure, [array(*x.shape, dtype=x.dtype) for x in leaves])
    space = space_of(fn, *avals, sizes=sizes)
    if executor == "device_program":
        space = dataclasses.replace(space, as_program=True)
    mesh = jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(sizes))
    choice = np.random.default_rng(seed).integers(num_strategies(space.problem)).tolist()
    program = getattr(space, executor)(space.layout(choice), mesh)
    results = jax.jit(program)(*leaves)
    for a, b in zip(results, jax.tree.leaves(jax.jit(fn)(*arguments)), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance / 10)


def strategies_of(name, fn, *avals, sizes=(2, 4)):
    """The space of a function, and its operations of a primitive with their strategies."""
    space = space_of(fn, *avals, sizes=sizes)
    return space, [(v, space.nodes[v.index].strategies) for v in space.graph.operations() if v.primitive == name]


def split_dimensions(strategies, operand=0):
    """The dimensions of an operand that some strategy splits."""
    return {d for s in strategies for d, axes in enumerate(s.operands[operand]) if axes}

"""The simulation of a mesh beside a computation by hand of what each device has, for all ways to split an array."""

import itertools

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from search_spaces.communication.simulated_spmd import simulate

AXES = {"x": 2, "y": 3, "z": 2}
SHAPE = (12, 24)


def all_specs():
    """Every assignment of mesh axes to the dimensions, in every order."""
    for count in range(len(AXES) + 1):
        for axes in itertools.permutations(AXES, count):
            for cut in range(count + 1):
                yield P(axes[:cut] or None, axes[cut:] or None)


def blocks(spec):
    """For each device, by its index along each axis: the slices of the array that it has."""
    for index in itertools.product(*map(range, AXES.values())):
        at, slices = dict(zip(AXES, index, strict=True)), []
        for size, axes in zip(SHAPE, spec, strict=True):
            block, num_blocks = 0, 1
            for axis in axes or ():
                block, num_blocks = block * AXES[axis] + at[axis], num_blocks * AXES[axis]
            length = size // num_blocks
            slices.append(slice(block * length, (block + 1) * length))
        yield at, tuple(slices)


def used_axes(spec):
    return tuple(axis for axes in spec for axis in axes or ())


def test_every_device_has_its_block_of_an_array():
    x = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)
    specs = list(all_specs())
    assert len(specs) == 1 + 6 + 18 + 24
    for spec in [*specs[:-24:3], *specs[-24::2]]:
        used = used_axes(spec)

        def number_of_device(used=used):
            return sum((1000 * 10**i * lax.axis_index(axis) for i, axis in enumerate(AXES) if axis in used), start=0)

        def fn(block, used=used, number_of_device=number_of_device):
            return block + number_of_device(), (lax.psum(block.sum(), used) if used else block.sum())

        marked, total = jax.jit(simulate(fn, AXES, (spec,), (spec, P())))(x)
        expected = np.zeros(SHAPE)
        for at, slices in blocks(spec):
            number = sum(1000 * 10**i * at[axis] for i, axis in enumerate(AXES) if axis in used)
            expected[slices] = x[slices] + number
        np.testing.assert_array_equal(marked, expected, err_msg=str(spec))
        assert total == x.sum(), spec


def test_results_of_axes_that_do_not_split_them_are_the_first_devices():
    def fn(block):
        return block + 10 * lax.axis_index("y") + 100 * lax.axis_index("x")

    x = np.zeros(6, np.float32)
    run = simulate(fn, AXES, (P("y"),), P("y"))  # "x" and "z" do not split: their devices of index 0 count
    np.testing.assert_array_equal(run(x), np.repeat([0, 10, 20], 2))
    run = simulate(fn, AXES, (P(),), P(("x", "y")))
    firsts = [0, 10, 20, 100, 110, 120]
    np.testing.assert_array_equal(run(np.zeros(1, np.float32)), firsts)


def test_specs_may_be_prefixes_of_arguments_and_results():
    tree = {"a": np.arange(4.0, dtype=np.float32), "b": [np.arange(8.0, dtype=np.float32)]}
    run = simulate(
        lambda tree, n: jax.tree.map(lambda leaf: leaf * n + lax.axis_index("z"), tree), AXES, (P("z"), P()), P("z")
    )
    found = run(tree, 3.0)
    np.testing.assert_array_equal(found["a"], 3 * tree["a"] + [0, 0, 1, 1])
    np.testing.assert_array_equal(found["b"][0], 3 * tree["b"][0] + np.repeat([0, 1], 4))


def test_gathers_along_axes_join_blocks_in_the_order_of_the_spec():
    x = np.arange(12.0, dtype=np.float32)
    for axes in itertools.permutations(AXES):

        def fn(block, axes=axes):
            for axis in reversed(axes):  # the last axis splits the finest
                block = lax.all_gather(block, axis, tiled=True)
            return block

        np.testing.assert_array_equal(simulate(fn, AXES, (P(axes),), P())(x), x)

"""Layouts by constraints compute what one device computes also where XLA's partitioner would not."""

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType

from search_spaces.sharding.custom_calls.operations import runs_on_parts
from tests.search_spaces.sharding.small_spaces import array, space_of
from tests.search_spaces.sharding.test_device_program import at_random, numbers

SIZES = (2, 4)


def convolved(**groups):
    return lambda x, w: lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), **groups
    )


GROUPED = {
    "groups of features": (convolved(feature_group_count=2), (array(8, 4, 4, 16), array(3, 3, 8, 32))),
    "groups of the batch": (convolved(batch_group_count=4), (array(8, 4, 4, 8), array(3, 3, 8, 16))),
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", GROUPED)
def test_random_layouts_of_grouped_convolutions(name, seed):
    fn, avals = GROUPED[name]
    arrays = [numbers(aval, i) for i, aval in enumerate(avals)]
    space = space_of(fn, *avals, sizes=SIZES)
    mesh = jax.make_mesh(SIZES, ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    run = space.execution(space.layout(at_random(seed)(space)), mesh)
    np.testing.assert_allclose(jax.jit(run)(*arrays)[0], fn(*arrays), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("groups", [{}, {"feature_group_count": 2}, {"batch_group_count": 2}], ids=str)
def test_only_convolutions_with_groups_are_kept_from_the_partitioner(groups):
    features = 8 // groups.get("feature_group_count", 1)
    space = space_of(convolved(**groups), array(8, 4, 4, 8), array(3, 3, features, 16))
    (convolution,) = (v for v in space.graph.operations() if v.primitive == "conv_general_dilated")
    assert runs_on_parts(convolution) == bool(groups)
    assert any(strategy.parts == 4 for strategy in space.nodes[convolution.index].strategies)

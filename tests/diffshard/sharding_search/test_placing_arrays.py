"""What is given in place of a plan's arrays is told apart in every way in which it can differ."""

import itertools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from diffshard.base import PlanError
from diffshard.plans.base import Tensor
from diffshard.sharding_search.placing_arrays import (
    check_arrays,
    parameter_of,
    path_inside,
    place_local,
    place_whole,
)

TENSORS = (
    Tensor("state['w']", (8, 4), "float32", (("data",), ())),
    Tensor("state['b'][0]", (4,), "int32", ((),)),
)
SHAPES, DTYPES, INSIDE = ((8, 4), (4, 8), (8,)), ("float32", "bfloat16", "int32"), ("['w']", "['v']", ".w")


@pytest.mark.parametrize("parameter", ["state", "params_2"])  # another function may name its argument otherwise
@pytest.mark.parametrize(("shape", "dtype", "inside"), list(itertools.product(SHAPES, DTYPES, INSIDE)))
def test_only_arrays_of_the_same_shape_type_and_place_are_taken(shape, dtype, inside, parameter):
    given = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct((4,), "int32")
    paths = f"{parameter}{inside}", f"{parameter}['b'][0]"
    is_alike = (shape, dtype) == (TENSORS[0].shape, TENSORS[0].dtype)
    if is_alike and inside == "['w']":
        check_arrays(TENSORS, paths, given)
        return
    with pytest.raises(PlanError) as error:
        check_arrays(TENSORS, paths, given)
    said = str(error.value)
    assert (
        f"made for `state['w']` of float32[8, 4], and was given `{parameter}{inside}` of {dtype}{list(shape)}." in said
    )
    assert ("Its place differs" in said) == is_alike
    assert ("Search again" in said) != is_alike


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("place", [place_whole, place_local])
def test_another_number_of_arrays_is_refused(count, place):
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    arrays = [np.zeros((8, 4), np.float32), np.zeros(4, np.int32), np.zeros(4, np.int32)][:count]
    with pytest.raises(PlanError, match=rf"made for 2 arrays in (its arguments|this argument), not {count}\."):
        place(TENSORS, ["state['w']", "state['b'][0]", "state['c']"][:count], arrays, mesh, True)


@pytest.mark.parametrize("place", [place_whole, place_local])
def test_arrays_are_placed_as_the_plan_splits_them(place):
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    arrays = [np.arange(32, dtype=np.float32).reshape(8, 4), np.arange(4, dtype=np.int32)]
    placed = place(TENSORS, ["x['w']", "x['b'][0]"], arrays, mesh, True)
    for array, given, tensor in zip(placed, arrays, TENSORS, strict=True):
        np.testing.assert_array_equal(array, given)
        assert array.sharding.spec == tensor.partition_spec
        assert array.sharding.mesh == mesh
    with pytest.raises(PlanError, match=r"`x\['w'\]`.*float16\[8, 4\]"):
        place(TENSORS, ["x['w']", "x['b'][0]"], [arrays[0].astype(np.float16), arrays[1]], mesh, True)
    with pytest.raises(PlanError, match=r"`x\['v'\]`"):
        place(TENSORS, ["x['v']", "x['b'][0]"], arrays, mesh, True)


def test_a_path_is_an_argument_and_a_place_inside():
    assert [parameter_of(tensor) for tensor in TENSORS] == ["state", "state"]
    assert [path_inside(path) for path in ("x", "x.y", "x[0]['a']", "opt_2['x'].y")] == [
        "",
        ".y",
        "[0]['a']",
        "['x'].y",
    ]

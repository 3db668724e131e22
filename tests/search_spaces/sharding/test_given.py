"""What is fixed about a sharding: specs as axis indices, and the specs that arrays carry."""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from search_spaces.sharding.given import carried_spec, dimensions_of, fits, given_dimensions, given_specs


def host_mesh(names=("x", "y"), first=0):
    devices = jax.devices()[first : first + 4]
    return jax.make_mesh((2, 2), names, axis_types=(AxisType.Auto,) * 2, devices=devices)


def test_axes_of_one_device_split_nothing():
    names, sizes = ("x", "one", "y"), (2, 1, 4)
    assert dimensions_of(P(("y", "one", "x")), 2, names, sizes, "an array") == [(2, 0), ()]
    assert dimensions_of(P("x", "one"), 3, names, sizes, "an array") == [(0,), (), ()]
    assert dimensions_of(P(P.UNCONSTRAINED, "y"), 2, names, sizes, "an array") == [None, (2,)]
    mesh = AbstractMesh((2, 1), ("x", "one"))
    arrays = [jax.ShapeDtypeStruct((4, 3), jnp.float32)] * 2
    assert given_dimensions([P("x", "one"), None], arrays, ["a", "b"], mesh) == {0: [(0,), ()]}


def test_a_spec_fits_what_is_given_where_that_is_not_free():
    assert fits(((0,), (1,)), [(0,), None])
    assert not fits(((0,), (1,)), [(1,), None])
    assert not fits(((0, 1), ()), [(1, 0), ()])


def test_an_array_carries_its_spec_on_the_mesh_where_it_has_been_put():
    mesh, spec = host_mesh(), P(None, "x")
    array = jax.device_put(jnp.zeros((4, 4)), NamedSharding(mesh, spec))
    assert carried_spec(array, mesh) == spec
    assert carried_spec(array, AbstractMesh((2, 2), ("x", "y"))) == spec
    assert carried_spec(array, host_mesh(("y", "x"))) is None
    assert carried_spec(array, host_mesh(first=4)) is None
    assert carried_spec(jnp.zeros((4, 4)), mesh) is None
    # What JAX has put somewhere by itself it may move, and so may a plan.
    assert carried_spec(SimpleNamespace(sharding=array.sharding, committed=False), mesh) is None
    assert carried_spec(jax.ShapeDtypeStruct((4, 4), jnp.float32, sharding=array.sharding), mesh) == spec


@pytest.mark.parametrize(
    ("in_shardings", "path", "own", "there"),
    [
        (({"w": P(), "v": P()}, None), "[0]", "a dict with ['v'], ['w']", "a dict with ['b'], ['w']"),
        (([P(), P()], None), "[0]", "a list with [0], [1]", "a dict with ['b'], ['w']"),
        (({"b": P(), "w": (P(), None)}, None), "[0]['w']", "a tuple with [0], [1]", "one array"),
        ((None, (None, ())), "[1][1]", "a tuple with nothing", "a list with [0]"),
    ],
)
def test_entries_that_are_not_those_of_the_arguments_are_named_by_their_place(in_shardings, path, own, there):
    message = f"`in_shardings{path}` is {own}, where the arguments have {there}. Give an entry for each part"
    with pytest.raises(ValueError, match=re.escape(message)):
        given_specs(in_shardings, ({"b": 1.0, "w": 2.0}, (3.0, [4.0])))

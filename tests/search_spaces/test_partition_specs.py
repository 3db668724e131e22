"""Specs as JAX writes them and as plain tuples."""

import pytest
from jax.sharding import PartitionSpec

from search_spaces.partition_specs import (
    axes_of,
    broadcast_specs,
    checked_axes_of,
    constrained_axes_of,
    indexed_spec,
    named_spec,
    partition_spec,
    split_shape,
)


@pytest.mark.parametrize(
    ("written", "axes"),
    [
        (PartitionSpec(), [(), ()]),
        (PartitionSpec("data"), [("data",), ()]),
        (PartitionSpec(None, "model"), [(), ("model",)]),
        (PartitionSpec(("data", "model"), None), [("data", "model"), ()]),
    ],
)
def test_every_dimension_lists_its_axes(written, axes):
    assert axes_of(written, 2) == axes
    assert axes_of(partition_spec(tuple(axes)), 2) == axes


def test_unconstrained_dimensions_are_free_or_refused():
    spec = PartitionSpec("data", PartitionSpec.UNCONSTRAINED)
    assert constrained_axes_of(spec, 3) == [("data",), None, ()]
    with pytest.raises(ValueError, match=r"`spec` .* leaves dimension 1 unconstrained"):
        axes_of(spec, 3)


def test_names_and_indices_of_axes_are_two_spellings():
    names = ("data", "model")
    assert named_spec(((1, 0), ()), names) == (("model", "data"), ())
    assert indexed_spec((("model", "data"), ()), names) == ((1, 0), ())


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (PartitionSpec("data", None, None), r"`x` is .* with 3 dimensions, but the array has 2"),
        (PartitionSpec("rows"), r"`x` has an axis 'rows'; use axes of the mesh: \('data', 'model'\)"),
        (PartitionSpec("data", ("model", "data")), r"`x` is .* 'data' splits two"),
    ],
)
def test_a_spec_must_fit_its_array_and_its_mesh(spec, message):
    with pytest.raises(ValueError, match=message):
        checked_axes_of(spec, 2, ("data", "model"), "`x`")


def test_a_dimension_is_split_evenly_or_refused():
    mesh_axes = {"data": 2, "model": 4}
    assert split_shape((6, 8, 5), (("data",), ("model", "data"), None), mesh_axes, "`x`") == (3, 1, 5)
    with pytest.raises(ValueError, match=r"Dimension 1 of `x` is 6, which \('model',\) of 4 devices do not divide"):
        split_shape((6, 6), ((), ("model",)), mesh_axes, "`x`")


def test_a_prefix_gives_its_spec_to_every_leaf_below():
    spec, tree = PartitionSpec("data"), {"a": 1.0, "b": (2.0, 3.0)}
    assert broadcast_specs({"a": PartitionSpec(), "b": spec}, tree) == [PartitionSpec(), spec, spec]
    with_none = broadcast_specs((spec, None), (1.0, tree), lambda x: x is None or isinstance(x, PartitionSpec))
    assert with_none == [spec, None, None, None]
    with pytest.raises(ValueError, match=r"key|'c'"):
        broadcast_specs({"a": spec, "c": spec}, tree)

"""Specs as JAX writes them and as plain tuples."""

import pytest
from jax.sharding import PartitionSpec

from search_spaces.partition_specs import axes_of, constrained_axes_of, indexed_spec, named_spec, partition_spec


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

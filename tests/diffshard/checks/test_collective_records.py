"""Groups of devices as mesh axes, and the two ways to write the same communication."""

import itertools

import numpy as np
import pytest

from cost.collectives import collective_sent_bytes
from diffshard.checks.collectives import (
    CollectiveRecord,
    axes_of_groups,
    axes_of_pairs,
    bits_of_dtype,
    split_by_axis,
    with_reduce_scatters,
)

MESH = {"pod": 2, "data": 3, "model": 4}


@pytest.mark.parametrize("axes", [c for n in range(1, 4) for c in itertools.combinations(MESH, n)])
def test_groups_along_axes_are_recognised_in_any_order(axes):
    devices = np.arange(24).reshape(2, 3, 4)
    places = [list(MESH).index(axis) for axis in axes]
    size = int(np.prod([MESH[axis] for axis in axes]))
    groups = np.moveaxis(devices, places, range(-len(axes), 0)).reshape(-1, size)
    rng = np.random.default_rng(0)
    assert axes_of_groups(rng.permutation(rng.permuted(groups, axis=1)).tolist(), MESH) == axes


def test_a_part_of_an_axis_counts_as_the_axis():
    assert axes_of_groups([[0, 1], [2, 3]], {"model": 4}) == ("model",)
    assert axes_of_groups([[0, 2], [1, 3]], {"model": 4}) == ("model",)


def test_groups_along_no_axes_span_all():
    assert axes_of_groups([[0, 3], [1, 2]], {"data": 2, "one": 1, "model": 2}) == ("data", "model")


def test_a_permutation_belongs_to_the_axes_that_differ():
    mesh = {"data": 2, "model": 4}
    assert axes_of_pairs([(0, 1), (1, 2), (4, 5)], mesh) == ("model",)
    assert axes_of_pairs([(0, 4), (4, 0), (1, 1)], mesh) == ("data",)
    assert axes_of_pairs([(0, 5)], mesh) == ("data", "model")


def test_an_all_reduce_that_is_sliced_at_once_is_a_reduce_scatter():
    reduced = CollectiveRecord(
        "all_reduce", ("data", "model"), 8, 800.0, "f32", sliced_axes=("model",), sliced_bytes=600.0
    )
    assert with_reduce_scatters([reduced], {"data": 2, "model": 4}) == [
        CollectiveRecord("all_reduce", ("data", "model"), 8, 200.0, "f32"),
        CollectiveRecord("reduce_scatter", ("model",), 4, 600.0, "f32"),
        CollectiveRecord("all_reduce", ("data",), 2, 150.0, "f32"),
    ]


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_split_by_axis_sends_as_many_bytes(kind):
    whole = CollectiveRecord(kind, ("pod", "data", "model"), 24, 2400.0, "f32")
    parts = split_by_axis([whole], MESH)
    assert [part.axes for part in parts] == [("model",), ("data",), ("pod",)]
    sent = sum(float(collective_sent_bytes(kind, part.num_bytes, part.num_devices)) for part in parts)
    assert sent == pytest.approx(float(collective_sent_bytes(kind, 2400.0, 24)))


def test_split_by_axis_reduces_on_the_first_axis_what_the_last_has_scattered():
    parts = split_by_axis([CollectiveRecord("all_reduce", ("pod", "model"), 8, 80.0, "f32")], MESH)
    assert [(part.axes, part.num_devices, part.num_bytes) for part in parts] == [
        (("model",), 4, 80.0),
        (("pod",), 2, 20.0),
    ]
    sent = sum(float(collective_sent_bytes("all_reduce", part.num_bytes, part.num_devices)) for part in parts)
    assert sent == pytest.approx(2 * 80.0 * 7 / 8)


def test_bits_of_both_dialects_dtypes():
    names = ["f32", "bf16", "i1", "pred", "ui32", "s8", "f8E4M3FN", "f8e5m2", "c64", "complex<f32>", "i64", "u4"]
    assert [bits_of_dtype(name) for name in names] == [32, 16, 8, 8, 32, 8, 8, 8, 64, 64, 64, 4]

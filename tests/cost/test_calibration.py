"""A real measurement of simulated devices."""

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from cost.base import COLLECTIVE_KINDS
from cost.calibration import calibrate, collective_on_blocks
from cost.collectives import collective_s


def test_measures_every_axis_of_a_mesh():
    if len(jax.devices()) < 4:
        pytest.skip("needs 4 devices")
    axes = {"data": 2, "model": 2, "one": 1}
    mesh = jax.make_mesh((2, 2, 1), tuple(axes), devices=jax.devices()[:4], axis_types=(AxisType.Auto,) * 3)
    result = calibrate(mesh, dtypes=("float32",), matrix_size=64, largest_bytes=2**16, repeats=3)
    assert set(result.links) == set(axes)
    assert result.peak_flops_per_s("float32") > 1e6
    assert result.memory_bytes_per_s > 1e5
    assert result.link("one").latency_s == result.link("one").s_per_byte == 0
    for axis in ("data", "model"):
        assert 1e-7 < result.link(axis).latency_s + 2**16 * result.link(axis).s_per_byte < 10
        assert set(result.link(axis).by_kind) == set(COLLECTIVE_KINDS)
        for kind in COLLECTIVE_KINDS:
            assert 1e-7 < collective_s(kind, 2**16, 2, result.link(axis)) < 10


def test_what_is_measured_is_the_collective_of_that_name():
    if len(jax.devices()) < 4:
        pytest.skip("needs 4 devices")
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4], axis_types=(AxisType.Auto,))
    blocks = np.arange(4.0 * 4 * 3).reshape(4, 4, 3)  # [devices, rows, columns]
    expected = {
        "all_gather": np.broadcast_to(blocks.reshape(16, 3), (4, 16, 3)),
        "all_reduce": np.broadcast_to(blocks.sum(0), (4, 4, 3)),
        "reduce_scatter": blocks.sum(0)[:, None],
        "all_to_all": blocks.transpose(1, 0, 2),
        "collective_permute": np.roll(blocks, 1, axis=0),
    }
    for kind in COLLECTIVE_KINDS:
        np.testing.assert_array_equal(jax.jit(collective_on_blocks(mesh, "x", kind))(blocks), expected[kind])


def test_the_least_size_is_enough_for_the_longest_axis():
    if len(jax.devices()) < 8:
        pytest.skip("needs 8 devices")
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    link = calibrate(mesh, dtypes=("float32",), matrix_size=8, largest_bytes=2**14, repeats=1).link("x")
    assert link.latency_s + 2**14 * link.s_per_byte > 0
    with pytest.raises(ValueError, match="`largest_bytes` must be at least 16384, not 16383"):
        calibrate(mesh, largest_bytes=2**14 - 1)


def test_abstract_meshes_and_tiny_sizes_are_refused():
    with pytest.raises(ValueError, match="`mesh` must hold real devices"):
        calibrate(AbstractMesh((2,), ("x",)))  # type: ignore[arg-type]
    mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1], axis_types=(AxisType.Auto,))
    with pytest.raises(ValueError, match="`repeats` must be at least 1, not 0"):
        calibrate(mesh, repeats=0)

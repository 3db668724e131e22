"""The fit on made-up times, and a real measurement of emulated devices."""

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from cost.calibration import calibrate, fit_latency_and_slope


def test_fit_finds_latency_and_slope_from_exact_points():
    x = 4.0 ** np.arange(3, 14)
    np.testing.assert_allclose(fit_latency_and_slope(x, 2e-5 + 3e-9 * x), (2e-5, 3e-9), rtol=1e-6)


def test_fit_is_by_relative_error_so_small_messages_count_and_outliers_do_not():
    rng = np.random.default_rng(0)
    x = 4.0 ** np.arange(3, 14)
    seconds = (2e-5 + 3e-9 * x) * rng.uniform(0.97, 1.03, x.size)
    seconds[4] *= 10
    latency_s, slope = fit_latency_and_slope(x, seconds)
    assert latency_s == pytest.approx(2e-5, rel=0.05)
    assert slope == pytest.approx(3e-9, rel=0.05)
    plain_latency = np.polyfit(x, seconds, 1)[1]
    assert abs(plain_latency / 2e-5 - 1) > 0.2  # what least squares makes of the same points


def test_fit_is_never_negative():
    x = np.array([1.0, 2.0, 4.0])
    assert fit_latency_and_slope(x, np.array([4.0, 2.0, 1.0]))[1] == 0
    latency_s, slope = fit_latency_and_slope(x, np.array([1.0, 4.0, 16.0]))
    assert latency_s == 0
    assert slope > 0


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

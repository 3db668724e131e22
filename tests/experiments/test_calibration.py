"""The links of the V100 preset hold against the profiles, and the whole script runs."""

import gzip
import math

import pytest

from cost.base import Hardware
from experiments import calibration
from experiments.models import gpt, mlp

HEADER = "num_hosts,gpus_per_host,op,dtype,num_groups,group_size,stride,size,seconds"


def test_profiles_leave_out_extrapolated_and_empty_calls(tmp_path):
    # Empty calls up to 8 elements, then measured at 100 µs + 1 ns for each element, then doubled without measuring.
    seconds = [1.7e-5] * 4 + [1e-4 + 1e-9 * 2**i for i in range(4, 24)]
    seconds += [seconds[-1] * 2, seconds[-1] * 4]
    rows = [f"1,8,all_gather,f32,1,8,1,{2**i},{s!r}" for i, s in enumerate(seconds)]
    path = tmp_path / "profiles.csv.gz"
    path.write_bytes(gzip.compress("\n".join([HEADER, *rows]).encode()))
    ((key, points),) = calibration.read_profiles(path).items()
    assert key == (calibration.Ring(1, 8, 1), "all_gather")
    assert points.shape == (20, 2)
    (error,) = calibration.v100_links(path)
    assert error.latency_s == pytest.approx(1e-4, rel=1e-3)
    assert error.bytes_per_s == pytest.approx(4e9 * 7 / 8, rel=1e-3)
    assert error.fit_error[1] < 1e-3


def test_v100_preset_is_near_the_profiles():
    if not calibration.PROFILES.exists():
        pytest.skip(f"{calibration.PROFILES} is missing")
    errors = calibration.v100_links(calibration.PROFILES)
    inside = [e.preset_error[0] for e in errors if e.ring.hosts == 1]
    across = [e.preset_error[0] for e in errors if e.ring.hosts > 1 and e.kind in ("all_gather", "reduce_scatter")]
    assert max(inside) < 0.25
    assert sorted(inside)[len(inside) // 2] < 0.07
    assert max(across) < 0.25


@pytest.mark.parametrize("model", [mlp.make(width=128, batch=256), gpt.make(layers=1)])
def test_predicted_work_is_near_what_xla_compiles(model):
    free = Hardware("free", math.inf, math.inf, math.inf, {})
    work = calibration.whole_step(model, free, repeats=1)
    assert work.flops == pytest.approx(work.compiled_flops, rel=0.15)
    assert work.moved_bytes == pytest.approx(work.compiled_bytes, rel=0.35)
    assert work.unfused_bytes > 1.5 * work.compiled_bytes  # what the rule of fusion is for
    assert work.predicted_s == 0 < work.measured_s


def test_main_prints_every_table(capsys, tmp_path):
    sizes = ["--size", "64", "--matrix-size", "16", "--width", "32", "--repeats", "1", "--models", "wide batch"]
    calibration.main(["--profiles", str(tmp_path / "none"), *sizes])
    out = capsys.readouterr().out
    for expected in ("is missing", "tanh", "this machine: Hardware", "mlp-6"):
        assert expected in out

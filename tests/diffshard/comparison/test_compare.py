"""Plans beside the programs that XLA makes of them, compiled in processes of their own."""

import dataclasses
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import diffshard
from diffshard.checks import targets
from diffshard.checks.kernel_work import achievable_rates
from diffshard.checks.targets import Target
from tests.diffshard.comparison.crashing_target import CrashingTarget
from tests.diffshard.comparison.small_step import BATCH, MESH, STATE, step

ROOT = Path(__file__).resolve().parents[3]


def found_plan(**options):
    return diffshard.search(step, MESH, hardware="h100", donate_argnums=0, **options).plan(STATE, BATCH)


def test_plans_files_and_shardings_side_by_side(tmp_path):
    plan = found_plan(executor="program")
    plan.save(tmp_path / "plan.json")
    by_hand = ({"up": P(None, "model"), "down": P("model", None)}, P("data"))
    plans = {"found": plan, "file": tmp_path / "plan.json", "megatron": by_hand}
    result = diffshard.compare(step, MESH, STATE, BATCH, plans=plans, target="host", donate_argnums=0)
    found, file, megatron = result.rows
    assert (found.executor, megatron.executor) == ("program", "propagation")
    assert file.compiled_sent_bytes == found.compiled_sent_bytes == found.predicted_sent_bytes
    # Gradients of a quarter of both matrices are reduced over "data", activations of half the batch over "model":
    # an all-reduce sends 2 (n - 1) / n of its bytes; two of them, forward and backward, and the loss.
    expected = 2 * (1 / 2) * 2 * (64 * 256 // 4) * 4 + 2 * (3 / 4) * (64 * 64 * 4)
    assert megatron.compiled_sent_bytes == pytest.approx(expected, rel=1e-3)
    # A device holds a quarter of the weights and half the batch; donated weights become the results.
    arguments = 4 * (2 * 64 * 256 // 4 + 64 * 64)
    assert megatron.compiled_peak_bytes is not None
    assert arguments < megatron.compiled_peak_bytes < 4 * arguments
    # The host's backend has no timeline.
    assert result.best is None
    assert {row.timeline_s for row in result.rows} == {None}
    text = str(result)
    assert "compiled for host" in text
    assert "megatron" in text
    assert found.notes == megatron.notes == ()


def test_a_target_with_rates_has_timelines_and_a_best_plan(tmp_path):
    rates = achievable_rates(diffshard.preset("h100", {}))
    target = Target("host with the rates of an H100", rates=rates)
    plans = {"whole": (P(), P()), "split": (P(), P(("data", "model")))}
    result = diffshard.compare(step, MESH, STATE, BATCH, plans=plans, target=target, hardware="h100")
    for row in result.rows:
        assert row.timeline_s is not None
        assert row.computing_s is not None
        assert 0 < row.computing_s <= row.timeline_s
    whole, split = result.rows
    assert (whole.compiled_sent_bytes, whole.predicted_sent_bytes) == (0, 0)
    assert split.compiled_sent_bytes == pytest.approx(2 * 7 / 8 * (2 * 64 * 256 * 4 + 4))
    assert result.best == min(result.rows, key=lambda row: row.timeline_s or 0.0)
    assert result.best is not None
    page = result.html()
    assert page.count("<tr>") == 2  # one for each plan, below the titles
    assert f"{result.best.name} (best)" in page


def test_a_compiler_that_hangs_is_stopped():
    result = diffshard.compare(step, MESH, STATE, BATCH, plans={"found": found_plan()}, target="host", timeout_s=0.01)
    (row,) = result.rows
    assert row.notes == ("The compiler was stopped after 0.01 s.",)
    assert (row.timeline_s, row.compiled_sent_bytes, row.compiled_peak_bytes) == (None, None, None)
    assert row.predicted_s > 0
    assert row.notes[0] in str(result)


def test_a_compiler_that_crashes_or_fails_leaves_a_note(monkeypatch):
    plan = found_plan()
    result = diffshard.compare(step, MESH, STATE, BATCH, plans={"found": plan}, target=CrashingTarget("crashing"))
    assert "crashed with signal 6" in result.rows[0].notes[0]
    monkeypatch.setenv("XLA_FLAGS", "--xla_there_is_no_such_flag=1")
    result = diffshard.compare(step, MESH, STATE, BATCH, plans={"found": plan}, target="host")
    assert "The compiler failed: " in result.rows[0].notes[0]
    assert "xla_there_is_no_such_flag" in result.rows[0].notes[0]


def test_a_plan_above_the_memory_limit_is_marked():
    plan = found_plan()
    limits = {"narrow": 20_000, "wide": 10_000_000}
    plans = {name: dataclasses.replace(plan, memory_limit_bytes=limit) for name, limit in limits.items()}
    narrow, wide = diffshard.compare(step, MESH, STATE, BATCH, plans=plans, target="host").rows
    # An eighth of the state and of the batch, the least that a device can hold, are 20,480 bytes.
    assert narrow.compiled_peak_bytes == wide.compiled_peak_bytes
    assert (narrow.fits, wide.fits) == (False, True)
    assert narrow.notes == ("It does not fit the memory limit of 19.5 KiB.",)
    assert wide.notes == ()


def test_shardings_without_a_plan_that_fits_are_left_out():
    plans = {"found": found_plan(), "whole": (P(), P())}
    result = diffshard.compare(
        step, MESH, STATE, BATCH, plans=plans, target="host", memory_limit_bytes=100_000, timeout_s=0.01
    )
    assert [row.name for row in result.rows] == ["found"]
    assert "whole is left out: `memory_limit_bytes` is 100,000" in result.notes[0]


def test_shardings_are_priced_for_the_hardware_of_the_first_plan_or_the_one_given():
    found = found_plan()
    slower = diffshard.search(step, MESH, hardware="a100", donate_argnums=0).plan(STATE, BATCH)
    by_hand = (P(), P(("data", "model")))

    def predicted_s(hardware):
        return diffshard.search(step, MESH, hardware=hardware, in_shardings=by_hand).plan(STATE, BATCH).step_s

    expected = {name: predicted_s(name) for name in ("h100", "a100", "tpu_v5e")}
    assert len(set(expected.values())) == 3
    in_order = {"by hand": by_hand, "found": found, "slower": slower}
    others = {"slower": slower, "found": found, "by hand": by_hand}
    for plans, hardware, name in [(in_order, None, "h100"), (others, None, "a100"), (in_order, "tpu_v5e", "tpu_v5e")]:
        result = diffshard.compare(
            step, MESH, STATE, BATCH, plans=plans, hardware=hardware, target="host", timeout_s=0.01
        )
        assert [row.name for row in result.rows] == list(plans)
        predicted = {row.name: row.predicted_s for row in result.rows}
        assert predicted["by hand"] == pytest.approx(expected[name]), name
        assert (predicted["found"], predicted["slower"]) == (found.step_s, slower.step_s)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"plans": {}}, ValueError, "`plans` must map"),
        (
            {"plans": {"x": (P(), P())}, "target": "h900", "hardware": "h100"},
            ValueError,
            "`target` must be one of h100",
        ),
        ({"plans": {"x": (P(), P())}, "target": 3, "hardware": "h100"}, TypeError, "`target` must be a name"),
        ({"plans": {"x": (P(), P())}, "hardware": "tpu_v5e"}, ValueError, "`target` must be given"),
        ({"plans": {"x": (P(), P())}}, ValueError, "`hardware` must be given"),
        (
            {"plans": {"x": (P(), P())}, "timeout_s": "9"},
            ValueError,
            "`timeout_s` must be .*of seconds, not '9'",
        ),
    ],
)
def test_bad_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        diffshard.compare(step, MESH, STATE, BATCH, **arguments)


def test_what_is_no_mesh_is_refused():
    with pytest.raises(TypeError, match=r"`mesh` must be a jax.sharding.Mesh or an AbstractMesh, not 8"):
        diffshard.compare(step, 8, STATE, BATCH, plans={"x": (P(), P())}, target="host")  # pyright: ignore[reportArgumentType]


def test_a_plan_for_another_mesh_is_refused():
    other = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
    with pytest.raises(diffshard.PlanError, match=r"has the axes \{'data': 8\}"):
        diffshard.compare(step, other, STATE, BATCH, plans={"found": found_plan()}, target="host")


def test_a_missing_compiler_is_named_with_what_to_install(monkeypatch):
    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"pip install '\.\[gpu-compile\]'` in a clone of diffshard"):
        diffshard.compare(step, MESH, STATE, BATCH, plans={"found": found_plan()})


SCRIPT = """
import diffshard
from jax.sharding import PartitionSpec as P
from tests.diffshard.comparison.small_step import BATCH, MESH, STATE, step

found = diffshard.search(step, MESH, hardware="h100", donate_argnums=0, executor="program").plan(STATE, BATCH)
plans = {"found": found, "batch": (P(), P(("data", "model")))}
result = diffshard.compare(step, MESH, STATE, BATCH, plans=plans)
assert result.target == "H100", result
assert all(row.notes == () and row.timeline_s >= row.computing_s > 0 for row in result.rows), result
assert result.rows[1].timeline_s > result.rows[1].computing_s, result  # it waits for its gradients' reduction
assert result.rows[0].compiled_sent_bytes == result.rows[0].predicted_sent_bytes, result
assert abs(result.rows[1].compiled_sent_bytes / (2 * 7 / 8 * (2 * 64 * 256 * 4 + 4)) - 1) < 0.01, result
"""


@pytest.mark.skipif(importlib.util.find_spec("jax_cuda12_plugin") is None, reason="needs the extra gpu-compile")
def test_plans_compiled_for_h100s():
    # A process of its own: JAX looks for plugins once, when its first backend starts.
    result = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]

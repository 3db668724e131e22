"""The measurement for whoever has GPUs, on 8 host devices: its file, what fails in it, and what it says at the end."""

import sys
from dataclasses import replace

import pytest

from cost.base import Hardware
from experiments.on_gpus import __main__ as on_gpus
from experiments.on_gpus import parts, records, report
from experiments.on_gpus.records import FailedPart, MeasuredHardware, MeasuredProduct, MeasuredRun, RecordsError

SMALL = ["--host-devices", "8", "--size", "small", "--models", "decoder"]
HARDWARE = MeasuredHardware(Hardware("measured", 1e12, 1e11, 1e9, {}), None)


def not_called(job, limit_s):
    raise AssertionError(f"{job['part']} is measured again")


def written(output, *more):
    output.write_text("".join(f"{records.as_line(record)}\n" for record in more), encoding="utf-8")


def test_a_dry_run_says_what_it_would_do_and_does_nothing(tmp_path, capsys):
    output = tmp_path / "records.jsonl"
    assert on_gpus.main(["--dry-run", "--output", str(output), "--plans", "found", "fsdp"], not_called) == 0
    said = capsys.readouterr().out
    assert "8 runs of a training step" in said
    assert "plans: found, fsdp" in said
    assert "at most\n165: a part is stopped after 15 minutes" in said  # 3 + 8 parts
    assert not output.exists()


def test_steps_are_measured_beside_what_is_predicted_and_the_command_goes_on_where_it_was(tmp_path, capsys):
    output = tmp_path / "records.jsonl"
    options = [*SMALL, "--plans", "found", "fsdp", "--output", str(output), "--traces", str(tmp_path / "traces")]
    assert on_gpus.main(options, on_gpus.in_this_process) == 0
    found, by_hand = records.runs_of(records.read(output))
    assert (found.plan, by_hand.plan) == ("found", "fsdp")
    for run in (found, by_hand):
        assert run.predicted_s["calibrated"] > 0
        assert len(run.measured_s) == 2
        assert all(seconds > 0 for seconds in run.measured_s)
        assert run.compiled_peak_bytes is not None
        assert run.trace is not None
    assert found.predicted_s["calibrated"] <= by_hand.predicted_s["calibrated"] * (1 + 1e-6)
    assert found.lower_bound_s is not None
    assert found.lower_bound_s <= found.predicted_s["calibrated"]
    assert found.loss == pytest.approx(by_hand.loss, rel=1e-2)  # bfloat16
    assert "Plan of step on 8 devices" in found.summary
    assert sum(isinstance(record, MeasuredProduct) for record in records.read(output)) == 2
    assert list((tmp_path / "traces" / "decoder_found").rglob("*.xplane.pb"))
    capsys.readouterr()

    assert on_gpus.main(options, not_called) == 0
    again = capsys.readouterr().out
    assert "run of decoder, fsdp: already in" in again
    assert on_gpus.main(["--compare", str(output)], not_called) == 0
    compared = capsys.readouterr().out
    assert compared in again
    assert "8 x cpu (data 2 x model 4)" in compared


def test_a_run_out_of_memory_is_a_row_that_says_so_and_is_tried_again(tmp_path, capsys, monkeypatch):
    output = tmp_path / "records.jsonl"
    environment = parts.environment(parts.Settings(host_devices=8))
    written(output, environment, HARDWARE, MeasuredProduct(8, 8, 8, "float32", 1.0, {}))

    def out_of_memory(*args):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate\n9.1GiB")

    monkeypatch.setattr(parts, "_prepared", out_of_memory)
    options = [*SMALL, "--plans", "fsdp", "megatron", "--output", str(output)]
    assert on_gpus.main(options, on_gpus.in_this_process) == 1
    runs = records.runs_of(records.read(output))
    assert [run.error[:35] for run in runs] == ["RuntimeError: RESOURCE_EXHAUSTED: O"] * 2
    assert [run.measured_s for run in runs] == [(), ()]
    assert "decoder, megatron: RuntimeError: RESOURCE_EXHAUSTED: Out of memory" in capsys.readouterr().out

    def succeeds(job, limit_s):
        yield MeasuredRun("decoder", job["plan"], 8, {"calibrated": 1.0}, measured_s=(2.0,))

    assert on_gpus.main(options, succeeds) == 0
    assert [run.error for run in records.runs_of(records.read(output))] == ["", ""]


def test_without_measured_hardware_runs_are_left_out(tmp_path, capsys):
    def fails(job, limit_s):
        yield on_gpus.failure(job, "no GPU is here")

    output = tmp_path / "records.jsonl"
    assert on_gpus.main([*SMALL, "--plans", "fsdp", "--output", str(output)], fails) == 1
    assert records.read(output) == [
        FailedPart("environment", "no GPU is here"),
        FailedPart("hardware", "no GPU is here"),
    ]
    said = capsys.readouterr().out
    assert "run of decoder, fsdp: left out" in said
    assert "hardware failed: no GPU is here" in said


def test_a_process_that_dies_or_hangs_loses_its_part_only(monkeypatch):
    run = MeasuredRun("decoder", "fsdp", 8, {})
    program = f"import sys; print({parts.MARK + records.as_line(run)!r}, flush=True); "
    job = {"part": "run", "model": "decoder", "plan": "fsdp", "settings": {"host_devices": 8}}

    def of_process(end, limit_s):
        monkeypatch.setattr(on_gpus, "python_command", lambda *words: [sys.executable, "-c", program + end])
        return list(on_gpus.in_a_process(job, limit_s))

    assert of_process("", 60.0) == [run]
    assert of_process("sys.exit('Segmentation fault')", 60.0) == [
        run, replace(run, batch=0, error="the process ended with 1: Segmentation fault"),
    ]  # fmt: skip
    assert of_process("import time; time.sleep(60)", 1.0) == [
        replace(run, batch=0, error="stopped after 0.0166667 minutes")
    ]


def test_a_part_runs_in_a_process_of_its_own():
    job = {"part": "environment", "settings": {"host_devices": 4, "mesh": "4x1"}}
    (record,) = on_gpus.in_a_process(job, 300.0)
    assert isinstance(record, records.Environment)
    assert record.mesh == {"data": 4, "model": 1}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: it is no record"),
        ('{"kind": "tun"}', "line 2: it is no record: 'tun'"),
        ('{"kind": "run", "model": "a", "plan": "b", "batch": 8}', "line 2: it is no record.*predicted_s"),
        ('{"kind": "environment", "format": 2}', "line 2: it has format 2; this version of diffshard reads 1"),
    ],
)
def test_a_file_that_is_none(tmp_path, capsys, line, message):
    output = tmp_path / "records.jsonl"
    output.write_text(f"{records.as_line(HARDWARE)}\n{line}\n", encoding="utf-8")
    with pytest.raises(RecordsError, match=message):
        records.read(output)
    assert on_gpus.main(["--compare", str(output)], not_called) == 1
    assert on_gpus.main(["--compare", str(tmp_path / "missing")], not_called) == 1
    assert "line 2" in capsys.readouterr().err


def test_choices_are_judged_in_measured_seconds():
    def of(plan, predicted, measured, loss=1.0):
        return MeasuredRun("gpt", plan, 8, {"calibrated": predicted}, measured_s=(measured,), loss=loss)

    runs = [of("found", 1.0, 3.0), of("fsdp", 2.0, 2.0), of("megatron", 3.0, 4.0), MeasuredRun("unet", "fsdp", 8, {})]
    # Of three pairs one is in the wrong order: tau is (2 - 1) / 3, and the plan chosen takes 3 s where 2 would do.
    ((model, count, tau, regret, agree),) = report.choices(runs)
    assert (model, count, regret, agree) == ("gpt", 3, 1.5, "yes")
    assert tau == pytest.approx(1 / 3)
    assert report.choices([*runs[:2], of("megatron", 3.0, 4.0, loss=1.1)])[0][4] == "NO"

"""Predictions against compiled programs: what the table and its summary say, by hand, and on a small model."""

import json

import pytest

from diffshard.checks.hlo import MemoryPlan
from diffshard.checks.verify import ComparedBytes, ComparedMemory, Verification
from experiments import truth
from experiments.models import mlp
from experiments.truth import CheckedPlan


def result(rows=(), sent=(), memory=None, in_order_bytes=None):
    verification = Verification(tuple(rows), tuple(sent), memory, num_collectives=3.0)
    return CheckedPlan("gpt", "2x4", "dear", verification, 5.0, in_order_bytes, 0.1, 0.0, 1.0, 2.0)


# Of 1000 bytes predicted a scalar's 8 are less than a hundredth, and compiled they are 9 of 959.
GATHERED = ComparedBytes("all_gather", "data", 600.0, 600.0, 500.0)
REDUCED = ComparedBytes("all_reduce", "model", 392.0, 400.0, 450.0)
SCALAR = ComparedBytes("all_reduce", "data", 8.0, 8.0, 9.0)
# Arguments, outputs and temporaries of 100, 100 and 50 bytes; 80 of the outputs are donated arguments.
MEMORY = ComparedMemory(119.0, MemoryPlan(100, 100, 80, 50))


def test_small_rows_are_left_out_of_the_summary_and_rows_beyond_a_tolerance_are_named(capsys):
    sent = [ComparedBytes("sent", "data", 300.0, 0.0, 250.0), ComparedBytes("sent", "model", 700.0, 0.0, 700.0)]
    found = [result([GATHERED, REDUCED, SCALAR], sent, MEMORY)]
    (kinds, kind_errors, _), (_, axis_errors, _), (_, memory_errors, tolerance) = truth.summary(found)
    assert kinds == "collective bytes by kind and axis"
    assert kind_errors == [
        ("gpt 2x4 dear: all_gather data", pytest.approx(0.2)),
        ("gpt 2x4 dear: all_reduce model", pytest.approx(-58 / 450)),
    ]
    assert [error for _, error in axis_errors] == [pytest.approx(0.2), 0.0]
    assert memory_errors == [("gpt 2x4 dear", pytest.approx(-0.3))]
    assert tolerance == 0.2
    truth.print_summary(found)
    text = capsys.readouterr().out
    assert "beyond 20%, peak memory: gpt 2x4 dear -30.0%" in text
    assert "beyond 10%, collective bytes by kind and axis: gpt 2x4 dear: all_gather data +20.0%" in text
    assert "bytes sent by axis: gpt 2x4 dear: model" not in text


def test_a_row_of_the_table_by_hand():
    sent = [ComparedBytes("sent", "data", 3e6, 2e6, 2e6), ComparedBytes("sent", "model", 2e6, 2e6, 2e6)]
    memory = ComparedMemory(119e6, MemoryPlan(100_000_000, 100_000_000, 80_000_000, 50_000_000))
    cells = truth.cells(result([GATHERED, REDUCED], sent, memory, in_order_bytes=140e6))
    assert dict(zip(truth.COLUMNS[3:7], cells[3:7], strict=True)) == {
        "sent MB: predicted": "5.0", "Shardy": "4.0", "XLA": "4.0", "error": "+25.0%",
    }  # fmt: skip
    assert cells[7:] == ("+20.0% all_gather data", "5 → 3", "119", "170", "-30.0%", "-15.0%")
    assert len(cells) == len(truth.COLUMNS)
    assert truth.cells(result())[3:] == ("0.0", "0.0", "0.0", "+0.0%", "", "5 → 3", "", "", "", "")


def test_what_no_program_has_is_new():
    exchanged = ComparedBytes("all_to_all", "data", 80.0, 0.0, 0.0)
    assert truth.cells(result([exchanged]))[7] == "new all_to_all data"


def test_main_compiles_a_small_model(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(truth.MODELS, "mlp", lambda: mlp.make(layers=2, width=32, batch=64))
    path = tmp_path / "rows.json"
    arguments = ["--target", "host", "--models", "mlp", "--meshes", "2x4", "--hardware", "dear", "-o", str(path)]
    assert truth.main(arguments) == 0
    assert "Predictions against XLA for host" in capsys.readouterr().out
    (row,) = json.loads(path.read_text())
    assert (row["model"], row["mesh"], row["hardware"]) == ("mlp", "2x4", "dear")
    assert row["sent"]
    for sent in row["sent"]:
        assert sent["compiled"] == pytest.approx(sent["predicted"], rel=0.1)
        assert sent["shardy"] == pytest.approx(sent["predicted"], rel=0.1)
    # A device holds an eighth of the state, of weights and of adam's two moments, or all of it; donated, it is aliased.
    weights = 3 * 2 * (32 * 32 + 32) * 4
    memory = row["memory"]
    assert memory["predicted"] > 0
    assert weights / 8 <= memory["aliased"] <= weights + 4
    assert memory["arguments"] >= memory["aliased"]
    assert row["compiled_collectives"] > 0
    assert row["in_order_bytes"] is None

"""The experiment on embedding tables: its tasks, its baselines by hand, and its tables on one small task."""

import dataclasses

import numpy as np
import pytest

from cost.base import Hardware
from experiments.embedding_tables import __main__ as experiment
from experiments.embedding_tables import picture, tasks, tiers, torchrec
from experiments.embedding_tables.baselines import SCORES, beam_s, greedy_s, random_s, whole
from search_spaces.embedding_tables.base import EmbeddingTable, TableDevices
from search_spaces.embedding_tables.prices import piece_bytes
from tests.experiments.printed_tables import printed_rows

DEVICES = TableDevices((Hardware("test", 1e12, 1e9, 1e9, {}),) * 2, (np.inf, np.inf), 1e-9, batch_size=10)


def test_tasks_are_those_of_neuroshard_and_of_mlperf():
    for seed in (0, 1):
        tables, devices = tasks.generated(seed, 12)
        assert 10 <= len(tables) <= 12
        assert {table.dimension for table in tables} <= {4, 8, 16, 32, 64, 128}
        assert sum(piece_bytes(t, t.rows, t.dimension) for t in tables) <= 15.001e9
        assert all(np.diff(table.access or (0, 0)).max() <= 0 for table in tables)  # the first rows are the hot ones
        assert devices.memory_limit_bytes == (4 * 2**30,) * 4
    tables, _ = tasks.mlperf(8)
    assert (len(tables), sum(table.pooling_factor for table in tables)) == (26, 214)
    assert sum(table.rows for table in tables) == 204_184_588


def test_greedy_takes_the_device_of_least_score():
    tables = [EmbeddingTable(f"t{i}", 100, 128, pooling) for i, pooling in enumerate((6.0, 5.0, 4.0, 3.0))]
    parts = [whole(table, i, DEVICES) for i, table in enumerate(tables)]
    by_lookups = greedy_s(tables, DEVICES, SCORES["greedy, lookups"])  # 6 and 3 against 5 and 4
    expected = max(parts[0].forward_s + parts[3].forward_s, parts[1].forward_s + parts[2].forward_s)
    expected += max(parts[0].rest_s + parts[3].rest_s, parts[1].rest_s + parts[2].rest_s)
    assert by_lookups == pytest.approx(expected)
    full = dataclasses.replace(DEVICES, memory_limit_bytes=(parts[0].num_bytes + 0.0, 0.0))
    assert greedy_s(tables, full, SCORES["greedy, size"]) == np.inf
    assert random_s(tables, full, 0) == np.inf
    assert random_s(tables, DEVICES, 0) >= by_lookups


def test_beam_search_splits_what_no_device_should_hold_alone():
    tables = [EmbeddingTable("large", 1000, 256, 20.0), EmbeddingTable("small", 10, 128)]
    assert beam_s(tables, DEVICES, depth=0) == pytest.approx(whole(tables[0], 0, DEVICES).cost_s)
    assert beam_s(tables, DEVICES, depth=2) < 0.6 * beam_s(tables, DEVICES, depth=0)


def test_prints_ratios_to_bounds_and_to_each_other(capsys):
    experiment.main(
        ["--tasks", "1", "--most-tables", "10", "--few-tasks", "1", "--few-tables", "3", "--depth", "1", "--devices"]
    )
    rows = printed_rows(capsys.readouterr().out)
    ways = {row[0]: row for row in rows if len(row) == 8 and "optimal" not in row}
    (few,) = [row for row in rows if len(row) == 8 and "optimal" in row]
    assert float(few[5]) == 1
    assert set(ways) == {"random", *SCORES, *torchrec.WAYS, "beam search", experiment.COLUMNS, experiment.OURS}
    assert float(ways[experiment.OURS][2]) >= 1
    assert float(ways[experiment.OURS][4]) == 1
    assert all(row[2] == "none" or float(row[2]) >= float(ways[experiment.OURS][2]) for row in ways.values())


def test_less_memory_needs_hosts_and_takes_longer(capsys):
    tiers.main(["--devices", "4"])
    text = capsys.readouterr().out
    steps = [float(line.split("│")[4]) for line in text.splitlines() if "with hosts" in line and "fit" not in line]
    assert "does not fit" in text
    assert len(steps) >= 2
    assert steps == sorted(steps)


def test_the_picture_shows_each_device_before_and_after(tmp_path):
    picture.main(["--devices", "4", "--output", str(tmp_path / "devices.png")])
    assert (tmp_path / "devices.png").read_bytes().startswith(b"\x89PNG")
    ways = picture.placements(4, 0)
    of_devices = [part for way in ways.values() for part in (way.forward_s, way.rest_s, way.device_bytes)]
    assert {len(part) for part in of_devices} == {4}
    steps = {name: max(way.forward_s) + max(way.rest_s) for name, way in ways.items()}
    tables, devices = tasks.mlperf(4)
    assert steps["beam search"] == pytest.approx(beam_s(tables, devices))
    assert steps["diffshard"] < steps["beam search"] < steps["greedy, lookups"]
    drawn = picture.figure_of(ways).axes[-1].containers[0].datavalues  # pyright: ignore[reportAttributeAccessIssue]
    np.testing.assert_allclose(drawn * 2**30, ways["diffshard"].device_bytes)

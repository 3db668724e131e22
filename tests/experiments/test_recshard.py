"""Hot rows by counts: shares of accesses by hand, and RecShard's program against brute force."""

import dataclasses
import itertools

import numpy as np
import pytest

from cost.base import Hardware
from diffshard.tables.hot_rows import RowOrder, TableStatistics
from experiments.embedding_tables import recshard
from experiments.embedding_tables.recshard import Task, WholeTablesSpace, generated, judged, program_pieces
from search_spaces.embedding_tables.base import DEVICE, HOST, EmbeddingTable, Piece, TableDevices
from search_spaces.embedding_tables.prices import decoded, piece_bytes
from tests.experiments.printed_tables import printed_rows

HARDWARE = Hardware("test", 1e12, 1e9, 1e9, {}, host_memory_bytes_per_s=1e8)


def devices_with(memory_bytes: float) -> TableDevices:
    return TableDevices((HARDWARE,) * 2, (memory_bytes,) * 2, 1e-9, 100, (1e9,) * 2)


def test_tasks_hide_their_hot_rows():
    task = generated(0, num_tables=3, most_rows=20000)
    for table, law in zip(task.tables, task.laws, strict=True):
        assert law.sum() == pytest.approx(1)
        assert np.argmax(law) > 0
        assert task.statistics[table.name].hottest[0] == np.argmax(law)
        assert task.statistics[table.name].pooling_factor == table.pooling_factor


def test_the_share_of_accesses_by_hand():
    """Rows 2, 0, 1 and 3 are looked up in this order of frequency; two of them are in fast memory."""
    table, law = EmbeddingTable("t", 4, 32, 2.0), np.array([0.3, 0.1, 0.6, 0.0])
    task = Task((table,), (law,), {})
    pieces = [Piece(0, 0, 0, 2, 0, 32, DEVICE), Piece(0, 0, 2, 4, 0, 32, HOST)]
    devices = devices_with(1e9)
    as_they_are, step_s = judged(task, pieces, (), devices)
    by_counts, faster_s = judged(task, pieces, (RowOrder(0, (2, 0)),), devices)
    assert as_they_are == pytest.approx(0.4)
    assert by_counts == pytest.approx(0.9)
    assert faster_s < step_s
    expected = decoded([dataclasses.replace(table, access=(0.6, 0.3, 0.1, 0.0))], pieces, devices)
    assert faster_s == pytest.approx(expected.forward_s.max() + expected.rest_s.max())
    halves = [Piece(0, d, 0, 4, 16 * d, 16 * d + 16, memory) for d, memory in enumerate((DEVICE, HOST))]
    assert judged(task, halves, (), devices)[0] == pytest.approx(0.5)


def test_the_program_finds_the_optimum_of_its_choices():
    rng = np.random.default_rng(0)
    tables = tuple(EmbeddingTable(f"t{i}", 6, 32, 2.0) for i in range(3))
    ids = [np.minimum(rng.geometric(0.4, (50, 2)), 6) - 1 for _ in tables]
    statistics = {table.name: TableStatistics.measure(own) for table, own in zip(tables, ids, strict=True)}
    task = Task(tables, (), statistics)
    devices = devices_with(1.1 * piece_bytes(tables[0], 6, 32))
    measured = [
        dataclasses.replace(t, pooling_factor=own.pooling_factor, access=own.access(6))
        for t, own in zip(tables, statistics.values(), strict=True)
    ]

    def step_s(pieces: list[Piece]) -> float:
        cost = decoded(measured, pieces, devices)
        fits = (cost.device_bytes <= devices.memory_limit_bytes).all()
        return float(cost.forward_s.max() + cost.rest_s.max()) if fits else np.inf

    pieces, gap = program_pieces(task, devices)
    every = itertools.product(itertools.product(range(2), range(7)), repeat=3)  # device and hot rows of each table
    least = min(
        step_s([p for i, own in enumerate(choice) for p in recshard.in_two_tiers(tables[i], i, *own)])
        for choice in every
    )
    assert gap < 1e-3
    assert step_s(pieces) == pytest.approx(least, rel=1e-3)
    with pytest.raises(ValueError, match="HiGHS found no placement"):
        program_pieces(task, devices_with(1.0))


def test_whole_tables_are_in_one_memory():
    space = WholeTablesSpace([EmbeddingTable("t", 4000, 32, 2.0, access=(8.0, 2.0, 1.0, 1.0))], devices_with(1e9))
    memories = {frozenset(piece.memory for piece in strategy.pieces) for strategy in space.strategies[0]}
    assert memories == {frozenset({DEVICE}), frozenset({HOST})}
    assert any(len(strategy.pieces) > 1 for strategy in space.strategies[0])


def test_counted_rows_are_the_fastest_way(capsys):
    recshard.main(["--tasks", "1", "--tables", "3", "--most-rows", "20000", "--devices", "2"])
    rows = [row for row in printed_rows(capsys.readouterr().out) if row[0].endswith("%")]
    assert [row[0] for row in rows] == ["50%"] * 4 + ["25%"] * 4 + ["10%"] * 4
    for of_share in (rows[:4], rows[4:8], rows[8:]):
        ways = {row[1]: row for row in of_share}
        fast = {name: float(row[2].rstrip("%")) for name, row in ways.items()}
        assert fast[recshard.BY_COUNTS] > fast[recshard.OWN_ORDER]
        assert float(ways[recshard.BY_COUNTS][4]) == 1
        assert float(ways[recshard.WHOLE][4]) > 1

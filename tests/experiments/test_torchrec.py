"""TorchRec's planner as a rival: its estimates by hand, its proposers and partitioners against brute force."""

import dataclasses
import itertools

import numpy as np
import pytest

from cost.base import Hardware
from experiments.embedding_tables import torchrec
from experiments.embedding_tables.torchrec import PROPOSERS, Planner, by_bytes, memory_balanced
from experiments.embedding_tables.torchrec_estimates import DEVICE, HOST, UNIFORM, Estimate, Option, Topology
from search_spaces.embedding_tables.base import EVERY_DEVICE, EmbeddingTable, TableDevices
from search_spaces.embedding_tables.prices import piece_bytes

DEVICES = TableDevices((Hardware("test", 1e12, 1e9, 1e9, {}),) * 4, (1e9,) * 4, 1e-9, batch_size=400)
TOPOLOGY = Topology(4, 4, 100, (1e9,) * 4, 1e9, 1e8, 1e7)
TABLE = EmbeddingTable("table", 1000, 64, 3.0)


def option(kind: str, placed: str, seconds: list[float], num_bytes: list[float]) -> Option:
    return Option(kind, placed, ((0, 1, 0, 4),) * len(seconds), tuple(seconds), tuple(num_bytes))


def random_options(seed: int, num_tables: int, num_devices: int) -> list[list[Option]]:
    rng = np.random.default_rng(seed)

    def numbers(count: int) -> list[float]:
        return rng.integers(1, 20, count).astype(float).tolist()

    kinds = (("table_wise", DEVICE, 1), ("row_wise", UNIFORM, num_devices), ("column_wise", DEVICE, 2))
    return [
        [option(kind, placed, numbers(size), numbers(size)) for kind, placed, size in kinds] for _ in range(num_tables)
    ]


def test_estimates_by_hand():
    options = {o.kind: o for o in Estimate(reserves=False).options(TABLE, TOPOLOGY, DEVICES)}
    ids, row = 400 * 3, 64 * 4
    pooled = 400 * row
    forward = 1.15 * (8 * ids + ids * row + pooled) / 1e9
    assert options["table_wise"].seconds == pytest.approx([3 * forward + 2 * pooled / 1e8])
    assert options["column_wise"].spans == options["table_wise"].spans  # 64 columns are no more than the least 128
    forward = (8 * ids / 4 + ids / 4 * row + pooled) / 1e9
    by_rows = 3 * forward + 2 * pooled / 1e8 + 2.455 * pooled / 1e9
    assert options["row_wise"].seconds == pytest.approx([by_rows] * 4)
    forward = (8 * ids / 4 + ids / 4 * row + pooled / 4) / 5e8
    copied = 3 * forward + 1000 * row / (4 * 1e7) + 9.22 * 1000 * row / 5e8
    assert options["data_parallel"].seconds == pytest.approx([copied] * 4)
    assert options["row_wise"].num_bytes == (piece_bytes(TABLE, 250, 64),) * 4


def test_two_hosts_send_slowly():
    table = dataclasses.replace(TABLE, dimension=128)
    two_hosts = TOPOLOGY._replace(devices_per_host=2)
    one, two = (
        {o.kind: o for o in Estimate(columns=32).options(table, topology, DEVICES)}
        for topology in (TOPOLOGY, two_hosts)
    )
    assert len(one["column_wise"].spans) == 4
    pooled = 400 * 128 * 4
    assert two["row_wise"].seconds[0] - one["row_wise"].seconds[0] == pytest.approx(2 * pooled * (1e-7 - 1e-8))
    assert len(two["table_row_wise"].spans) == 2


def test_rows_are_rounded_up_and_memory_is_reserved():
    table = dataclasses.replace(TABLE, rows=9)
    topology = Estimate(dense_bytes=1e6).topology([table], DEVICES)
    assert topology.room_bytes == (0.85e9 - 6e6 - 20 * 8 * 300,) * 4
    row_wise = Estimate().options(table, topology, DEVICES)[4]
    assert [end - start for start, end, _, _ in row_wise.spans] == [3, 3, 3, 0]
    with_buffers = 3 * (256 + 4) + 8 * 100 / 4 * 3 * 4 + 100 * 256 * 4
    assert row_wise.num_bytes == (with_buffers,) * 3 + (0,)
    assert len(row_wise.pieces(0, range(4))) == 3


def test_rates_are_those_of_the_devices_where_they_are_given():
    topology = Estimate(rates_given=True).topology([TABLE], DEVICES)
    assert topology.memory_bytes_per_s == DEVICES.hardware[0].reached_memory_bytes_per_s
    assert topology.host_link_bytes_per_s == pytest.approx(1e9)
    assert topology.far_link_bytes_per_s == 12.5 * 2**30


def test_greedy_moves_on_with_the_largest_piece():
    small = [option("a", DEVICE, [1], [3]), option("b", DEVICE, [2], [1])]
    large = [option("b", DEVICE, [4], [5]), option("a", DEVICE, [3], [9])]
    steps = [[o.kind + str(o.seconds[0]) for o in proposal] for proposal in PROPOSERS["greedy"]([small, large], 0)]
    assert steps == [["a1", "a3"], ["a1", "b4"], ["b2", "b4"]]
    wide = option("c", DEVICE, [2, 2], [1, 1])  # its slowest piece is faster than b's, both together are not
    first = [next(PROPOSERS[name]([[large[1], wide]], 0))[0] for name in ("greedy", "greedy by sums")]
    assert first == [wide, large[1]]


def test_uniform_and_grid_list_what_they_say():
    options = random_options(0, 3, 2)
    assert [{o.kind for o in proposal} for proposal in PROPOSERS["uniform"](options, 0)] == [
        {"table_wise"}, {"row_wise"}, {"column_wise"},
    ]  # fmt: skip
    assert len(set(PROPOSERS["grid"](options, 0))) == 27
    assert not list(PROPOSERS["grid"](random_options(0, 9, 2), 0))  # 19,683 are too many


@pytest.mark.parametrize("seed", range(5))
def test_dynamic_programming_finds_the_least_sum_of_seconds_for_each_sum_of_bytes(seed):
    options = random_options(seed, 4, 2)
    room = 90.0
    least: dict[float, float] = {}
    for proposal in itertools.product(*options):
        size, seconds = sum(sum(o.num_bytes) for o in proposal), sum(sum(o.seconds) for o in proposal)
        if size < room:
            least[size] = min(least.get(size, np.inf), seconds)
    proposals = list(torchrec.dynamic_programming(options, room, bins=int(room)))[1:]  # bins of one byte are exact
    found = {sum(sum(o.num_bytes) for o in p): sum(sum(o.seconds) for o in p) for p in proposals}
    assert found == least
    assert list(found) == sorted(found, reverse=True)


def test_pieces_go_to_the_least_busy_devices_with_room():
    proposal = (
        option("table_wise", DEVICE, [5], [2]),
        option("row_wise", UNIFORM, [1, 2], [1, 1]),
        option("column_wise", DEVICE, [3, 4], [3, 3]),
    )
    topology = TOPOLOGY._replace(num_devices=2, devices_per_host=2, room_bytes=(9.0, 9.0))
    found = by_bytes(proposal, topology)  # rows first, then the 6 bytes in columns, then the whole table
    assert found is not None
    assert found.devices == ((0,), (0, 1), (0, 1))
    assert (found.seconds, found.used_bytes) == (9, (6, 4))
    full = by_bytes(proposal, topology._replace(room_bytes=(5.0, 9.0)))
    assert full is not None
    assert full.devices == ((1,), (0, 1), (0, 1))
    assert by_bytes(proposal, topology._replace(room_bytes=(5.0, 5.0))) is None


def test_pieces_of_one_host_stay_there():
    topology = TOPOLOGY._replace(devices_per_host=2, room_bytes=(5.0, 1.0, 5.0, 5.0))
    rows, columns = option("table_row_wise", HOST, [1, 1], [2, 2]), option("table_column_wise", HOST, [1, 1], [1, 1])
    found = by_bytes((columns, rows, rows), topology)
    assert found is not None
    assert found.devices == ((0, 1), (2, 3), (2, 3))
    assert by_bytes((rows, rows, rows), topology) is None


@pytest.mark.parametrize(("last", "peak"), [(4.0, 18.0), (3.0, 10.0)])
def test_memory_is_balanced_where_that_costs_no_time(last, peak):
    gibibytes, seconds = (9, 1, 9, 1), (4.0, last, 1.0, 1.0)
    proposal = tuple(
        option("table_wise", DEVICE, [s], [size * 2**30]) for s, size in zip(seconds, gibibytes, strict=True)
    )
    topology = TOPOLOGY._replace(num_devices=2, devices_per_host=2, room_bytes=(20.0 * 2**30,) * 2)
    fast = torchrec.placed_greedily(proposal, topology, topology.room_bytes, lambda o: sum(o.seconds))
    balanced = memory_balanced(proposal, topology)
    assert fast is not None
    assert balanced is not None
    assert max(fast.used_bytes) == peak * 2**30
    assert balanced.seconds == fast.seconds == 5
    assert max(balanced.used_bytes) == 10 * 2**30


def test_the_plan_is_the_best_proposal_and_is_judged_by_our_prices():
    tables = [EmbeddingTable(f"t{i}", 100 * (i + 1), 64, float(i + 1)) for i in range(3)]
    planner = Planner(("grid",), estimate=Estimate(reserves=False))
    topology = planner.estimate.topology(tables, DEVICES)
    options = [planner.estimate.options(table, topology, DEVICES) for table in tables]
    every = [by_bytes(proposal, topology) for proposal in itertools.product(*options)]
    best = torchrec.best_proposal(PROPOSERS["grid"](options, 4e9), topology, by_bytes)
    assert best is not None
    assert best[1].seconds == min(partition.seconds for partition in every if partition is not None)
    placed = planner.placement(tables, DEVICES)
    assert placed is not None
    assert planner.step_s(tables, DEVICES) == pytest.approx(placed.forward_s.max() + placed.rest_s.max())
    for index, table in enumerate(tables):
        own = [p for p in placed.pieces if p.table == index]
        numbers = sum(p.rows * p.columns for p in own)
        assert numbers == table.rows * table.dimension  # each number once, or one copy on every device
        assert len(own) == 1 or all(p.device != EVERY_DEVICE for p in own)


def test_no_plan_where_the_reservation_leaves_too_little():
    size = piece_bytes(TABLE, TABLE.rows, TABLE.dimension)
    tight = dataclasses.replace(DEVICES, memory_limit_bytes=(size / 4 * 1.1,) * 4)
    assert Planner().step_s([TABLE], tight) == np.inf
    assert Planner(estimate=Estimate(reserves=False)).step_s([TABLE], tight) < np.inf
    assert Planner(estimate=Estimate(dense_bytes=1e9)).step_s([TABLE], DEVICES) == np.inf

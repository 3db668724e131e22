"""Embedding tables as a problem: prices worked by hand, and what must hold for every choice."""

import dataclasses
import itertools

import numpy as np
import pytest

from cost.base import Hardware
from cost.embedding_tables import access_share, block_penalty, step_s
from cost.evaluation import evaluate
from diffshard.solving.solve import solve
from diffshard.tables.search import solve_space
from search_spaces.embedding_tables.base import EVERY_DEVICE, EmbeddingTable, Piece, TableDevices
from search_spaces.embedding_tables.prices import decoded
from search_spaces.embedding_tables.space import EXAMPLE, EmbeddingTableSpace
from search_spaces.embedding_tables.strategies import TableStrategies, strategies_of

HARDWARE = Hardware("test", 1e12, 1e9, 1e9, {})  # a byte of memory takes a nanosecond


def _devices(num_devices: int, limit: float = np.inf, s_per_byte: float = 1e-8) -> TableDevices:
    return TableDevices((HARDWARE,) * num_devices, (limit,) * num_devices, s_per_byte, batch_size=10)


def test_the_price_of_a_whole_table_by_hand():
    table = EmbeddingTable("t", 1000, 128, pooling_factor=3.0)
    costs = decoded([table], [Piece(0, 1, 0, 1000, 0, 128)], _devices(2))
    forward = (30 * 4 + 30 * 128 * 4 + 10 * 128 * 4) * 1e-9  # ids, rows that are read, pooled rows that are written
    exchanges = 2 * 10 * 128 * 4 / 2 * 1e-8  # half of the examples are on the other device; there and back
    np.testing.assert_allclose(costs.forward_s, [0, forward])
    np.testing.assert_allclose(costs.rest_s, [0, 2 * forward + exchanges])
    np.testing.assert_allclose(costs.device_bytes, [0, 1000 * 128 * 4 + 1000 * 4])


HOSTS = dataclasses.replace(_devices(4, s_per_byte=1e-9), num_hosts=2, far_s_per_byte=1e-8)


def test_bytes_inside_and_across_hosts_are_priced_apart():
    table = EmbeddingTable("t", 1000, 128, pooling_factor=3.0)
    costs = decoded([table], [Piece(0, 2, 0, 1000, 0, 128)], HOSTS)
    pooled = 10 * 128 * 4  # a quarter stays, a quarter goes to the other device of the host, a half to the other host
    exchanges = 2 * pooled * (1 / 4 * 1e-9 + 2 / 4 * 1e-8)
    np.testing.assert_allclose(costs.rest_s - 2 * costs.forward_s, [0, 0, exchanges, 0], rtol=1e-9)
    # The gradient of a copy is reduced in the hosts, and half of it by each device across them.
    copy = decoded([table], [Piece(0, EVERY_DEVICE, 0, 1000, 0, 128)], HOSTS)
    passes = (1000 * 128 * (3 * 4 + 2 * 4) + 2 * 1000 * 4) * 1e-9
    reduced = 2 * 1000 * 128 * 4 * (1 / 2 * 1e-9 + 1 / 2 * 1 / 2 * 1e-8)
    np.testing.assert_allclose(copy.rest_s - 2 * copy.forward_s, passes + reduced)
    # Links that are alike are one link.
    alike, one = dataclasses.replace(HOSTS, far_s_per_byte=1e-9), dataclasses.replace(HOSTS, num_hosts=1)
    for pieces in ([Piece(0, 2, 0, 1000, 0, 128)], [Piece(0, EVERY_DEVICE, 0, 1000, 0, 128)]):
        np.testing.assert_allclose(decoded([table], pieces, alike).rest_s, decoded([table], pieces, one).rest_s)


def test_the_price_of_a_copy_on_each_host_by_hand():
    table = EmbeddingTable("t", 1000, 128, pooling_factor=3.0)
    costs = decoded([table], [Piece(0, 1, 0, 1000, 0, 128, on_each_host=True)], HOSTS)
    forward = (15 * 4 + 15 * 128 * 4 + 5 * 128 * 4) * 1e-9  # of the host's half of the examples
    exchanges = 2 * 5 * 128 * 4 / 2 * 1e-9  # half of which are of the host's other device
    passes = (1000 * 128 * (3 * 4 + 2 * 4) + 2 * 1000 * 4) * 1e-9
    reduced = 1000 * 128 * 4 * 1e-8  # of two hosts: each one sends half of the gradient twice
    np.testing.assert_allclose(costs.forward_s, [0, forward, 0, forward])
    np.testing.assert_allclose(costs.rest_s, np.array([0, 1, 0, 1]) * (2 * forward + exchanges + passes + reduced))
    np.testing.assert_allclose(costs.device_bytes, np.array([0, 1, 0, 1]) * 1000 * (128 * 4 + 4))


def test_copies_on_each_host_are_whole_and_priced_as_their_pieces_are():
    devices = dataclasses.replace(_devices(12, s_per_byte=1e-9), num_hosts=3, far_s_per_byte=1e-8)
    table = EmbeddingTable("t", 33, 32, access=(5.0, 2.0, 1.0))
    space = EmbeddingTableSpace([table], devices)
    found = [(s, one) for s, one in enumerate(space.strategies[0]) if one.pieces[0].on_each_host]
    assert {tuple(p.device for p in one.pieces) for _, one in found} == {
        (0,), (1,), (2,), (3,), (0, 1), (2, 3), (0, 1, 2, 3)
    }  # fmt: skip
    for s, one in found:
        assert sum(piece.rows * piece.columns for piece in one.pieces) == 33 * 32
        costs = decoded([table], one.pieces, devices)
        np.testing.assert_allclose(space.prices[0].forward_s[s], costs.forward_s)
        np.testing.assert_allclose(space.prices[0].rest_s[s], costs.rest_s)
        assert f"on {', '.join(str(piece.device) for piece in one.pieces)}" in one.name


@pytest.mark.parametrize(("dtype", "itemsize"), [("float32", 4), ("bfloat16", 2)])
def test_the_price_of_a_copy_by_hand(dtype, itemsize):
    table = EmbeddingTable("t", 1000, 128, pooling_factor=3.0, dtype=dtype)
    fast = dataclasses.replace(HARDWARE, memory_bytes_per_s=4e9)
    devices = dataclasses.replace(_devices(2), hardware=(HARDWARE, fast))
    costs = decoded([table], [Piece(0, EVERY_DEVICE, 0, 1000, 0, 128)], devices)
    forward = (15 * 4 + 15 * 128 * itemsize + 5 * 128 * 4) * 1e-9  # of half of the examples
    # Its gradient is filled with zeros, squared and applied, each number of 4 bytes; rows are read and written.
    passes = (1000 * 128 * (3 * 4 + 2 * itemsize) + 2 * 1000 * 4) * 1e-9
    all_reduce = 1000 * 128 * 4 * 1e-8  # of two devices: each one sends half of the gradient twice
    np.testing.assert_allclose(costs.forward_s, [forward, forward / 4])
    np.testing.assert_allclose(costs.rest_s - all_reduce, np.array([1, 1 / 4]) * (2 * forward + passes))
    np.testing.assert_allclose(costs.device_bytes, 1000 * (128 * itemsize + 4))


def test_narrow_rows_take_longer():
    np.testing.assert_array_equal(block_penalty([4, 63, 64, 127, 128, 256]), [1.75, 1.75, 1.15, 1.15, 1, 1])
    table = EmbeddingTable("t", 1000, 8, pooling_factor=3.0)
    costs = decoded([table], [Piece(0, 0, 0, 1000, 0, 8)], _devices(1))
    assert costs.forward_s[0] == pytest.approx(1.75 * (30 * 4 + 30 * 32 * 4 + 10 * 8 * 4) * 1e-9)  # reads 32 columns
    assert costs.rest_s[0] == pytest.approx(2 * costs.forward_s[0])  # one device exchanges nothing


def test_pieces_of_rows_look_up_their_share_of_the_accesses():
    assert access_share(np.array([6.0, 2, 1, 1]), 100, 0, 25) == pytest.approx(0.6)
    assert access_share(np.array([6.0, 2, 1, 1]), 100, 10, 75) == pytest.approx(0.36 + 0.2 + 0.1)
    assert access_share(None, 100, 20, 50) == pytest.approx(0.3)
    table = EmbeddingTable("t", 100, 128, 2.0, access=(3.0, 1.0))
    costs = decoded([table], [Piece(0, 0, 0, 50, 0, 128), Piece(0, 1, 50, 100, 0, 128)], _devices(2))
    reads = 20 * 128 * 4 * 1e-9
    assert costs.forward_s[0] - costs.forward_s[1] == pytest.approx(reads / 2)  # three quarters against one


def test_a_step_waits_for_the_last_lookup_and_then_for_the_longest_rest():
    assert step_s(np.array([3.0, 1.0]), np.array([1.0, 4.0])) == 7.0
    space = EXAMPLE()
    rng = np.random.default_rng(0)
    for _ in range(5):
        choice = [int(rng.integers(len(strategies))) for strategies in space.strategies]
        assert evaluate(space.problem, choice).cost == pytest.approx(space.step_s(choice), rel=1e-12)


@pytest.mark.parametrize("num_devices", [1, 2, 3, 8, 16])
def test_every_strategy_has_each_number_of_the_table_once(num_devices):
    for table in (
        EmbeddingTable("t", 33, 32),
        EmbeddingTable("t", 2, 12),
        EmbeddingTable("t", 9, 4, access=(2.0, 1.0)),
    ):
        strategies = TableStrategies(strategies_of(table, 0, num_devices, can_replicate=True))
        for strategy in strategies:
            count = np.zeros((table.rows, table.dimension), int)
            for piece in strategy.pieces:
                count[piece.row_start : piece.row_end, piece.column_start : piece.column_end] += 1
            np.testing.assert_array_equal(count, 1)
            devices = [piece.device for piece in strategy.pieces]
            assert len(set(devices)) == len(devices)
            assert all(d == EVERY_DEVICE or 0 <= d < num_devices for d in devices)
        assert len({strategy.name for strategy in strategies}) == len(strategies)


def test_split_columns_stay_a_multiple_of_four():
    widths = {
        tuple(piece.columns for piece in kind.pieces)
        for kind in strategies_of(EmbeddingTable("t", 1, 24), 0, 8, can_replicate=False)
    }
    assert widths == {(24,), (12, 12)}  # a quarter would have 6 columns
    widths = {
        tuple(piece.columns for piece in kind.pieces)
        for kind in strategies_of(EmbeddingTable("t", 1, 16), 0, 8, can_replicate=False)
    }
    assert widths == {(16,), (8, 8), (8, 4, 4), (4, 4, 4, 4)}


def test_the_best_of_three_tables_on_two_devices_is_that_of_all_choices():
    tables = [EmbeddingTable(f"t{i}", 100 * (i + 1), 16, pooling_factor=i + 1.0) for i in range(3)]
    space = EmbeddingTableSpace(tables, _devices(2, limit=30_000.0))
    sizes = [range(len(strategies)) for strategies in space.strategies]
    feasible = [
        space.step_s(choice)
        for choice in itertools.product(*sizes)
        if space.decode(choice).device_bytes.max() <= 30_000
    ]
    assert solve(space.problem).cost == pytest.approx(min(feasible), rel=1e-12)


def _best(space: EmbeddingTableSpace) -> float:
    solution = solve(space.problem, solver="exact")
    assert solution.feasible
    return float(solution.cost)


def test_more_memory_and_more_devices_never_make_the_best_worse():
    tables = EXAMPLE().tables
    by_limit = [_best(EmbeddingTableSpace(tables, _devices(2, limit))) for limit in (1.4e5, 2e5, 4e5)]
    assert by_limit == sorted(by_limit, reverse=True)
    assert by_limit[0] > by_limit[-1]
    # Exchanges are free here: over more devices each one sends a larger share of its pooled rows.
    by_devices = [_best(EmbeddingTableSpace(tables, _devices(d, s_per_byte=0.0))) for d in (1, 2, 4)]
    assert by_devices == sorted(by_devices, reverse=True)
    assert by_devices[0] > by_devices[-1]


def test_many_small_tables_fit_with_hosts_whatever_more_memory_the_devices_have():
    """Of 2.4 MB in 120 tables each one is less than a 64th of a device's memory; more of it makes no step slower."""
    tables = [EmbeddingTable(f"t{i}", 1000, 4, 2.0) for i in range(120)]
    hardware = dataclasses.replace(HARDWARE, host_memory_bytes_per_s=1e8)
    steps = []
    for limit in (0.9e6, 1.1e6, 1.3e6):
        devices = dataclasses.replace(_devices(2, limit), hardware=(hardware,) * 2, host_limit_bytes=(1e7,) * 2)
        solution = solve_space(EmbeddingTableSpace(tables, devices), key=0)
        assert solution.feasible
        steps.append(solution.cost)
    assert steps == sorted(steps, reverse=True)
    assert steps[-2] > steps[-1]  # all fit the devices at last


@pytest.mark.parametrize("hosts", [(), (1e9, 1e9)])
def test_more_memory_takes_no_strategy_away(hosts):
    tables = [*EXAMPLE().tables, EmbeddingTable("large", 10**5, 64, access=(3.0, 1.0))]
    few, many = (
        EmbeddingTableSpace(tables, dataclasses.replace(_devices(2, limit), host_limit_bytes=hosts))
        for limit in (1e4, 1e10)
    )
    for node in range(len(tables)):
        assert set(few.strategy_names(node)) <= set(many.strategy_names(node))


@pytest.mark.parametrize("num_devices", [3, 4, 12])
def test_devices_in_another_order_have_the_same_strategies(num_devices):
    rng = np.random.default_rng(num_devices)
    tables = [*EXAMPLE().tables, EmbeddingTable("wide", 33, 64), EmbeddingTable("t", 90, 8, access=(5.0, 2.0, 1.0))]
    limits, host_limits = rng.uniform(1e5, 1e6, (2, num_devices))
    hardware = [
        dataclasses.replace(HARDWARE, memory_bytes_per_s=1e9 * (1 + i // 2), host_memory_bytes_per_s=1e8 * (1 + i % 2))
        for i in range(num_devices)
    ]

    def prices(order: np.ndarray) -> list[np.ndarray]:
        """Returns the cost of each strategy on each device, in the devices' first order; strategies sorted."""
        mixed = TableDevices(
            tuple(hardware[i] for i in order), tuple(limits[order]), 1e-8, 10, tuple(host_limits[order])
        )
        every = [np.stack(price)[:, :, np.argsort(order)] for price in EmbeddingTableSpace(tables, mixed).prices]
        return [np.unique(price.swapaxes(0, 1).reshape(price.shape[1], -1), axis=0) for price in every]

    for of_first, of_mixed in zip(prices(np.arange(num_devices)), prices(rng.permutation(num_devices)), strict=True):
        np.testing.assert_array_equal(of_first, of_mixed)


def test_names_and_the_order_of_tables_do_not_matter():
    space = EXAMPLE()
    renamed = [dataclasses.replace(table, name=f"other {table.name}") for table in reversed(space.tables)]
    assert _best(EmbeddingTableSpace(renamed, space.devices)) == pytest.approx(_best(space), rel=1e-9)


def test_a_faster_device_gets_more():
    tables = [EmbeddingTable(f"t{i}", 100, 128, 4.0) for i in range(6)]
    fast = dataclasses.replace(HARDWARE, memory_bytes_per_s=2e9)
    devices = TableDevices((fast, HARDWARE), (np.inf, np.inf), 0.0, batch_size=10)
    space = EmbeddingTableSpace(tables, devices)
    choice = solve(space.problem).choice
    columns = [sum(p.columns * p.rows for p in space.decode(choice).pieces if p.device == d) for d in (0, 1)]
    assert columns[0] == 2 * columns[1]


def test_a_table_without_lookups_costs_memory_only():
    space = EmbeddingTableSpace([EmbeddingTable("t", 10, 8, pooling_factor=0)], _devices(2))
    assert solve(space.problem).cost == 0
    assert space.decode([0]).device_bytes.tolist() == [10 * 8 * 4 + 10 * 4, 0]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("name", "", "not empty"),
        ("rows", 0, "positive whole number"),
        ("rows", 2**31, "below 2\\^31"),
        ("dimension", 1.5, "positive whole number"),
        ("pooling_factor", -1.0, "at least 0"),
        ("pooling_factor", np.nan, "at least 0"),
        ("dtype", "int8", "bfloat16"),
        ("pooling", "max", "'sum' or 'mean'"),
        ("access", (1.0,) * 11, "at most one for each row"),
        ("access", (0.0, 0.0), "not all 0"),
    ],
)
def test_a_table_that_breaks_a_rule_is_refused(field, value, message):
    with pytest.raises(ValueError, match=message):
        EmbeddingTable(**{"name": "t", "rows": 10, "dimension": 4, field: value})


def test_names_must_differ_and_there_must_be_tables():
    with pytest.raises(ValueError, match="different names; 't' is there twice"):
        EmbeddingTableSpace([EmbeddingTable("t", 1, 4)] * 2, _devices(1))
    with pytest.raises(ValueError, match="empty"):
        EmbeddingTableSpace([], _devices(1))

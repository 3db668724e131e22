"""`shard_tables`: plans with bounds that fit the memory, their text and file, and errors before any work."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import diffshard
from cost.embedding_tables import step_s
from diffshard import InfeasibleError, PlanError
from diffshard.tables import EmbeddingTable, TablePlan, shard_tables
from diffshard.tables.solving import solve_space
from search_spaces.embedding_tables.base import EVERY_DEVICE, Piece
from search_spaces.embedding_tables.prices import decoded
from search_spaces.embedding_tables.space import EmbeddingTableSpace
from search_spaces.embedding_tables.strategies import (
    TableStrategies,
    hot_counts,
    with_copied_hot_rows,
    with_host_memory,
)

MESH = AbstractMesh((4,), ("model",))


def _tables(count: int) -> list[EmbeddingTable]:
    rng = np.random.default_rng(0)
    return [
        EmbeddingTable(
            f"t{i}", int(rng.integers(10**3, 10**6)), int(2 ** rng.integers(3, 8)), float(rng.integers(1, 30))
        )
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def plan() -> TablePlan:
    return shard_tables(_tables(16), MESH, hardware="a100", memory_limit_bytes=5e8)


def test_a_plan_fits_the_memory_and_is_near_its_bound(plan):
    assert plan.predicted.device_bytes.max() <= 5e8
    assert 0 < plan.lower_bound_s <= plan.step_s
    assert plan.gap < 0.05
    placed = dict.fromkeys(range(16), 0)
    for piece in plan.pieces:
        placed[piece.table] += piece.rows * piece.columns
    assert placed == {i: t.rows * t.dimension for i, t in enumerate(plan.tables)}


def test_the_text_says_where_each_table_is(plan):
    text = str(plan)
    assert "16 embedding tables on 4 devices (model 4), A100" in text
    for table in plan.tables:
        assert f"float32[{table.rows},{table.dimension}]" in text
    assert max(map(len, text.splitlines())) <= 100


def test_a_saved_plan_is_the_same(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    loaded = TablePlan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert str(loaded) == str(plan)
    with pytest.raises(PlanError, match="no devices to run on"):
        loaded.init_state()
    with pytest.raises(PlanError, match="the plan was made for"):
        TablePlan.load(tmp_path / "plan.json", AbstractMesh((2,), ("model",)))
    with pytest.raises(PlanError, match=r"load it with `diffshard.tables.TablePlan.load`"):
        diffshard.Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pieces": "the first missing"}, "cover each of its numbers once"),
        ({"pieces": "the first twice"}, "cover each of its numbers once"),
        ({"mesh_axes": [["model", 3]]}, "not of 4 devices"),
        ({"status": 5}, "not of type"),
    ],
)
def test_a_damaged_file_is_refused(plan, tmp_path, change, message):
    plan.save(tmp_path / "plan.json")
    document = json.loads((tmp_path / "plan.json").read_text())
    first, *rest = document["pieces"]
    pieces = {"the first missing": rest, "the first twice": [first, first, *rest]}
    change = {key: pieces.get(value, value) if isinstance(value, str) else value for key, value in change.items()}
    (tmp_path / "plan.json").write_text(json.dumps({**document, **change}))
    with pytest.raises(PlanError, match=message):
        TablePlan.load(tmp_path / "plan.json")


def test_a_table_larger_than_a_device_is_split():
    plan = shard_tables([EmbeddingTable("large", 1000, 128, 2.0)], MESH, hardware="a100", memory_limit_bytes=3e5)
    assert len({piece.device for piece in plan.pieces}) > 1
    assert plan.predicted.device_bytes.max() <= 3e5


def test_a_table_fits_by_rows_where_its_columns_have_fewer_numbers_but_more_state():
    table = EmbeddingTable("t", 4001, 16)  # 4 columns of all rows: 80,020 bytes; 1001 whole rows: 68,068 bytes
    plan = shard_tables([table], MESH, hardware="a100", memory_limit_bytes=75_000)
    assert plan.predicted.device_bytes.max() <= 75_000


def test_what_fits_nowhere_is_refused_with_the_missing_bytes():
    large = EmbeddingTable("large", 1000, 128)  # smallest piece: 250 rows of 516 bytes, or 32 columns
    with pytest.raises(InfeasibleError, match=r"Table 'large' does not fit: .* 9000 bytes more"):
        shard_tables([large], MESH, hardware="a100", memory_limit_bytes=120_000)
    many = [dataclasses.replace(large, name=f"t{i}", rows=100) for i in range(9)]
    with pytest.raises(InfeasibleError, match="64400 bytes more than"):
        shard_tables(many, MESH, hardware="a100", memory_limit_bytes=1e5)


def test_one_device_and_more_devices_than_tables():
    table = EmbeddingTable("t", 100, 8, 2.0)
    alone = shard_tables([table], AbstractMesh((1,), ("x",)), hardware="a100")
    assert [piece.device for piece in alone.pieces] == [0]
    assert alone.status == "optimal"
    many = shard_tables([table], AbstractMesh((16,), ("x",)), hardware="a100")
    assert many.status == "optimal"
    assert many.lower_bound_s == pytest.approx(many.step_s)
    assert alone.step_s / 16 < many.step_s < alone.step_s


def test_devices_may_differ_in_memory():
    tables = [EmbeddingTable(f"t{i}", 1000, 64, 2.0) for i in range(6)]
    plan = shard_tables(tables, MESH, hardware="a100", memory_limit_bytes=[4e5, 5e5, 6e5, 1e6])
    assert plan.predicted.device_bytes.max() <= plan.kept_bytes <= 4e5  # arrays are equally long on all devices
    with pytest.raises(InfeasibleError, match=r"360000 bytes more than .*the smallest limit counts for all devices"):
        shard_tables(tables, MESH, hardware="a100", memory_limit_bytes=[3e5, 3e5, 6e5, 1e6])


def test_accesses_given_by_name_count_as_those_of_the_table():
    table = EmbeddingTable("t", 1000, 4, 50.0)
    with_access = dataclasses.replace(table, access=(9.0, 1.0))
    plans = [
        shard_tables([table], MESH, hardware="a100", access={"t": (9.0, 1.0)}),
        shard_tables([with_access], MESH, hardware="a100"),
    ]
    assert plans[0].tables == plans[1].tables
    assert plans[0].step_s == plans[1].step_s


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tables": [("t", 1)]}, "`tables` must hold EmbeddingTable"),
        ({"mesh_or_devices": 4}, "`mesh_or_devices` must be"),
        ({"mesh_or_devices": []}, "`mesh_or_devices` must be"),
        ({"mesh_or_devices": jax.sharding.AbstractMesh((), ())}, "`mesh_or_devices` must be a mesh with an axis"),
        ({"hardware": ["a100"] * 4}, "`hardware` must be"),
        ({"hardware": [diffshard.preset("a100", {"model": 4})] * 3}, "3 entries for 4 devices"),
        ({"memory_limit_bytes": [1e9]}, "1 numbers for 4 devices"),
        ({"memory_limit_bytes": -1}, "must be a positive number"),
        ({"batch_size": 0}, "`batch_size` must be"),
        ({"access": {"u": (1.0,)}}, "`access` has 'u'"),
        ({"access": {"t": (-1.0,)}}, "none negative"),
        ({"access": {"t": "ab"}}, "`EmbeddingTable.access` of 't' must be counts of lookups, .* not 'ab'"),
        ({"tables": EmbeddingTable("t", 10, 4)}, "put a single one into a list"),
        ({"mesh_or_devices": [jax.devices()[0]] * 2}, "must have different devices, but .* is there twice"),
        ({"progress": 3}, "`progress` must be a function .* not 3"),
        ({"solver": "none"}, "`solver` must be"),
    ],
)
def test_wrong_arguments_are_refused(options, message):
    arguments = {"tables": [EmbeddingTable("t", 10, 4)], "mesh_or_devices": MESH, "hardware": "a100", **options}
    with pytest.raises((TypeError, ValueError), match=message):
        shard_tables(**arguments)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_tables_run_on_meshes_whatever_the_type_of_their_axes(axis_type):
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(axis_type,) * 2, devices=jax.devices()[:4])
    table = EmbeddingTable("t", 40, 8, 2.0)
    plan = shard_tables([table], mesh, hardware="cpu", batch_size=8)
    whole = np.random.default_rng(0).normal(size=(40, 8)).astype(np.float32)
    numbers = np.random.default_rng(1).permutation(40)[:16].reshape(8, 2)  # each row once
    arrays, state = plan.shard({"t": whole}), plan.init_state()
    assert jax.tree.map(jnp.shape, plan.init(jax.random.key(0))) == jax.tree.map(jnp.shape, arrays)

    def step(arrays, state, ids):
        rows = plan.lookup(arrays, {"t": ids})
        return rows["t"], *plan.update(arrays, state, {"t": ids}, rows, learning_rate=0.1)

    expected = whole.copy()
    row_gradients = np.repeat(whole[numbers].sum(1), 2, axis=0)
    root = np.sqrt(np.square(row_gradients).mean(1, keepdims=True))
    expected[numbers.ravel()] -= 0.1 * row_gradients / (root + 1e-8)
    for ids in (numbers, jax.device_put(numbers, NamedSharding(mesh, PartitionSpec("x")))):
        np.testing.assert_allclose(plan.lookup(arrays, {"t": ids})["t"], whole[numbers].sum(1), rtol=1e-5)
        rows, updated, _ = jax.jit(step)(arrays, state, ids)
        np.testing.assert_allclose(rows, whole[numbers].sum(1), rtol=1e-5)
        np.testing.assert_allclose(plan.unshard(updated)["t"], expected, rtol=1e-5, atol=1e-6)


def test_a_list_of_devices_becomes_a_mesh_that_runs():
    table = EmbeddingTable("t", 10, 4)
    plan = shard_tables([table], jax.devices()[:2], hardware="cpu")
    assert plan.mesh_axes == (("tables", 2),)
    whole = {"t": np.arange(40, dtype=np.float32).reshape(10, 4)}
    rows = plan.lookup(plan.shard(whole), {"t": np.array([[1, 2], [9, -1]])})["t"]
    np.testing.assert_array_equal(rows, [whole["t"][1] + whole["t"][2], whole["t"][9]])


def test_meshes_over_hosts_have_links_inside_and_across_apart(tmp_path):
    """Many examples make tables of some rows worth a copy on each host, divided among its devices."""
    tables = [EmbeddingTable(f"t{i}", 4000 * (i + 1), 128, 8.0) for i in range(8)]
    mesh = AbstractMesh((2, 8), ("hosts", "devices"))
    plan = shard_tables(tables, mesh, hardware="h100", key=0)
    devices, links = plan.devices, diffshard.preset("h100", dict(mesh.shape)).links
    rates = [links[axis].lines("all_to_all")[0].s_per_byte for axis in mesh.shape]
    assert (devices.num_hosts, devices.far_s_per_byte, devices.s_per_byte) == (2, *rates)
    on_each_host = {p.table for p in plan.pieces if p.on_each_host}
    assert on_each_host
    assert str(plan).count("a copy on each host") == len(on_each_host)
    plan.save(tmp_path / "plan.json")
    assert TablePlan.load(tmp_path / "plan.json") == plan
    one_link = dataclasses.replace(devices, num_hosts=1, s_per_byte=devices.far_s_per_byte, far_s_per_byte=0.0)
    known = solve_space(EmbeddingTableSpace(tables, one_link), key=0)
    costs = decoded(tables, EmbeddingTableSpace(tables, one_link).decode(known.choice).pieces, devices)
    assert plan.step_s < step_s(costs.forward_s, costs.rest_s)


def test_tables_on_two_hosts_run_as_on_one_device():
    mesh = jax.make_mesh((2, 4), ("hosts", "devices"), axis_types=(AxisType.Auto,) * 2)
    hardware = diffshard.preset("h100", dict(mesh.shape), devices_per_host=4)
    tables = [EmbeddingTable(f"t{i}", 300 + 100 * i, 64, 8.0) for i in range(4)]
    tables.append(EmbeddingTable("large", 50_000, 64, 2.0))
    plan = shard_tables(tables, mesh, hardware=hardware, batch_size=2048, key=0)
    assert any(piece.on_each_host for piece in plan.pieces)
    assert not all(piece.on_each_host for piece in plan.pieces)
    rng = np.random.default_rng(0)
    whole = {t.name: rng.normal(size=(t.rows, 64)).astype(np.float32) for t in tables}
    ids = {t.name: rng.permutation(t.rows)[:192].reshape(64, 3) for t in tables}  # each row once
    arrays, state = plan.shard(whole), plan.init_state()

    @jax.jit
    def step(arrays, state):
        rows = plan.lookup(arrays, ids)
        return rows, *plan.update(arrays, state, ids, rows, learning_rate=0.1)

    rows, updated, _ = step(arrays, state)
    for name, table in plan.unshard(updated).items():
        pooled = whole[name][ids[name]].sum(1)
        np.testing.assert_allclose(rows[name], pooled, rtol=1e-5, atol=1e-5)
        changes = np.repeat(pooled, 3, axis=0)
        changes /= np.sqrt(np.square(changes).mean(1, keepdims=True)) + 1e-8
        expected = whole[name].copy()
        expected[ids[name].ravel()] -= 0.1 * changes
        np.testing.assert_allclose(table, expected, rtol=1e-5, atol=1e-5)
    for numbers in updated.each_host.values():
        numbers = np.asarray(numbers)
        np.testing.assert_array_equal(numbers[:4], numbers[4:])  # the hosts' copies stay the same


@pytest.mark.parametrize(("shape", "num_hosts"), [((16,), 1), ((8, 2), 1), ((2, 2, 4), 2), ((2, 4), 1), ((4, 2, 4), 4)])
def test_hosts_count_where_the_first_axes_lead_from_host_to_host(shape, num_hosts):
    names = ("a", "b", "c")[: len(shape)]
    mesh = AbstractMesh(shape, names)
    plan = shard_tables([EmbeddingTable("t", 10, 8)], mesh, hardware="h100")
    assert plan.devices.num_hosts == num_hosts


def _skewed(name: str, rows: int, pooling_factor: float) -> EmbeddingTable:
    """A table whose rows are looked up by Zipf's law, counted in 64 parts."""
    return EmbeddingTable(name, rows, 64, pooling_factor, access=tuple(1 / np.arange(1.0, 65.0)))


def test_tables_larger_than_all_devices_fit_with_memory_of_the_hosts(tmp_path):
    """Hot rows stay on the devices; the plan says which rows are where, and a saved one is the same."""
    tables = [_skewed(f"t{i}", 40_000, 4.0 * (i + 1)) for i in range(3)]  # 10.4 MB each
    options = {"hardware": "a100", "memory_limit_bytes": 3e6}
    with pytest.raises(InfeasibleError, match="more than `memory_limit_bytes` of all 4 devices"):
        shard_tables(tables, MESH, **options)
    plan = shard_tables(tables, MESH, host_memory_limit_bytes=2e7, **options)
    assert plan.predicted.device_bytes.max() <= 3e6
    assert plan.predicted.host_bytes.max() <= 2e7
    numbers = [p.rows * p.columns for p in plan.pieces if p.memory == "host"]
    assert plan.predicted.host_bytes.sum() == 4 * sum(numbers) > 1.8e7  # 30.7 MB of numbers, of which 12 MB fit devices
    assert any(p.memory == "device" and p.row_start == 0 for p in plan.pieces)
    on_hosts = [p for p in plan.pieces if p.memory == "host"]
    assert all(p.row_end > 20_000 for p in on_hosts)  # the last rows, which are looked up least
    assert "on hosts" in str(plan)
    assert plan.lower_bound_s <= plan.step_s
    plan.save(tmp_path / "plan.json")
    assert TablePlan.load(tmp_path / "plan.json") == plan
    with pytest.raises(InfeasibleError, match="`memory_limit_bytes` and `host_memory_limit_bytes` of all 4 devices"):
        shard_tables(tables, MESH, host_memory_limit_bytes=1e6, **options)


def test_more_memory_on_devices_needs_less_of_the_hosts_and_is_not_slower():
    tables = [_skewed(f"t{i}", 40_000, 4.0) for i in range(2)]
    plans = [
        shard_tables(tables, MESH, hardware="a100", memory_limit_bytes=limit, host_memory_limit_bytes=2e7)
        for limit in (1e6, 3e6, 2e7)
    ]
    assert plans[0].step_s > plans[1].step_s > plans[2].step_s
    assert not plans[2].predicted.host_bytes.any()


def test_memory_of_hosts_needs_its_rate_and_devices_that_have_it(monkeypatch):
    table = EmbeddingTable("t", 100, 8)
    slow = dataclasses.replace(diffshard.preset("a100", {"model": 4}), host_memory_bytes_per_s=None)
    with pytest.raises(ValueError, match="does not say how fast"):
        shard_tables([table], MESH, hardware=slow, host_memory_limit_bytes=1e6)
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    monkeypatch.setattr("diffshard.host_memory.HOST_MEMORY", "memory of another planet")
    with pytest.raises(ValueError, match="has no pinned memory of its host"):
        shard_tables([table], mesh, hardware="a100", host_memory_limit_bytes=1e6)


@pytest.mark.parametrize("num_devices", [1, 2, 5, 8])
def test_hot_rows_and_the_others_are_each_number_of_a_table_once(num_devices):
    for table in (_skewed("t", 133, 3.0), EmbeddingTable("t", 9, 8), EmbeddingTable("t", 1, 4, access=(1.0,))):
        copied = with_copied_hot_rows(table, 0, num_devices, 1e9)
        strategies = TableStrategies([*copied, *with_host_memory(table, 0, num_devices, 1e9)])
        for strategy in strategies:
            count = np.zeros((table.rows, table.dimension), int)
            for p in strategy.pieces:
                count[p.row_start : p.row_end, p.column_start : p.column_end] += 1
            np.testing.assert_array_equal(count, 1)
        assert len({strategy.name for strategy in strategies}) == len(strategies)
        assert any(all(piece.memory == "host" for piece in strategy.pieces) for strategy in strategies)
    assert hot_counts(_skewed("t", 640, 1.0)) == [60, 200, 400, 560]  # H(6) = 2.45, H(20) = 3.60, ... of H(64) = 4.74


def test_copied_hot_rows_divide_their_lookups_among_devices():
    table = EmbeddingTable("t", 1000, 128, 8.0, access=(9.0, *[1 / 9] * 9))
    devices = shard_tables([table], MESH, hardware="a100").devices
    whole = decoded([table], [Piece(0, 0, 0, 1000, 0, 128)], devices)
    copied = [Piece(0, EVERY_DEVICE, 0, 100, 0, 128), Piece(0, 0, 100, 1000, 0, 128)]
    hot = decoded([table], copied, devices)
    lookups = 65536 * 8 * 128 * 4 / devices.hardware[0].reached_memory_bytes_per_s
    assert whole.forward_s[0] - hot.forward_s[0] == pytest.approx(0.9 * lookups * 3 / 4, rel=0.06)
    assert hot.forward_s[1] > 0.9 * lookups / 4
    np.testing.assert_allclose(hot.device_bytes, [1000 * 516, *[100 * 516] * 3])

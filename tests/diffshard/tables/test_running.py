"""Plans of embedding tables run: lookups, gradients and updates equal those of whole tables on one device.

One plan has every kind of piece: a whole table, columns, rows, a copy on each device, copied hot rows, several pieces
on a device, and a device without any. Another one has rows in memory of the hosts as well, and a third one tables that
each of two hosts has. Some tables' rows are numbered anew.
"""

import dataclasses
import json
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from cost.presets import preset
from diffshard.base import PlanError
from diffshard.tables import host_rows
from diffshard.tables.arrays import padded_ids, pooled, pooling_weights
from diffshard.tables.exchanges import in_columns
from diffshard.tables.hot_rows import RowOrder
from diffshard.tables.plan import TablePlan
from diffshard.tables.plan_data import check_table_plan
from search_spaces.embedding_tables.base import EVERY_DEVICE, HOST, EmbeddingTable, Piece, TableDevices
from search_spaces.embedding_tables.optimizers import OPTIMIZERS
from search_spaces.embedding_tables.prices import piece_bytes

BATCH = 16
TABLES = (
    EmbeddingTable("whole", 30, 4),
    EmbeddingTable("columns", 50, 16),
    EmbeddingTable("rows", 41, 8, pooling="mean"),
    EmbeddingTable("copy", 5, 8),
    EmbeddingTable("short", 20, 8, dtype="bfloat16"),
    EmbeddingTable("hot", 30, 8, pooling="mean"),
)
PIECES = (
    Piece(0, 2, 0, 30, 0, 4),
    Piece(1, 0, 0, 50, 0, 8),
    Piece(1, 2, 0, 50, 8, 12),
    Piece(1, 1, 0, 50, 12, 16),
    Piece(2, 0, 0, 20, 0, 8),
    Piece(2, 2, 20, 41, 0, 8),
    Piece(3, EVERY_DEVICE, 0, 5, 0, 8),
    Piece(4, 1, 0, 20, 0, 8),
    Piece(5, EVERY_DEVICE, 0, 6, 0, 8),
    Piece(5, 0, 6, 30, 0, 4),
    Piece(5, 1, 6, 30, 4, 8),
)
WITH_HOSTS = (  # hot rows on devices or copied; several tables in one array of a host; rows and columns on hosts
    Piece(0, 0, 0, 30, 0, 4, HOST),
    Piece(1, 0, 0, 7, 0, 8),
    Piece(1, 2, 0, 7, 8, 16),
    Piece(1, 0, 7, 50, 0, 8, HOST),
    Piece(1, 2, 7, 50, 8, 16, HOST),
    Piece(2, 0, 0, 20, 0, 8),
    Piece(2, 2, 20, 41, 0, 8, HOST),
    Piece(3, EVERY_DEVICE, 0, 5, 0, 8),
    Piece(4, 1, 0, 20, 0, 8, HOST),
    Piece(5, EVERY_DEVICE, 0, 6, 0, 8),
    Piece(5, 0, 6, 30, 0, 4, HOST),
    Piece(5, 3, 6, 30, 4, 8, HOST),
)
ON_EACH_HOST = (  # of two devices: a whole table, columns, rows, and others between all four devices
    Piece(0, 1, 0, 30, 0, 4, on_each_host=True),
    Piece(1, 0, 0, 50, 0, 8, on_each_host=True),
    Piece(1, 1, 0, 50, 8, 16, on_each_host=True),
    Piece(2, 0, 0, 20, 0, 8, on_each_host=True),
    Piece(2, 1, 20, 41, 0, 8, on_each_host=True),
    Piece(3, EVERY_DEVICE, 0, 5, 0, 8),
    Piece(4, 1, 0, 20, 0, 8, on_each_host=True),
    Piece(5, EVERY_DEVICE, 0, 6, 0, 8),
    Piece(5, 0, 6, 30, 0, 4),
    Piece(5, 3, 6, 30, 4, 8),
)
ORDERS = (
    RowOrder(1, (49, 3, 0, 1, 20, 6, 2)),  # a few rows from all over the table, in no order
    RowOrder(2, tuple(range(40, 20, -1))),
    RowOrder(5, (2, 8, 7, 29, 0, 5)),
)


def _plan(
    limit: float = 1e9, pieces: tuple[Piece, ...] = PIECES, tables: tuple[EmbeddingTable, ...] = TABLES
) -> TablePlan:
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    hardware, limits = (preset("a100", {"x": 2, "y": 2}),) * 4, (limit,) * 4
    num_hosts = 2 if any(piece.on_each_host for piece in pieces) else 1
    devices = TableDevices(hardware, limits, 1e-9, BATCH, limits, num_hosts, 1e-8)
    return TablePlan(tables, devices, pieces, (("x", 2), ("y", 2)), 0.0, "finished", 0.0, orders=ORDERS, mesh=mesh)


@pytest.fixture(scope="module", params=[PIECES, WITH_HOSTS, ON_EACH_HOST], ids=["devices", "hosts", "each host"])
def plan(request) -> Iterator[TablePlan]:
    """A plan; rows of hosts are copied five at a time, so that loops go round more than once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_rows, "CHUNK_ROWS", 5)
        yield _plan(pieces=request.param)


@pytest.fixture(scope="module")
def whole() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {t.name: rng.normal(size=(t.rows, t.dimension)).astype(jnp.dtype(t.dtype)) for t in TABLES}


@pytest.fixture(scope="module")
def ids() -> dict[str, np.ndarray]:
    """Ids with repetitions and gaps; some examples have none."""
    rng = np.random.default_rng(1)
    ids = {t.name: rng.integers(-1, min(t.rows, 9), (BATCH, 1 + i)) for i, t in enumerate(TABLES)}
    ids["rows"][:, 0] = rng.integers(0, 41, BATCH)
    ids["rows"][3] = -1
    return ids


@pytest.fixture(scope="module")
def weights(ids) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(2)
    return {name: rng.uniform(0.5, 2.0, ids[name].shape).astype(np.float32) for name in ("columns", "rows", "copy")}


def _reference(whole, ids, weights) -> dict[str, jax.Array]:
    """The same lookups, of whole tables."""
    rows = {}
    for t in TABLES:
        own = weights.get(t.name)
        factor = pooling_weights(jnp.asarray(ids[t.name]), None if own is None else jnp.asarray(own), t.rows, t.pooling)
        rows[t.name] = pooled(jnp.asarray(whole[t.name]), jnp.asarray(ids[t.name]), factor)
    return rows


def test_reference_lookups_are_sums_and_means_of_rows(whole, ids, weights):
    rows = _reference(whole, ids, weights)
    for t in TABLES:
        for example in range(BATCH):
            used = [(i, id_) for i, id_ in enumerate(ids[t.name][example]) if id_ >= 0]
            factors = [weights[t.name][example, i] if t.name in weights else 1.0 for i, _ in used]
            total = sum(factors) if t.pooling == "mean" and used else 1.0
            expected = sum(
                (f / total * whole[t.name][id_].astype(np.float32) for f, (_, id_) in zip(factors, used, strict=True)),
                start=np.zeros(t.dimension, np.float32),
            )
            np.testing.assert_allclose(rows[t.name][example], expected, rtol=1e-5, atol=1e-6)


def test_tables_come_back_as_they_were(plan, whole):
    arrays = plan.shard(whole)
    for name, array in plan.unshard(arrays).items():
        np.testing.assert_array_equal(array, whole[name])
    assert {a.sharding.memory_kind for a in arrays.hosts.values()} <= {"pinned_host"}
    for array in (*arrays.shards.values(), *arrays.hosts.values(), *arrays.each_host.values()):
        assert array.sharding.shard_shape(array.shape)[0] == 1  # each device has its own pieces and no others


def test_lookups_and_their_gradients_equal_those_of_whole_tables(plan, whole, ids, weights):
    rng = np.random.default_rng(3)
    probes = {t.name: rng.normal(size=(BATCH, t.dimension)).astype(np.float32) for t in TABLES}

    def loss(rows):
        return sum(jnp.vdot(probes[t.name], rows[t.name]) for t in TABLES), rows

    arrays = plan.shard(whole)
    run = jax.jit(jax.grad(lambda arrays: loss(plan.lookup(arrays, ids, weights)), has_aux=True))
    if arrays.hosts:
        with pytest.raises(ValueError, match="memory of the host have no gradient"):
            run(arrays)
        rows, expected = jax.jit(plan.lookup)(arrays, ids, weights), _reference(whole, ids, weights)
        for t in TABLES:
            np.testing.assert_allclose(rows[t.name], expected[t.name], rtol=1e-5, atol=1e-5)
        return
    gradients, rows = run(arrays)
    expected_gradients, expected = jax.grad(lambda w: loss(_reference(w, ids, weights)), has_aux=True)(
        {name: jnp.asarray(array) for name, array in whole.items()}
    )
    for t in TABLES:
        np.testing.assert_allclose(rows[t.name], expected[t.name], rtol=1e-5, atol=1e-5)
        actual = plan.unshard(gradients)[t.name].astype(np.float32)
        tolerance = 2e-2 if t.dtype == "bfloat16" else 1e-5
        np.testing.assert_allclose(
            actual, expected_gradients[t.name].astype(np.float32), rtol=tolerance, atol=tolerance
        )


@pytest.mark.parametrize(("num_devices", "optimizer"), [(1, "rowwise_adagrad"), (4, "rowwise_adagrad"), (4, "adagrad")])
def test_updates_change_donated_tables_in_place(num_devices, optimizer):
    """Memory beside the tables is for the batch only, also where one array has rows of several widths."""
    tables = tuple(EmbeddingTable(f"t{i}", 2000, 8 << i, optimizer=optimizer) for i in range(4))
    pieces = [Piece(i, i % num_devices, 0, 2000, 0, 8 << i) for i in range(3)]
    pieces += [Piece(3, d % num_devices, 0, 2000, 32 * d, 32 * d + 32) for d in range(2)]
    devices = TableDevices((preset("a100", {"x": num_devices}),) * num_devices, (1e9,) * num_devices, 1e-9, BATCH)
    mesh = jax.make_mesh((num_devices,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:num_devices])
    plan = TablePlan(tables, devices, tuple(pieces), (("x", num_devices),), 0.0, "finished", 0.0, mesh=mesh)
    ids = {t.name: jnp.zeros((BATCH, 2), jnp.int32) for t in tables}

    def step(arrays, state):
        rows = plan.lookup(arrays, ids)
        return plan.update(arrays, state, ids, rows, learning_rate=0.1)

    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(plan.init(jax.random.key(0)), plan.init_state()).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    tables_bytes = plan.layout.array_bytes()
    assert memory.alias_size_in_bytes == tables_bytes
    assert memory.temp_size_in_bytes < 0.1 * tables_bytes


def _change(optimizer: str, state: np.ndarray, g: np.ndarray, number: int) -> np.ndarray:
    """What an optimiser subtracts from a whole table for a rate of 1; its state `[2, rows, dimension]` changes."""
    if optimizer == "sgd":
        return g
    if optimizer == "adam":
        read = (g != 0).any(axis=1)
        state[0, read] = 0.9 * state[0, read] + 0.1 * g[read]
        state[1, read] = 0.999 * state[1, read] + 0.001 * np.square(g[read])
        rate = np.sqrt(1 - 0.999**number) / (1 - 0.9**number)
        return np.where(read[:, None], rate * state[0] / (np.sqrt(state[1]) + 1e-8), 0)
    squares = np.square(g)
    state[0] += squares.mean(axis=1, keepdims=True) if optimizer == "rowwise_adagrad" else squares
    return g / (np.sqrt(state[0]) + 1e-8)


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, "each table its own"])
def test_updates_equal_those_of_whole_tables_by_the_same_optimizer(plan, whole, ids, weights, optimizer):
    """Three steps, so that the state counts, the last one with other ids; rows not looked up stay as they are."""
    names = [*OPTIMIZERS, "adam", "adagrad"] if optimizer not in OPTIMIZERS else [optimizer] * len(TABLES)
    tables = tuple(dataclasses.replace(t, optimizer=o) for t, o in zip(TABLES, names, strict=True))
    plan = _plan(pieces=plan.pieces, tables=tables)
    rng = np.random.default_rng(4)
    arrays, state = plan.shard(whole), plan.init_state()
    expected = {name: array.astype(np.float32) for name, array in whole.items()}
    states = {t.name: np.zeros((2, t.rows, t.dimension), np.float32) for t in tables}
    step = jax.jit(lambda a, s, i, g: plan.update(a, s, i, g, learning_rate=0.1, weights=weights))
    fewer = {name: np.where(own % 2, own, -1) for name, own in ids.items()}
    for number, own_ids in enumerate((ids, ids, fewer), 1):
        gradients = {t.name: rng.normal(size=(BATCH, t.dimension)).astype(np.float32) for t in TABLES}
        arrays, state = step(arrays, state, own_ids, gradients)

        def loss(w, gradients=gradients, own_ids=own_ids):
            return sum(jnp.vdot(gradients[n], r) for n, r in _reference(w, own_ids, weights).items())

        dense = jax.grad(loss)({name: jnp.asarray(array) for name, array in expected.items()})
        for t in tables:
            change = _change(t.optimizer, states[t.name], np.asarray(dense[t.name]), number)
            expected[t.name] = expected[t.name] - 0.1 * change
    assert {a.sharding.memory_kind for a in arrays.hosts.values()} <= {"pinned_host"}
    for copy in arrays.copies.values():
        for part in copy.addressable_shards[1:]:
            np.testing.assert_array_equal(part.data, copy.addressable_shards[0].data)
    actual = plan.unshard(arrays)
    for t in TABLES:
        tolerance = 2e-2 if t.dtype == "bfloat16" else 1e-5
        np.testing.assert_allclose(actual[t.name].astype(np.float32), expected[t.name], rtol=tolerance, atol=tolerance)
        unused = np.setdiff1d(np.arange(t.rows), ids[t.name])
        np.testing.assert_array_equal(actual[t.name][unused], whole[t.name][unused])


def test_what_a_plan_keeps_is_the_bytes_of_tables_and_state_of_each_optimizer():
    for optimizer, state_bytes in (("rowwise_adagrad", 4 * 30), ("adagrad", 4 * 120), ("adam", 8 * 120), ("sgd", 0)):
        table = EmbeddingTable("whole", 30, 4, optimizer=optimizer)
        plan = _plan(pieces=(Piece(0, 2, 0, 30, 0, 4),), tables=(table,))
        plan = dataclasses.replace(plan, orders=())
        assert plan.kept_bytes == piece_bytes(table, 30, 4) == plan.predicted.device_bytes[2] == 4 * 120 + state_bytes
        assert sum(x.size for x in plan.shapes()[1].shards.values()) * 4 == 4 * state_bytes + 16 * (optimizer == "adam")
    with pytest.raises(ValueError, match=r"`EmbeddingTable.optimizer` of 'whole' must be one of 'rowwise_adagrad', "):
        EmbeddingTable("whole", 30, 4, optimizer="momentum")


def test_updates_of_state_for_each_number_take_longer():
    seconds = [
        _plan(tables=tuple(dataclasses.replace(t, optimizer=o) for t in TABLES)).step_s
        for o in ("rowwise_adagrad", "adagrad", "adam")
    ]
    assert seconds[0] < seconds[1] < seconds[2]


def test_a_plan_of_tables_without_an_optimizer_is_one_of_row_wise_adagrad(tmp_path):
    plan = dataclasses.replace(_plan(), mesh=None)
    plan.save(path := tmp_path / "plan.json")
    record = json.loads(path.read_text())
    del record["checksum"]
    for table in record["tables"]:
        del table["optimizer"]
    path.write_text(json.dumps(record))
    assert TablePlan.load(path).tables == plan.tables


def test_random_tables_have_their_range_and_differ(plan):
    tables = plan.unshard(plan.init(jax.random.key(0)))
    for t in TABLES:
        numbers = tables[t.name].astype(np.float32)
        assert np.abs(numbers).max() <= t.rows**-0.5 * 1.01
        assert len(np.unique(numbers)) > 0.3 * numbers.size
        assert (numbers != 0).mean() > 0.95


def test_empty_ids_give_zeros(plan, whole):
    none = {t.name: np.zeros((BATCH, 0), np.int32) for t in TABLES}
    arrays, state = plan.shard(whole), plan.init_state()
    rows = jax.jit(lambda arrays: plan.lookup(arrays, none))(arrays)
    assert all(not np.any(of_table) for of_table in rows.values())
    gradients = {t.name: np.ones((BATCH, t.dimension), np.float32) for t in TABLES}
    updated, _ = jax.jit(lambda a, s, g: plan.update(a, s, none, g, learning_rate=0.1))(arrays, state, gradients)
    for name, array in plan.unshard(updated).items():
        np.testing.assert_array_equal(array, whole[name])


def test_an_id_that_is_no_row_is_an_error_and_adds_nothing_where_ids_are_traced(plan, whole, ids):
    arrays = plan.shard(whole)
    wrong = {**ids, "whole": np.where(ids["whole"] == 3, 30, ids["whole"])}
    with pytest.raises(ValueError, match=r"`ids\['whole'\]` has the id 30; rows are 0 to 29"):
        plan.lookup(arrays, wrong)
    hashed = {**ids, "whole": np.full(ids["whole"].shape, 2**32 + 5)}  # whose low 32 bits are a row
    with pytest.raises(ValueError, match=r"has the id 4294967301; rows are 0 to 29"):
        plan.lookup(arrays, hashed)
    none = {**ids, "whole": np.where(ids["whole"] == 3, -1, ids["whole"])}
    lookup = jax.jit(plan.lookup)
    np.testing.assert_array_equal(lookup(arrays, wrong)["whole"], lookup(arrays, none)["whole"])


def test_what_does_not_fit_the_plan_is_refused(plan, whole, ids, weights):
    arrays = plan.shard(whole)
    for changed, message in (
        ({"other": ids["whole"]}, "no table of the plan"),
        ({"whole": ids["whole"].astype(float)}, "must be integers"),
        ({"whole": ids["whole"][:8]}, "others have 8"),
        ({name: own[:6] for name, own in ids.items()}, "4 devices do not divide"),
    ):
        with pytest.raises(ValueError, match=message):
            plan.lookup(arrays, {**ids, **changed})
    with pytest.raises(ValueError, match="lacks the table 'whole'"):
        plan.lookup(arrays, {name: own for name, own in ids.items() if name != "whole"})
    with pytest.raises(ValueError, match="shape of its ids"):
        plan.lookup(arrays, ids, {"rows": weights["rows"][:, :1]})
    with pytest.raises(ValueError, match="as it was planned"):
        plan.shard({**whole, "whole": whole["whole"][:5]})
    with pytest.raises(PlanError, match="as long on each device as on the fullest one"):
        _plan(limit=1e3).shard(whole)


def test_numbers_and_arrays_of_other_kinds_are_refused(plan, whole, ids):
    arrays, state = plan.shard(whole), plan.init_state()
    gradients = {t.name: np.ones((BATCH, t.dimension), np.float32) for t in TABLES}
    for options, message in (
        ({"learning_rate": "a"}, "`learning_rate` must be a number or an array of one, not 'a'"),
        ({"learning_rate": np.ones(3)}, r"`learning_rate` must be one number .* not an array of shape \(3,\)"),
        ({"learning_rate": np.nan}, "`learning_rate` must be finite, not nan"),
        ({"learning_rate": 0.1, "epsilon": -1e-8}, "`epsilon` must be a positive finite number, not -1e-08"),
        ({"learning_rate": 0.1, "epsilon": jnp.ones(())}, "`epsilon` must be a positive finite number, not Array"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            plan.update(arrays, state, ids, gradients, **options)
    with pytest.raises(ValueError, match=r"`arrays` must be what `plan.init` or `plan.shard` returns .*'state'"):
        plan.update(state, arrays, ids, gradients, learning_rate=0.1)
    with pytest.raises(
        ValueError, match=r"`state` must be what `plan.init_state` returns for this plan, in which `shards"
    ):
        plan.update(arrays, arrays, ids, gradients, learning_rate=0.1)
    with pytest.raises(ValueError, match=r"`arrays` must be what `plan.init` or"):
        plan.lookup(state, ids)
    with pytest.raises(TypeError, match=r"`arrays` must be .*, not dict"):
        plan.lookup(whole, ids)


def test_a_seed_stands_for_its_random_key(plan):
    seeded, keyed = (plan.unshard(plan.init(key)) for key in (3, jax.random.key(3)))
    for name, array in keyed.items():
        np.testing.assert_array_equal(array, seeded[name])
    with pytest.raises(ValueError, match=r"`key` must be a seed .* got 'a'"):
        plan.init("a")


def test_ragged_ids_become_a_matrix():
    np.testing.assert_array_equal(padded_ids(np.array([7, 8, 9]), np.array([2, 0, 1])), [[7, 8], [-1, -1], [9, -1]])
    np.testing.assert_array_equal(padded_ids(np.array([0.5]), np.array([0, 1]), 2), [[0, 0], [0.5, 0]])
    with pytest.raises(ValueError, match="add up"):
        padded_ids(np.array([7, 8]), np.array([1]))
    with pytest.raises(ValueError, match="an example has 2"):
        padded_ids(np.array([7, 8]), np.array([2]), 1)
    with pytest.raises(ValueError, match="`lengths` must be whole numbers, not float64"):
        padded_ids(np.array([7, 8]), np.array([1.0, 1.0]))
    assert padded_ids(np.array([], int), np.array([])).shape == (0, 0)


def test_ids_beyond_32_bits_and_state_are_the_same_with_64_bit_numbers(plan, whole):
    """Traced ids that are no rows add nothing, also where their lower 32 bits are a row's."""
    with jax.enable_x64(True):
        arrays, state = plan.shard(whole), plan.init_state()
        assert {x.dtype for x in jax.tree.leaves(state)} == {jnp.dtype("float32")}
        ids = {t.name: jnp.full((BATCH, 2), 2**32 + 3, jnp.int64) for t in TABLES}
        rows = jax.jit(plan.lookup)(arrays, ids)
        assert not any(np.asarray(own).any() for own in rows.values())
        ids["rows"] = jnp.full((BATCH, 2), 3, jnp.int64)
        gradients = {t.name: jnp.ones((BATCH, t.dimension), jnp.float32) for t in TABLES}
        update = jax.jit(lambda a, s, i, g: plan.update(a, s, i, g, learning_rate=0.1))
        changed = plan.unshard(update(arrays, state, ids, gradients)[0])
    for name, table in whole.items():
        rows = np.flatnonzero((np.asarray(changed[name], np.float32) != table.astype(np.float32)).any(1)).tolist()
        assert rows == ([3] if name == "rows" else [])


def test_plans_whose_columns_share_some_rows_only_are_damaged():
    """Squares of a row's columns are added up over pieces of equal rows."""
    pieces = [p for p in PIECES if p.table != 1]
    pieces += [Piece(1, 0, 0, 50, 0, 8), Piece(1, 1, 0, 20, 8, 16), Piece(1, 2, 20, 50, 8, 16)]
    with pytest.raises(ValueError, match="'columns' have different rows in common"):
        check_table_plan(_plan(pieces=tuple(pieces)))


def test_parts_are_put_in_their_columns():
    """Also parts of equal columns, which are added up, of overlapping ones, and none at all."""
    rng = np.random.default_rng(0)
    for spans in ([(0, 2), (2, 5), (6, 8)], [(4, 6), (4, 6), (0, 4)], [(0, 4), (2, 6), (5, 8), (1, 2)], []):
        parts = [(start, rng.normal(size=(3, end - start)).astype(np.float32)) for start, end in spans]
        expected = np.zeros((3, 8), np.float32)
        for start, part in parts:
            expected[:, start : start + part.shape[1]] += part
        found = in_columns([(start, jnp.asarray(part)) for start, part in parts], 3, 8)
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert in_columns([], 3, 0).shape == (3, 0)

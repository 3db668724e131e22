"""Statistics of ids by hand, rows numbered anew, and plans that treat measured hot rows apart."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

import diffshard
from diffshard.tables import EmbeddingTable, TablePlan, TableStatistics, hot_rows, shard_tables
from diffshard.tables.hot_rows import RowOrder, check_orders, needed_orders
from search_spaces.embedding_tables.base import HOST, Piece

ROWS = 4000
TABLE = EmbeddingTable("items", ROWS, 16)


def zipf_ids(seed: int, num_examples: int, pooling: int = 4) -> np.ndarray:
    """Ids by Zipf's law, whose hot rows are all over the table; an example in ten looks up none."""
    rng = np.random.default_rng(seed)
    places = np.random.default_rng(0).permutation(ROWS)
    weight = np.arange(1, ROWS + 1) ** -1.2
    ids = places[rng.choice(ROWS, (num_examples, pooling), p=weight / weight.sum())]
    ids[rng.random(num_examples) < 0.1] = -1
    return ids


def test_a_sample_by_hand():
    found = TableStatistics.measure(np.array([[7, 7, 3], [3, -1, 7], [-1, -1, -1], [0, -1, -1]]))
    assert found.hottest.tolist() == [7, 3, 0]
    assert found.counts.tolist() == [3, 2, 1]
    assert (found.pooling_factor, found.coverage, found.unseen_share) == (6 / 4, 3 / 4, 1 / 6)
    np.testing.assert_allclose(found.cumulative, [3 / 6, 5 / 6, 1])
    assert repr(found) == (
        "<TableStatistics of 4 examples: 3 rows looked up, 1.5 ids of an example, 75% of examples have some>"
    )
    # Rows 7, 3 and 0 come first; a sixth of the lookups goes to the 5 rows that are not in the sample.
    np.testing.assert_allclose(found.access(8), [5 / 12, 5 / 18, 5 / 36, *[1 / 30] * 5])
    all_seen = TableStatistics.measure(np.array([[0, 1, 1]]))
    np.testing.assert_allclose(all_seen.access(2), [2 / 3, 1 / 3])


def test_long_tables_are_counted_in_parts(monkeypatch):
    monkeypatch.setattr(hot_rows, "MOST_PARTS", 4)
    found = TableStatistics.measure(np.repeat(np.arange(10), 2)[None])
    np.testing.assert_allclose(found.access(20), [0.5, 0.5, 0, 0])
    np.testing.assert_allclose(found.access(15), [3.75 / 10, 3.75 / 10, 2.5 / 10, 0])


def test_the_measured_share_of_hot_rows_is_that_of_other_ids():
    """Rows that are not in the sample have lookups, too: without these, all would seem to go to the hot rows."""
    found = TableStatistics.measure(zipf_ids(1, 500))
    others = zipf_ids(2, 20000)
    others = others[others >= 0]
    access = found.access(ROWS)
    for share in (0.1, 0.25, 0.5):
        hot = found.hottest[: int(share * ROWS)]
        expected = sum(access[: int(share * len(access))]) / sum(access)
        assert np.isin(others, hot).mean() <= expected + 0.03
        assert expected < 1
    assert np.isin(others, found.hottest).mean() == pytest.approx(1 - found.unseen_share, abs=0.03)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.zeros((2, 3)), r"must be integers `\[N, P\]`, not float64\[2, 3\]"),
        (np.zeros(3, int), r"must be integers `\[N, P\]`, not int64\[3\]"),
        ([[1, 2], [3]], r"`ids` must be integers `\[N, P\]`; `padded_ids` makes them of ragged ids"),
        (np.array([[-2]]), "has the id -2; rows are 0 or more"),
        (np.full((3, 2), -1), "look up no row"),
    ],
)
def test_samples_that_are_none_are_refused(ids, message):
    with pytest.raises(ValueError, match=message):
        TableStatistics.measure(ids)


@pytest.mark.parametrize("seed", range(4))
def test_an_order_is_a_permutation_with_the_hot_rows_first(seed):
    rng = np.random.default_rng(seed)
    num_rows = int(rng.integers(1, 30))
    hottest = rng.permutation(num_rows)[: rng.integers(0, num_rows + 1)]
    order = RowOrder(0, tuple(hottest.tolist()))
    ids = order.ids_of(num_rows)
    np.testing.assert_array_equal(np.sort(ids), np.arange(num_rows))
    np.testing.assert_array_equal(ids[: len(hottest)], hottest)
    old, _ = order.moves()
    assert len(old) <= 2 * len(hottest)
    assert (np.diff(old) > 0).all()
    numbers = np.asarray(order.renumbered(jnp.arange(-2, num_rows + 2)))
    np.testing.assert_array_equal(numbers[[0, 1, -2, -1]], [-2, -1, num_rows, num_rows + 1])  # no rows stay none
    np.testing.assert_array_equal(ids[numbers[2:-2]], np.arange(num_rows))


@pytest.mark.parametrize(
    ("orders", "message"),
    [
        ((RowOrder(1, (0,)),), r"of the tables \[1\], which must be different ones of 1"),
        ((RowOrder(0, (0,)), RowOrder(0, (1,))), "must be different ones"),
        ((RowOrder(0, (3, 3)),), "'items' must have different ids below 4000"),
        ((RowOrder(0, (4000,)),), "'items' must have different ids below 4000"),
    ],
)
def test_orders_that_do_not_fit_are_damage(orders, message):
    with pytest.raises(ValueError, match=message):
        check_orders((TABLE,), orders)


def test_measured_hot_rows_stay_on_devices_and_results_are_those_of_one_device(tmp_path):
    """From the sample to the file: a plan with hot rows on devices, whose lookups and updates take ids."""
    measured = TableStatistics.measure(zipf_ids(1, 2000))
    mesh = jax.make_mesh((2,), ("devices",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    small = EmbeddingTable("small", 50, 16)
    plan = shard_tables(
        [TABLE, small], mesh, hardware="a100", statistics={"items": measured}, batch_size=4096, key=0,
        memory_limit_bytes=0.25 * TABLE.num_bytes, host_memory_limit_bytes=TABLE.num_bytes,
    )  # fmt: skip
    assert plan.tables[0].pooling_factor == pytest.approx(measured.pooling_factor)
    on_hosts = [p for p in plan.pieces if p.table == 0 and p.memory == HOST]
    assert on_hosts
    hot = min(p.row_start for p in on_hosts)
    (order,) = plan.orders
    assert hot > 0
    assert order.hottest[:hot] == tuple(measured.hottest[:hot].tolist())
    assert f"items ({len(order.hottest):,} rows first)" in str(plan)

    ids = {"items": zipf_ids(3, 64), "small": np.random.default_rng(0).integers(0, 50, (64, 1))}
    # Most lookups are of rows in fast memory, by their new numbers.
    own = np.asarray(order.renumbered(jnp.asarray(ids["items"])))
    assert (own[own >= 0] < hot).mean() > 0.6

    rng = np.random.default_rng(4)
    whole = {t.name: rng.normal(size=(t.rows, t.dimension)).astype(np.float32) for t in plan.tables}
    plan.save(tmp_path / "tables.json")
    plan = TablePlan.load(tmp_path / "tables.json", mesh)
    arrays, state = plan.shard(whole), plan.init_state()
    np.testing.assert_array_equal(plan.unshard(arrays)["items"], whole["items"])
    rows = jax.jit(plan.lookup)(arrays, ids)
    for name, table in whole.items():
        expected = (table[ids[name]] * (ids[name] >= 0)[:, :, None]).sum(1)
        np.testing.assert_allclose(rows[name], expected, rtol=1e-5, atol=1e-5)
    gradients = {name: jnp.ones((64, 16)) for name in ids}
    arrays, _ = jax.jit(lambda a, s, i: plan.update(a, s, i, gradients, learning_rate=0.1))(arrays, state, ids)
    for name, table in plan.unshard(arrays).items():
        changed = np.flatnonzero((table != whole[name]).any(axis=1))
        np.testing.assert_array_equal(changed, np.setdiff1d(ids[name], [-1]))
        # A first step of row-wise Adagrad with equal gradients is the learning rate.
        np.testing.assert_allclose(whole[name][changed] - table[changed], 0.1, rtol=1e-4)


def test_an_order_is_as_long_as_the_last_cut_needs():
    hottest = {"items": np.array([9, 5, 7, 1])}

    def orders(*ends: int) -> tuple[RowOrder, ...]:
        starts = (0, *ends[:-1])
        pieces = [Piece(0, 0, start, end, 0, 16) for start, end in zip(starts, ends, strict=True)]
        return needed_orders((TABLE,), hottest, pieces)

    assert orders(ROWS) == ()
    assert orders(1, 3, ROWS) == (RowOrder(0, (9, 5, 7)),)
    assert orders(100, ROWS) == (RowOrder(0, (9, 5, 7, 1)),)
    assert needed_orders((TABLE,), {}, [Piece(0, 0, 0, 100, 0, 16)]) == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"statistics": {"others": None}}, "`statistics` has 'others', which is no table"),
        ({"statistics": [1, 2]}, "`statistics` must be TableStatistics by the names of tables"),
        ({"access": ["items"]}, "`access` must be counts by the names of tables"),
        ({"statistics": {"items": (1, 2)}}, "must be made by `TableStatistics.measure`"),
        ({"access": {"items": (2.0, 1.0)}}, "`access` and `statistics` both have 'items'"),
        ({"statistics": {"items": TableStatistics.measure(np.array([[4000]]))}}, "has the id 4000; rows are 0 to 3999"),
    ],
)
def test_statistics_that_do_not_fit_are_refused(options, message):
    measured = {"items": TableStatistics.measure(zipf_ids(1, 20))}
    given: Any = {"statistics": measured, **options}
    with pytest.raises((TypeError, ValueError), match=message):
        shard_tables([TABLE], AbstractMesh((2,), ("devices",)), hardware="a100", **given)


def test_search_plans_a_step_around_tables_with_an_order():
    measured = TableStatistics.measure(zipf_ids(1, 500))
    mesh = jax.make_mesh((2,), ("devices",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    plan = shard_tables([TABLE], mesh, hardware="a100", statistics={"items": measured}, batch_size=64, key=0)
    plan = dataclasses.replace(plan, orders=(RowOrder(0, tuple(measured.hottest[:100].tolist())),))

    def step(weight, tables, ids):
        return jnp.sum(plan.lookup(tables, {"items": ids})["items"] @ weight)

    rng = np.random.default_rng(0)
    whole = rng.normal(size=(ROWS, 16)).astype(np.float32)
    weight, ids = rng.normal(size=(16, 8)).astype(np.float32), zipf_ids(5, 64)
    searched = diffshard.search(step, mesh, hardware="a100")
    expected = ((whole[ids] * (ids >= 0)[:, :, None]).sum(1) @ weight).sum()
    np.testing.assert_allclose(searched(weight, plan.shard({"items": whole}), jnp.asarray(ids)), expected, rtol=1e-4)

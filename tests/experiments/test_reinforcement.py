"""Policies that place tables one after another: their cost is the library's, and training makes placements better."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cost.base import Hardware
from cost.embedding_tables import step_s
from experiments.embedding_tables import reinforcement, tasks
from search_spaces.embedding_tables.base import EmbeddingTable, Piece, TableDevices
from search_spaces.embedding_tables.prices import decoded
from tests.experiments.printed_tables import printed_rows

HARDWARE = Hardware("test", 1e12, 1e9, 1e9, {})
DEVICES = TableDevices((HARDWARE,) * 4, (1e6,) * 4, 1e-9, batch_size=400)


def _tables(rng: np.random.Generator, count: int = 8) -> list[EmbeddingTable]:
    return [
        EmbeddingTable(f"t{i}", int(rng.integers(10, 900)), int(2 ** rng.integers(3, 8)), float(rng.integers(1, 20)))
        for i in range(count)
    ]


def _pieces(tables: list[EmbeddingTable], order: np.ndarray, devices: Any) -> list[Piece]:
    return [Piece(int(i), int(devices[at]), 0, tables[i].rows, 0, tables[i].dimension) for at, i in enumerate(order)]


@pytest.mark.parametrize("seed", range(3))
def test_the_cost_of_an_episode_is_that_of_its_placement(seed):
    tables = _tables(np.random.default_rng(seed))
    task, order = reinforcement.task_of(tables, DEVICES, 10)
    policy = reinforcement.Policy().init(jax.random.key(0), jnp.zeros((1, task.features.shape[1])), jnp.zeros((4, 4)))
    judge = reinforcement.true_judge(task)
    found = reinforcement.episode(policy, task, judge, jax.random.key(seed), 1.0, 4)
    pieces = _pieces(tables, order, found.devices)
    costs = decoded(tables, pieces, DEVICES)
    even_s = (costs.forward_s.sum() + costs.rest_s.sum()) / 4
    expected_s = step_s(costs.forward_s, costs.rest_s)
    np.testing.assert_allclose(found.step * even_s, expected_s, rtol=1e-5)
    np.testing.assert_allclose(reinforcement.step_of(pieces, tables, DEVICES), expected_s, rtol=1e-12)
    assert found.fits == bool((costs.device_bytes <= 1e6).all())
    assert sorted(order) == list(range(8))


def test_no_device_is_drawn_that_has_no_room():
    tables = [EmbeddingTable(f"t{i}", 1000, 128, 1.0) for i in range(4)]  # 516 kB each
    task, _ = reinforcement.task_of(tables, DEVICES, 4)
    policy = reinforcement.Policy().init(jax.random.key(0), jnp.zeros((1, task.features.shape[1])), jnp.zeros((4, 4)))
    for seed in range(4):
        found = reinforcement.episode(policy, task, reinforcement.true_judge(task), jax.random.key(seed), 1.0, 4)
        assert sorted(np.asarray(found.devices).tolist()) == [0, 1, 2, 3]
        assert found.fits


def test_both_policies_are_trained_and_place_tasks_that_they_have_not_seen(monkeypatch, capsys):
    rng = np.random.default_rng(0)
    monkeypatch.setattr(reinforcement, "pool_of_tables", lambda: _tables(rng, 30))
    monkeypatch.setattr(reinforcement, "_MOST_TABLES", 12)
    monkeypatch.setattr(reinforcement, "_COST_STEPS", 20)
    monkeypatch.setattr(tasks, "generated", lambda seed: (_tables(np.random.default_rng(seed)), DEVICES))
    reinforcement.main(["--tasks", "2", "--fresh", "0", "--updates", "10", "--training-tasks", "8"])
    rows = {row[1]: row for row in printed_rows(capsys.readouterr().out)}
    assert {reinforcement.AUTO, reinforcement.DREAM, reinforcement.OURS} <= set(rows)
    for name in (reinforcement.AUTO, reinforcement.DREAM):
        assert rows[name][2] == "2/2"
        assert float(rows[name][3]) >= 1.0  # never better than a search among more placements
        assert float(rows[name][7]) > 0
    assert float(rows["diffshard, whole tables"][3]) >= 1.0

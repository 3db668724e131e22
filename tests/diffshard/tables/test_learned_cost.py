"""Learned costs of embedding tables: measured, trained, saved, and searched with."""

import dataclasses
import json
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from cost import pooled_networks
from cost.embedding_tables import step_s
from cost.presets import preset
from diffshard.tables import (
    EmbeddingTable,
    LearnedTableCost,
    TablePlan,
    host_table_cost,
    learn_table_cost,
    learned_annealing,
    measurements,
    shard_tables,
)
from diffshard.tables.chains import Schedule
from experiments.embedding_tables import tasks
from search_spaces.embedding_tables.space import EmbeddingTableSpace

MESH = AbstractMesh((4,), ("tables",))
FAST = Schedule(least_sweeps=4, least_draws=1)


@pytest.fixture(scope="module")
def cost() -> LearnedTableCost:
    return host_table_cost()


@pytest.fixture(scope="module")
def space() -> EmbeddingTableSpace:
    return EmbeddingTableSpace(*tasks.generated(205, 12))


def test_what_chains_price_is_what_the_cost_says_of_the_placement(cost, space):
    found = list(learned_annealing.anneal(space, cost, np.random.default_rng(0), FAST))
    assert found
    for choice, seconds in found:
        pieces = space.decode(choice.tolist()).pieces
        decoded = cost.decoded(space.tables, pieces, space.devices)
        assert step_s(decoded.forward_s, decoded.rest_s) == pytest.approx(seconds)
        assert (decoded.device_bytes <= space.devices.memory_limit_bytes).all()


def test_rows_of_hosts_are_priced_alike_in_chains_and_placements(cost):
    tables, devices = tasks.generated(206, 10)
    limit = sum(table.num_bytes for table in tables) / 8
    hardware = (preset("h100", {"tables": 4}),) * 4
    devices = dataclasses.replace(
        devices, hardware=hardware, memory_limit_bytes=(limit,) * 4, host_limit_bytes=(1e10,) * 4
    )
    space = EmbeddingTableSpace(tables[:4], devices)
    choice, seconds = list(learned_annealing.anneal(space, cost, np.random.default_rng(0), FAST))[-1]
    pieces = space.decode(choice.tolist()).pieces
    assert any(piece.memory == "host" for piece in pieces)
    decoded = cost.decoded(space.tables, pieces, devices)
    assert step_s(decoded.forward_s, decoded.rest_s) == pytest.approx(seconds)


def test_a_plan_is_better_by_the_learned_cost_than_one_by_bytes_and_is_saved_with_it(cost, space, tmp_path):
    arguments = {"hardware": "v100", "memory_limit_bytes": 4 * 2**30, "batch_size": 16384}
    plan = shard_tables(space.tables, MESH, cost=cost, **arguments)
    by_bytes = shard_tables(space.tables, MESH, **arguments)
    other = cost.decoded(by_bytes.tables, by_bytes.pieces, by_bytes.devices)
    assert plan.step_s < step_s(other.forward_s, other.rest_s)
    assert "bound    none: the cost is learned" in str(plan)
    plan.save(tmp_path / "plan.json")
    loaded = TablePlan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert loaded.step_s == plan.step_s


def test_a_cost_is_saved_whole(cost, space, tmp_path):
    cost.save(tmp_path / "cost.npz")
    loaded = LearnedTableCost.load(tmp_path / "cost.npz")
    pieces = space.decode([0] * len(space.tables)).pieces
    for ours, theirs in zip(*(c.decoded(space.tables, pieces, space.devices) for c in (cost, loaded)), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert (loaded.device, loaded.date, loaded.num_devices) == (cost.device, cost.date, cost.num_devices)
    (tmp_path / "cost.npz").write_bytes((tmp_path / "cost.npz").read_bytes()[:500])
    with pytest.raises(ValueError, match="is not a learned cost"):
        LearnedTableCost.load(tmp_path / "cost.npz")


def test_costs_are_learned_from_the_devices_at_hand(monkeypatch, space):
    """Two samples do not say much; that they are enough to price placements shows that all parts fit."""
    monkeypatch.setattr(measurements, "LEAST_SAMPLES", 2)
    monkeypatch.setattr(pooled_networks, "_STEPS", 5)
    monkeypatch.setattr(measurements, "_BATCH_SIZES", (64,))
    monkeypatch.setattr(measurements, "_MOST_PIECES", 1)
    seen = []
    cost = learn_table_cost(
        jax.devices()[:2], num_samples=2, num_exchanges=2, progress=lambda done, of: seen.append((done, of))
    )
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert (cost.device, cost.num_devices) == (jax.devices()[0].device_kind, 2)
    decoded = cost.decoded(space.tables, space.decode([0] * len(space.tables)).pieces, space.devices)
    assert 0 < step_s(decoded.forward_s, decoded.rest_s) < np.inf


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cost": "h100"}, "`cost` must be a LearnedTableCost"),
        ({"solver": "exact"}, "`cost` has a search of its own"),
        ({"time_limit_s": 0}, "`time_limit_s` must be a positive number"),
        ({"key": "a"}, "`key` must be a seed"),
    ],
)
def test_wrong_arguments_with_a_cost_are_named(cost, arguments, message):
    given: dict[str, Any] = {"hardware": "v100", "cost": cost, **arguments}
    with pytest.raises((TypeError, ValueError), match=message):
        shard_tables([EmbeddingTable("t", 8, 8)], MESH, **given)
    with pytest.raises(ValueError, match=r"`cost` was learned with 'rowwise_adagrad', but table 't' has .*'adam'"):
        shard_tables([EmbeddingTable("t", 8, 8, optimizer="adam")], MESH, hardware="v100", cost=cost)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"devices": ["cpu"]}, "`devices` must be a list of JAX devices"),
        ({"devices": []}, "`devices` must be a list of JAX devices"),
        ({"num_samples": 3}, "`num_samples` must be a whole number of at least 10"),
        ({"num_exchanges": 1.5}, "`num_exchanges` must be a whole number"),
        ({"progress": 3}, "`progress` must be a function"),
    ],
)
def test_wrong_arguments_of_learning_are_named(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        learn_table_cost(**arguments)


def test_files_of_learned_costs_that_are_damaged_are_refused(cost, tmp_path):
    cost.save(path := tmp_path / "cost.npz")
    raw = path.read_bytes()
    step = max(1, len(raw) // 30)
    cases = [raw[:length] for length in range(0, len(raw), step)]
    cases += [raw[:i] + bytes([raw[i] ^ 0x55]) + raw[i + 1 :] for i in range(0, len(raw), step)]
    (tmp_path / "single.npy").write_bytes(b"")
    np.save(tmp_path / "single.npy", np.zeros(3))
    for content in (*cases, (tmp_path / "single.npy").read_bytes()):
        assert loaded(path, content) in (None, facts_of(cost))


def test_learned_costs_whose_parts_cannot_be_are_refused(cost, tmp_path):
    cost.save(path := tmp_path / "cost.npz")
    with np.load(path) as file:
        arrays = dict(file)
    facts = json.loads(str(arrays["facts"]))
    changes = [{name: None} for name in arrays]
    changes += [{name: np.full_like(array, np.nan)} for name, array in arrays.items() if name != "facts"]
    changes += [{name: array[..., None]} for name, array in arrays.items()]
    changes += [{"lookups.unit_s": np.float32(-1)}, {"updates.scale": np.zeros_like(arrays["updates.scale"])}]
    other_facts = [
        {**facts, name: other} for name in facts for other in (-1, True, None, [], {}) if other != facts[name]
    ]
    other_facts += [{key: facts[key] for key in facts if key != name} for name in facts]
    changes += [{"facts": np.array(json.dumps(other))} for other in (*other_facts, [], {**facts, "zzz": 1})]
    changes += [{"facts": np.array("[" * 100_000)}]
    for change in changes:
        kept = {name: array for name, array in {**arrays, **change}.items() if array is not None}
        np.savez(path, **kept)
        assert loaded(path, path.read_bytes()) is None, change


def facts_of(cost: LearnedTableCost) -> list[str]:
    """Everything that a cost knows, as texts."""
    return [repr(jax.tree.map(lambda x: np.asarray(x).tolist(), part)) for part in vars(cost).values()]


def loaded(path, content: bytes) -> list[str] | None:
    """What a file with this content gives; None if it is refused by an error that names the file."""
    path.write_bytes(content)
    try:
        return facts_of(LearnedTableCost.load(path))
    except ValueError as refusal:
        error = str(refusal)
    assert f"`{path}` is not a learned cost of embedding tables" in error
    return None

"""A recommendation model's training step whose tables come from `shard_tables` and whose rest comes from `search`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

import diffshard
from diffshard.tables import EmbeddingTable
from diffshard.tables.arrays import pooled, pooling_weights

BATCH, WIDTH, RATE = 16, 8, 0.1
TABLES = (
    EmbeddingTable("users", 40, WIDTH),
    EmbeddingTable("items", 33, WIDTH, 4, pooling="mean"),
    EmbeddingTable("shops", 9, WIDTH, 2),
)


def loss_of(dense: Any, rows: dict[str, jax.Array], batch: Any) -> jax.Array:
    """Bottom MLP, dot products of all pairs of features, top MLP, cross-entropy of clicks."""
    x = jax.nn.relu(batch["features"] @ dense["bottom"])
    features = jnp.stack([x, *(rows[table.name] for table in TABLES)], axis=1)
    products = jnp.einsum("bfc,bgc->bfg", features, features, precision="highest")
    first, second = np.triu_indices(len(TABLES) + 1, 1)
    hidden = jax.nn.relu(jnp.concatenate([x, products[:, first, second]], axis=1) @ dense["top"])
    logits = hidden @ dense["last"]
    return jnp.mean(jnp.logaddexp(0.0, logits) - batch["clicks"] * logits)


def step_with(plan: diffshard.tables.TablePlan):
    """Returns the training step with tables on devices: gradient descent of the MLPs, row-wise Adagrad of tables."""

    def train_step(dense, tables, state, batch):
        rows = plan.lookup(tables, batch["ids"])
        loss, (gradients, of_rows) = jax.value_and_grad(loss_of, (0, 1))(dense, rows, batch)
        tables, state = plan.update(tables, state, batch["ids"], of_rows, learning_rate=RATE)
        return jax.tree.map(lambda w, g: w - RATE * g, dense, gradients), tables, state, loss

    return train_step


def whole_step(dense, tables, squares, batch):
    """The same step with whole tables and dense gradients, on one device."""

    def loss_fn(dense, tables):
        rows = {}
        for t in TABLES:
            weights = pooling_weights(batch["ids"][t.name], None, t.rows, t.pooling)
            rows[t.name] = pooled(tables[t.name], batch["ids"][t.name], weights)
        return loss_of(dense, rows, batch)

    loss, (gradients, of_tables) = jax.value_and_grad(loss_fn, (0, 1))(dense, tables)
    squares = {name: squares[name] + jnp.square(g).mean(axis=1) for name, g in of_tables.items()}
    tables = {
        name: array - RATE * of_tables[name] / (jnp.sqrt(squares[name])[:, None] + 1e-8)
        for name, array in tables.items()
    }
    return jax.tree.map(lambda w, g: w - RATE * g, dense, gradients), tables, squares, loss


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


@pytest.fixture(scope="module")
def plan(mesh) -> diffshard.tables.TablePlan:
    return diffshard.tables.shard_tables(TABLES, mesh, hardware="a100", memory_limit_bytes=800, batch_size=BATCH)


def _batch(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    return {
        "features": jnp.array(rng.normal(size=(BATCH, 5)), jnp.float32),
        "clicks": jnp.array(rng.integers(0, 2, BATCH), jnp.float32),
        "ids": {t.name: jnp.array(rng.integers(-1, t.rows, (BATCH, int(t.pooling_factor)))) for t in TABLES},
    }


def _dense() -> Any:
    rng = np.random.default_rng(7)
    sizes = {"bottom": (5, WIDTH), "top": (WIDTH + 6, 16), "last": (16,)}
    return {name: jnp.array(0.3 * rng.normal(size=size), jnp.float32) for name, size in sizes.items()}


@pytest.mark.parametrize("executor", ["constraints", "program"])
def test_three_steps_on_eight_devices_equal_those_on_one(plan, mesh, executor):
    rng = np.random.default_rng(3)
    whole = {t.name: rng.normal(size=(t.rows, t.dimension)).astype(np.float32) for t in TABLES}
    step = diffshard.search(step_with(plan), mesh, hardware="a100", executor=executor)
    found = step.plan(_dense(), plan.shard(whole), plan.init_state(), _batch(0))
    arguments = found.shard(_dense(), plan.shard(whole), plan.init_state(), _batch(0))
    dense, tables, state, _ = arguments
    expected = _dense(), jax.tree.map(jnp.asarray, whole), {t.name: jnp.zeros(t.rows) for t in TABLES}
    one_device = jax.jit(whole_step)
    for seed in range(3):
        dense, tables, state, loss = step(dense, tables, state, found.shard(*arguments[:3], _batch(seed))[3])
        *expected, expected_loss = one_device(*expected, _batch(seed))
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    for name in dense:
        np.testing.assert_allclose(dense[name], expected[0][name], rtol=1e-4, atol=1e-5)
    for name, array in plan.unshard(tables).items():
        np.testing.assert_allclose(array, expected[1][name], rtol=1e-4, atol=1e-5)
        assert np.abs(array - whole[name]).max() > 0.05


def test_the_plan_of_the_step_takes_tables_and_their_seconds_from_the_plan_of_tables():
    """Also for devices that are not here; the tables and their updates are what they are without `search`."""
    mesh = AbstractMesh((2, 4), ("data", "model"))
    plan = diffshard.tables.shard_tables(TABLES, mesh, hardware="a100", memory_limit_bytes=800, batch_size=BATCH)
    tables, state = plan.shapes()
    batch = jax.eval_shape(lambda: _batch(0))
    found = diffshard.search(step_with(plan), mesh, hardware="a100").plan(_dense(), tables, state, batch)
    stated_s = [o.compute_s for o in found.operations if "shard_map" in o.signature]
    assert len(stated_s) == 2
    assert sum(stated_s) == pytest.approx(plan.step_s)
    specs = {a.path: a.partition_spec for a in found.arguments}
    assert specs["tables.shards['float32']"] == jax.sharding.PartitionSpec(("data", "model"), None, None)

"""Rows in memory of the host are read and written as if they were on the device, whatever the compiler knows of ids."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from diffshard.tables import host_rows

ROWS, COLUMNS, CHUNK = 20, 4, 4


@pytest.mark.parametrize("ids_are", ["constants", "arguments"])
@pytest.mark.parametrize(
    "ids",
    [[0, -1, 0, -1], [5, 5], [7], [-1, -1, -1], [3, 1, 2], list(range(CHUNK)), [*range(CHUNK), 9], [*range(ROWS)]],
)
def test_fetched_and_changed_rows_equal_those_of_an_array_in_numpy(monkeypatch, ids, ids_are):
    monkeypatch.setattr(host_rows, "CHUNK_ROWS", CHUNK)
    whole = np.random.default_rng(0).normal(size=(ROWS, COLUMNS)).astype(np.float32) + 5
    host = jax.device_put(whole, SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host"))
    unique = np.unique(ids)
    unique = np.where(unique < 0, ROWS, unique)
    changes = np.arange(1.0, 1 + unique.size * COLUMNS, dtype=np.float32).reshape(-1, COLUMNS)

    def run(host, ids, unique):
        return host_rows.fetched_rows(host, jnp.asarray(ids)), host_rows.changed_rows(
            host, jnp.asarray(unique), jnp.asarray(changes)
        )

    arguments = np.array(ids), unique
    if ids_are == "constants":
        fetched, changed = jax.jit(lambda host: run(host, *arguments))(host)
    else:
        fetched, changed = jax.jit(run)(host, *arguments)
    np.testing.assert_array_equal(fetched, np.where(np.array(ids)[:, None] >= 0, whole[np.array(ids)], 0))
    expected = np.append(whole, np.zeros((1, COLUMNS), np.float32), axis=0)
    expected[unique] -= changes
    np.testing.assert_array_equal(changed, expected[:ROWS])
    assert changed.sharding.memory_kind == "pinned_host"

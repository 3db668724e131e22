"""Rows in memory of the host: a device fetches those that are looked up, each once, and brings changed ones back.

A loop copies some rows at a time, as long as there are any left, so that the link to the host carries what a batch
looks up and not what it might. The host gathers and scatters; everything else is computed on the device.

Letters for sizes: A rows in memory of the host, W columns, n lookups.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import compute_on as _compute_on

CHUNK_ROWS = 8192
"""Rows that are copied at a time: some megabytes, so that starting a copy takes little beside it; chosen by hand."""
_compute: Any = (
    getattr(_compute_on, "compute_on2", None) or _compute_on.compute_on
)  # its name until JAX 0.10, and from 0.11 on


@jax.custom_jvp
def fetched_rows(host: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns rows of an array in memory of the host, `[n, W]` on the device; those of ids that are no rows are zeros.

    Args:
      host: `[A, W]`.
      ids: `[n]` integers.
    """
    num_rows, num_ids = host.shape[0], ids.shape[0]
    flat = jnp.where((ids >= 0) & (ids < num_rows), ids, num_rows)
    order = jnp.argsort(flat)
    ordered = flat[order]
    is_new = jnp.concatenate([jnp.ones(1, bool), ordered[1:] != ordered[:-1]])
    place = jnp.cumsum(is_new) - 1
    chunk = min(CHUNK_ROWS, num_ids)
    unique = jnp.full(num_ids + chunk, num_rows, flat.dtype).at[place].min(ordered)
    count = (is_new & (ordered < num_rows)).sum()

    def fetch(index: jax.Array, rows: jax.Array) -> jax.Array:
        wanted = lax.dynamic_slice(unique, (index * chunk,), (chunk,))
        return lax.dynamic_update_slice(rows, _gathered(host, wanted), (index * chunk, 0))

    rows = jnp.zeros((num_ids + chunk, host.shape[1]), host.dtype)
    rows = lax.fori_loop(0, _num_chunks(count, chunk), fetch, rows)
    rows = rows[jnp.zeros(num_ids, place.dtype).at[order].set(place)]
    return jnp.where((flat < num_rows)[:, None], rows, 0)


@fetched_rows.defjvp
def _no_gradient(primals: Any, tangents: Any) -> Any:
    """Raises `ValueError`: a gradient of rows on the host would be as large as all of them."""
    raise ValueError(
        "Tables with rows in memory of the host have no gradient, which would be as large as the tables. Take the "
        "gradient of the pooled rows, and give it to `plan.update`."
    )


def changed_rows(host: jax.Array, ids: jax.Array, changes: jax.Array) -> jax.Array:
    """Subtracts changes from rows of an array in memory of the host.

    Args:
      host: `[A, W]`.
      ids: `[n]` integers, each row once; those from A on are left out.
      changes: `[n, W]` float32.
    """
    num_rows, num_ids = host.shape[0], ids.shape[0]
    order = jnp.argsort(ids)
    chunk = min(CHUNK_ROWS, num_ids)
    ordered = jnp.concatenate([ids[order], jnp.full(chunk, num_rows, ids.dtype)])
    count = (ids < num_rows).sum()
    order = jnp.concatenate([order, jnp.zeros(chunk, order.dtype)])

    def change(index: jax.Array, host: jax.Array) -> jax.Array:
        wanted = lax.dynamic_slice(ordered, (index * chunk,), (chunk,))
        own = changes[lax.dynamic_slice(order, (index * chunk,), (chunk,))]
        rows = (_gathered(host, wanted).astype(jnp.float32) - own).astype(host.dtype)
        return _scattered(host, wanted, rows)

    return lax.fori_loop(0, _num_chunks(count, chunk), change, host)


def _num_chunks(count: jax.Array, chunk: int) -> jax.Array:
    """Returns how often a loop goes round, which its index counts one by one.

    An index of rows, `while start < count: start += chunk`, XLA takes for a loop that never runs where `count` is a
    constant of the program below `chunk`: it computes the number of rounds as `count // chunk`.
    """
    return (count + chunk - 1) // chunk


def _gathered(host: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns rows `[n, W]` on the device; those from A on are any rows."""
    numbers = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))

    def gather(host: jax.Array, rows: jax.Array) -> jax.Array:
        mode = lax.GatherScatterMode.PROMISE_IN_BOUNDS
        return lax.gather(host, rows, numbers, (1, host.shape[1]), mode=mode)

    rows = jnp.minimum(rows, host.shape[0] - 1)[:, None]
    return jax.device_put(_on_host(gather)(host, jax.device_put(rows, jax.memory.Space.Host)), jax.memory.Space.Device)


def _scattered(host: jax.Array, rows: jax.Array, values: jax.Array) -> jax.Array:
    """Writes rows `[n, W]` into memory of the host; those from A on are left out."""
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,)
    )

    def scatter(host: jax.Array, rows: jax.Array, values: jax.Array) -> jax.Array:
        return lax.scatter(host, rows, values, numbers, mode=lax.GatherScatterMode.FILL_OR_DROP)

    return _on_host(scatter)(host, *(jax.device_put(x, jax.memory.Space.Host) for x in (rows[:, None], values)))


def _on_host(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    return _compute(function, compute_type="device_host", out_memory_spaces=jax.memory.Space.Host)

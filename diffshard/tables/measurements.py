"""Measures what pieces of tables take on one device, and what devices take to exchange pooled rows.

Both run the programs of plans: a device's pieces as a plan for this device alone, so that lookups and updates are
those of every plan, and the exchanges of D devices without lookups.

Letters for sizes: D devices, B examples, b = B / D, P ids, W columns.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from cost.base import Hardware
from diffshard.tables.exchanges import Exchanges
from diffshard.tables.layout import Layout
from diffshard.tables.plan import TablePlan
from search_spaces.embedding_tables.base import EVERY_DEVICE, EmbeddingTable, Piece, TableDevices

_AXIS = "tables"
_REPEATS = 7
"""Calls of which the fastest counts."""
_ANY_HARDWARE = Hardware("measured", 1.0, 1.0, 1.0, {})


class MeasuredSeconds(NamedTuple):
    """What was measured.

    Attributes:
      forward_s: seconds of lookups, or of the exchange of ids and pooled rows.
      backward_s: seconds of the update, or of the exchange of ids and gradients.
    """

    forward_s: float
    backward_s: float


def random_ids(table: EmbeddingTable, batch_size: int, rng: np.random.Generator) -> np.ndarray:
    """Draws ids `[B, P]` by the table's `access`, with -1 where an example has fewer than P."""
    whole = int(table.pooling_factor)
    lengths = whole + (rng.random(batch_size) < table.pooling_factor - whole)
    num_ids = max(int(lengths.max(initial=0)), 1)
    access = np.array((1.0,) if table.access is None else table.access)
    part = rng.choice(len(access), (batch_size, num_ids), p=access / access.sum())
    edges = table.rows * np.arange(len(access) + 1) // len(access)
    start, end = edges[part], np.maximum(edges[part + 1], edges[part] + 1)
    ids = np.minimum(start + (rng.random(part.shape) * (end - start)).astype(np.int64), table.rows - 1)
    return np.where(np.arange(num_ids) < lengths[:, None], ids, -1).astype(np.int32)


def device_seconds(
    tables: Sequence[EmbeddingTable], pieces: Sequence[Piece], batch_size: int, device: Any, rng: np.random.Generator
) -> MeasuredSeconds:
    """Measures lookups and update of the pieces on one device, those of a copy for all examples.

    Args:
      tables: that have a piece here, each with at most one piece of the same rows and columns.
      pieces: on this device, or on every device.
      batch_size: B.
      device: a JAX device.
      rng: draws ids.
    """
    pieces = tuple(p if p.device == EVERY_DEVICE else p._replace(device=0) for p in pieces)
    mesh = Mesh(np.array([device]), (_AXIS,), axis_types=(AxisType.Auto,))
    devices = TableDevices((_ANY_HARDWARE,), (np.inf,), 0.0, batch_size, (np.inf,))
    plan = TablePlan(tuple(tables), devices, pieces, ((_AXIS, 1),), 0.0, "finished", 0.0, mesh=mesh)
    shapes = plan.shapes()
    arrays, state = (jax.tree.map(lambda s: jax.device_put(np.full(s.shape, 0.01, s.dtype), device), x) for x in shapes)
    ids = {t.name: jax.device_put(random_ids(t, batch_size, rng), device) for t in tables}
    gradients = {t.name: jax.device_put(np.full((batch_size, t.dimension), 0.01, np.float32), device) for t in tables}
    lookup = jax.jit(plan.lookup)

    update = jax.jit(lambda a, s, i, g: plan.update(a, s, i, g, learning_rate=0.01), donate_argnums=(0, 1))
    kept = [(arrays, state)]

    def call_update() -> Any:
        kept.append(update(*kept.pop(), ids, gradients))
        return kept[0]

    return MeasuredSeconds(least_seconds(lambda: lookup(arrays, ids), [device]), least_seconds(call_update, [device]))


def exchange_seconds(
    columns: Sequence[int], ids: Sequence[int], batch_size: int, devices: Sequence[Any]
) -> MeasuredSeconds:
    """Measures the exchanges between D devices.

    Args:
      columns: of pooled rows that each device sends, `[D]`.
      ids: of one example that each device gets, `[D]`.
      batch_size: B, a multiple of D.
      devices: D JAX devices.
    """
    num_devices = len(devices)
    tables = tuple(EmbeddingTable(f"t{d}", 8, max(c, 1), i) for d, (c, i) in enumerate(zip(columns, ids, strict=True)))
    pieces = tuple(Piece(d, d, 0, 8, 0, table.dimension) for d, table in enumerate(tables))
    exchanges = Exchanges(Layout(tables, pieces, num_devices), (_AXIS,))
    mesh = Mesh(np.array(devices), (_AXIS,), axis_types=(AxisType.Auto,))
    split = PartitionSpec(_AXIS)

    def on_mesh(program: Callable[..., Any]) -> Callable[..., Any]:
        return jax.jit(jax.shard_map(program, mesh=mesh, in_specs=split, out_specs=split, check_vma=False))

    def forward(ids: Mapping[str, jax.Array], weights: Mapping[str, jax.Array], sent: jax.Array) -> Any:
        return exchanges.to_tables(ids, weights), exchanges.to_examples(sent)

    def backward(ids: Mapping[str, jax.Array], weights: Mapping[str, jax.Array], rows: Mapping[str, jax.Array]) -> Any:
        return exchanges.to_tables(ids, weights), exchanges.gradients_to_tables(rows)

    def put(*shape: int, dtype: Any = np.float32) -> jax.Array:
        return jax.device_put(np.ones(shape, dtype), NamedSharding(mesh, split))

    own_ids = {t.name: put(batch_size, max(int(t.pooling_factor), 1), dtype=np.int32) for t in tables}
    weights = {name: put(*array.shape) for name, array in own_ids.items()}
    sent = put(num_devices * batch_size, max(t.dimension for t in tables))
    rows = {t.name: put(batch_size, t.dimension) for t in tables}
    run_forward, run_backward = on_mesh(forward), on_mesh(backward)
    return MeasuredSeconds(
        least_seconds(lambda: run_forward(own_ids, weights, sent), devices),
        least_seconds(lambda: run_backward(own_ids, weights, rows), devices),
    )


def least_seconds(call: Callable[[], Any], devices: Sequence[Any]) -> float:
    """Returns the seconds of the fastest of a few calls, after one that compiles.

    Devices that share a processor are timed by what they take of it together, divided by their number.
    """
    shares_processor = devices[0].platform == "cpu"
    clock = time.process_time if shares_processor else time.perf_counter
    jax.block_until_ready(call())
    seconds = []
    for _ in range(_REPEATS):
        start = clock()
        jax.block_until_ready(call())
        seconds.append(clock() - start)
    return min(seconds) / (len(devices) if shares_processor else 1)

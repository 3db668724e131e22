"""Measures what pieces of tables take on one device, and what devices take to exchange pooled rows.

The samples, random pieces and random exchanges, are what the learned cost is trained on. Both run the programs of
plans: a device's pieces as a plan for this device alone, so that lookups and updates are those of every plan, and the
exchanges of D devices without lookups.

Letters for sizes: N samples, M elements of one sample at most, F features; D devices, B examples, b = B / D, P ids, W
columns.
"""

import datetime
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from cost.base import Hardware
from cost.calibration import call_seconds
from cost.pooled_networks import fit
from cost.real_numbers import whole_number
from diffshard.solving.csr import numpy_generator
from diffshard.tables.checks import checked_key
from diffshard.tables.exchanges import Exchanges
from diffshard.tables.layout import Layout
from diffshard.tables.learned_cost import LearnedTableCost
from diffshard.tables.plan import TablePlan
from search_spaces.embedding_tables.base import EVERY_DEVICE, EmbeddingTable, Piece, TableDevices
from search_spaces.embedding_tables.prices import device_features, piece_features

_PARTS = 16  # of a table, for which accesses are counted
_MOST_BYTES = 2**28
"""What the tables of one sample take at most; larger tables are drawn smaller, so that a sample takes little memory."""
_BATCH_SIZES = (2048, 4096, 8192, 16384)
_MOST_PIECES, _MOST_ROWS_COPIED = 12, 10**4.5


class Samples(NamedTuple):
    """Sets of elements with what they take together.

    Attributes:
      features: of each element of each set, N arrays `[m, F]`.
      forward_s: `[N]`.
      backward_s: `[N]`.
    """

    features: list[np.ndarray]
    forward_s: np.ndarray
    backward_s: np.ndarray


Sample = tuple[np.ndarray, float, float]
"""Features `[m, F]` of a set of elements, and what they take: the fields of `Samples` for one set."""


def device_sample(device: Any, rng: np.random.Generator) -> Sample:
    """Measures random pieces on a device."""
    batch_size = int(rng.choice(_BATCH_SIZES))
    tables, pieces = random_pieces(rng)
    seconds = device_seconds(tables, pieces, batch_size, device, rng)
    features = [piece_features(tables[p.table], p, batch_size, 1) for p in pieces]
    return np.array(features), seconds.forward_s, seconds.backward_s


def exchange_sample(devices: Sequence[Any], rng: np.random.Generator) -> Sample:
    """Measures a random exchange between two or more of the devices."""
    counts = [2**i for i in range(1, len(devices).bit_length()) if 2**i <= len(devices)]
    batch_size, num_devices = int(rng.choice(_BATCH_SIZES)), int(rng.choice(counts))
    columns = _uneven(rng, num_devices, 10 ** rng.uniform(1, 3), 4)
    ids = _uneven(rng, num_devices, 10 ** rng.uniform(0, 2.3), 1)
    seconds = exchange_seconds(columns, ids, batch_size, devices[:num_devices])
    return device_features(columns, ids, batch_size), seconds.forward_s, seconds.backward_s


def random_pieces(rng: np.random.Generator) -> tuple[list[EmbeddingTable], list[Piece]]:
    """Draws tables of many sizes with a piece of each: all of it, some columns or rows, or a copy."""
    count = int(np.exp(rng.uniform(0, np.log(_MOST_PIECES + 1))))
    tables, pieces = [], []
    for i in range(count):
        columns = int(2 ** rng.integers(2, 8))
        rows = int(10 ** rng.uniform(1.5, np.log10(_MOST_BYTES / count / columns / 4)))
        access = None
        if rows >= _PARTS and rng.random() < 0.8:
            rank = np.arange(1, rows + 1) ** -rng.uniform(0.6, 1.2)  # Zipf's law
            access = tuple(part.sum() for part in np.array_split(rank, _PARTS))
        pooling_factor = float(np.clip(rng.lognormal(1.0, 1.2), 1, 100))
        dtype = "bfloat16" if rng.random() < 0.15 else "float32"
        tables.append(EmbeddingTable(f"t{i}", rows, columns, pooling_factor, dtype, access=access))
        pieces.append(_random_piece(tables[i], i, rng))
    return tables, pieces


def _random_piece(table: EmbeddingTable, index: int, rng: np.random.Generator) -> Piece:
    whole, kind = Piece(index, 0, 0, table.rows, 0, table.dimension), rng.random()
    if kind < 0.1 and table.rows <= _MOST_ROWS_COPIED:
        return whole._replace(device=EVERY_DEVICE)
    if kind < 0.35 and table.dimension >= 8:
        width = table.dimension // (4 if table.dimension >= 16 and rng.random() < 0.5 else 2)
        start = width * int(rng.integers(table.dimension // width))
        return whole._replace(column_start=start, column_end=start + width)
    if kind < 0.55:
        parts = int(2 ** rng.integers(1, 4))
        part = int(rng.integers(parts))
        return whole._replace(row_start=table.rows * part // parts, row_end=table.rows * (part + 1) // parts)
    return whole


def _uneven(rng: np.random.Generator, num_devices: int, mean: float, multiple: int) -> list[int]:
    """Draws sizes of devices that are more or less alike."""
    shares = rng.dirichlet(np.full(num_devices, 10 ** rng.uniform(0, 2))) * num_devices
    return [max(round(share * mean / multiple), 1) * multiple for share in shares]


_AXIS = "tables"
_REPEATS = 7
"""Calls of which the fastest counts."""
_ANY_HARDWARE = Hardware("measured", 1.0, 1.0, 1.0, {})


class MeasuredSeconds(NamedTuple):
    """The measured seconds of one case.

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
    return min(call_seconds(call, _REPEATS, clock)) / (len(devices) if shares_processor else 1)


_MEASURED = "host_tables.npz"
"""The cost that comes with the package, learned by `python -m experiments.embedding_tables.learned --learn`."""
LEAST_SAMPLES = 10


def learn_table_cost(
    devices: Sequence[Any] | None = None,
    *,
    num_samples: int = 600,
    num_exchanges: int = 400,
    key: jax.Array | int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> LearnedTableCost:
    """Measures random pieces of tables on a device, and random exchanges between devices, and trains networks on them.

    A sample takes about 3 seconds, most of them for compiling, and up to a few GiB of the device's memory. The cost
    serves any tables on devices of this kind after that; `cost.save` keeps it. Host devices share cores, so that they
    are timed by what they take of the processor.

    >>> cost = learn_table_cost()
    >>> plan = shard_tables(tables, mesh, cost=cost)

    Args:
      devices: JAX devices of one kind; pieces are measured on the first. None takes all of this process.
      num_samples: random sets of pieces.
      num_exchanges: random exchanges between 2, 4, 8, ... of the devices; one device measures none.
      key: draws the samples and the first weights.
      progress: called as `progress(samples, of)` after each sample.

    Raises:
      TypeError, ValueError: an argument breaks its rule; the error names it and its value.
    """
    devices = list(jax.local_devices() if devices is None else devices)
    if not devices or not all(isinstance(device, jax.Device) for device in devices):
        raise TypeError(f"`devices` must be a list of JAX devices, not {devices!r}.")
    kinds = sorted({device.device_kind for device in devices})
    if len(kinds) > 1:
        raise ValueError(f"`devices` must be of one kind, not of {', '.join(kinds)}; learn a cost for each kind.")
    for name, number in (("num_samples", num_samples), ("num_exchanges", num_exchanges)):
        if (whole_number(number) or 0) < LEAST_SAMPLES:
            raise ValueError(f"`{name}` must be a whole number of at least {LEAST_SAMPLES}, not {number!r}.")
    if progress is not None and not callable(progress):
        raise TypeError(f"`progress` must be a function of two numbers, not {progress!r}.")
    key = checked_key(key)
    rng, done = numpy_generator(key), itertools.count(1)
    total = num_samples + (num_exchanges if len(devices) > 1 else 0)

    def samples(count: int, measure: Callable[[], Sample]) -> Samples:
        found = []
        for _ in range(count):
            found.append(measure())
            if progress is not None:
                progress(next(done), total)
        features, forward_s, backward_s = zip(*found, strict=True)
        return Samples(list(features), np.array(forward_s), np.array(backward_s))

    pieces = samples(num_samples, lambda: device_sample(devices[0], rng))
    exchanges = samples(num_exchanges, lambda: exchange_sample(devices, rng)) if len(devices) > 1 else None
    return trained_cost(pieces, exchanges, devices, key)


def trained_cost(
    pieces: Samples, exchanges: Samples | None, devices: Sequence[Any], key: jax.Array
) -> LearnedTableCost:
    """Trains networks on samples that were measured on devices; `key` draws the first weights."""
    keys = iter(jax.random.split(key, 4))
    networks = {
        "lookups": fit(pieces.features, pieces.forward_s, next(keys)),
        "updates": fit(pieces.features, pieces.backward_s, next(keys)),
        "row_exchange": exchanges and fit(exchanges.features, exchanges.forward_s, next(keys)),
        "gradient_exchange": exchanges and fit(exchanges.features, exchanges.backward_s, next(keys)),
    }
    return LearnedTableCost(
        device=devices[0].device_kind,
        date=datetime.date.today().isoformat(),
        jax_version=jax.__version__,
        num_devices=len(devices),
        **networks,
    )


def host_table_cost() -> LearnedTableCost:
    """Returns the cost that comes with the package, learned on host devices of one machine, a virtual one with 2 cores.

    It shows what a learned cost does, and plans tests on CPUs; for other devices, `learn_table_cost` measures.
    """
    with resources.as_file(resources.files("diffshard.tables").joinpath(_MEASURED)) as path:
        return LearnedTableCost.load(path)

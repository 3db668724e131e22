"""Checks of what a plan of embedding tables is given.

Letters for sizes: D devices, B examples, P ids.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from cost.real_numbers import real_number
from diffshard.solving.solve import check_key, random_key
from diffshard.tables.arrays import NO_ID, TableArrays
from search_spaces.embedding_tables.base import EmbeddingTable


def checked_arrays(tables: Sequence[EmbeddingTable], arrays: Mapping[str, Any]) -> list[np.ndarray]:
    """Returns whole tables in the order of the plan; raises `ValueError` where one does not fit."""
    _check_names("tables", tables, arrays)
    checked = []
    for table in tables:
        array = np.asarray(arrays[table.name])
        if array.shape != (table.rows, table.dimension) or array.dtype != jnp.dtype(table.dtype):
            raise ValueError(
                f"`tables[{table.name!r}]` must be {table.dtype}[{table.rows},{table.dimension}], as it was planned, "
                f"not {array.dtype}{list(array.shape)}."
            )
        checked.append(array)
    return checked


def checked_ids(
    tables: Sequence[EmbeddingTable], num_devices: int, ids: Mapping[str, Any], weights: Mapping[str, Any] | None
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Returns ids as int32 and weights as float32; raises `ValueError` where they do not fit the tables."""
    _check_names("ids", tables, ids)
    checked, batch_sizes = {}, {}
    for table in tables:
        given = ids[table.name]  # on the host with 64 bits, which JAX would cut
        own = given if isinstance(given, jax.Array) else np.asarray(given)
        if own.ndim != 2 or not jnp.issubdtype(own.dtype, jnp.integer):
            raise ValueError(
                f"`ids[{table.name!r}]` must be integers `[B, P]`, not {own.dtype}{list(own.shape)}; `padded_ids` "
                "makes them of ragged ids."
            )
        batch_sizes[table.name] = own.shape[0]
        _check_range(table, own)
        if isinstance(own, Tracer) and own.dtype.itemsize > 4:  # which the cast would cut to rows
            own = jnp.where((own >= 0) & (own < table.rows), own, NO_ID)
        checked[table.name] = jnp.asarray(own, jnp.int32)
    batch_size = next(iter(batch_sizes.values()))
    other = next((name for name, size in batch_sizes.items() if size != batch_size), None)
    if other is not None:
        raise ValueError(f"`ids[{other!r}]` has {batch_sizes[other]} examples, others have {batch_size}.")
    if batch_size % num_devices:
        raise ValueError(f"`ids` have {batch_size} examples, which {num_devices} devices do not divide.")
    weights = dict(weights or {})
    _check_known("weights", tables, weights)
    for name, array in weights.items():
        weights[name] = jnp.asarray(array, jnp.float32)
        if weights[name].shape != checked[name].shape:
            raise ValueError(
                f"`weights[{name!r}]` must have the shape of its ids, {checked[name].shape}, not {weights[name].shape}."
            )
    for name, own in checked.items():
        if not own.shape[1]:  # XLA's partitioner refuses arrays of no numbers
            checked[name] = jnp.full((batch_size, 1), NO_ID, jnp.int32)
            weights.pop(name, None)
    return checked, weights


def checked_gradients(
    tables: Sequence[EmbeddingTable], ids: Mapping[str, jax.Array], gradients: Mapping[str, Any]
) -> dict[str, jax.Array]:
    """Returns gradients of pooled rows; raises `ValueError` where they do not fit the tables and ids."""
    _check_names("gradients", tables, gradients)
    for table in tables:
        expected, shape = (ids[table.name].shape[0], table.dimension), np.shape(gradients[table.name])
        if shape != expected:
            raise ValueError(f"`gradients[{table.name!r}]` must have the shape {expected}, not {shape}.")
    return {table.name: jnp.asarray(gradients[table.name]) for table in tables}


def checked_rates(learning_rate: Any, epsilon: Any) -> tuple[jax.Array, float]:
    """Returns the learning rate as float32 and epsilon; raises where they are no numbers that fit.

    The number of a JAX array is not looked at: that would wait for the device.
    """
    own_dtype = getattr(learning_rate, "dtype", None)
    is_number = real_number(learning_rate) is not None or (
        own_dtype is not None and (jnp.issubdtype(own_dtype, jnp.floating) or jnp.issubdtype(own_dtype, jnp.integer))
    )
    if not is_number:
        raise TypeError(f"`learning_rate` must be a number or an array of one, not {learning_rate!r}.")
    if np.shape(learning_rate) != ():
        raise ValueError(
            f"`learning_rate` must be one number for all tables, not an array of shape {np.shape(learning_rate)}."
        )
    if not isinstance(learning_rate, jax.Array) and not np.isfinite(learning_rate):
        raise ValueError(f"`learning_rate` must be finite, not {learning_rate!r}.")
    number = real_number(epsilon)
    if number is None or not 0 < number < math.inf:
        raise ValueError(
            f"`epsilon` must be a positive finite number, not {epsilon!r}; it keeps rows from being divided by zero."
        )
    return jnp.asarray(learning_rate, jnp.float32), number


def checked_key(key: Any) -> jax.Array:
    """Returns a random key, made of a seed if it is one; raises `ValueError` for anything else."""
    check_key(key)
    return random_key(key)


def check_shapes(expected: tuple[TableArrays, TableArrays], arrays: Any, *state: Any) -> None:
    """Checks that tables, and the optimiser's state if it is given, are arrays of the plan."""
    makers = ("arrays", "`plan.init` or `plan.shard`"), ("state", "`plan.init_state`")
    for (argument, maker), shapes, given in zip(makers, expected, (arrays, *state), strict=False):
        if not isinstance(given, TableArrays):
            raise TypeError(f"`{argument}` must be what {maker} returns, not {type(given).__name__}.")
        own, wanted = ({p: np.shape(x) for p, x in _by_path(one).items()} for one in (given, shapes))
        if own != wanted:
            path = next(p for p in (*own, *wanted) if own.get(p) != wanted.get(p))
            raise ValueError(
                f"`{argument}` must be what {maker} returns for this plan, in which {path} is "
                f"{wanted.get(path, 'not there')}, not {own.get(path, 'missing')}."
            )


def _by_path(arrays: TableArrays) -> dict[str, Any]:
    return {f"`{part}[{name!r}]`": x for part, own in arrays._asdict().items() for name, x in own.items()}


def _check_range(table: EmbeddingTable, ids: jax.Array | np.ndarray) -> None:
    """Raises `ValueError` for ids that are no rows, where the ids are known."""
    if isinstance(ids, Tracer) or not ids.size:
        return
    with jax.ensure_compile_time_eval():  # ids that are known inside of `jax.jit` are checked as well
        least, most = int(ids.min()), int(ids.max())
    if least < NO_ID or most >= table.rows:
        wrong = most if most >= table.rows else least
        raise ValueError(
            f"`ids[{table.name!r}]` has the id {wrong}; rows are 0 to {table.rows - 1}, and {NO_ID} stands for no id."
        )


def _check_names(argument: str, tables: Sequence[EmbeddingTable], given: Iterable[str]) -> None:
    missing = [table.name for table in tables if table.name not in given]
    if missing:
        raise ValueError(f"`{argument}` lacks the table {missing[0]!r}; it must have all {len(tables)} of the plan.")
    _check_known(argument, tables, given)


def _check_known(argument: str, tables: Sequence[EmbeddingTable], given: Iterable[str]) -> None:
    names = [table.name for table in tables]
    unknown = [name for name in given if name not in names]
    if unknown:
        raise ValueError(f"`{argument}` has {unknown[0]!r}, which is no table of the plan; it has {', '.join(names)}.")

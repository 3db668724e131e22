"""What devices send each other around their lookups: ids and weights, pooled rows, and gradients of pooled rows.

    ids to the devices of their tables → [lookups] → pooled rows to the devices of their examples

Parts for one device are joined, and filled up to the size of the largest, because an all-to-all sends equal parts.

Letters for sizes: D devices, b examples of one device, B = D · b, P ids, W columns.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from diffshard.tables.arrays import NO_ID
from diffshard.tables.layout import Layout

Arrays = Mapping[str, jax.Array]


class Looked(NamedTuple):
    """The ids of a device's own tables for the whole batch.

    Attributes:
      ids: by table, `[B, P]`.
      weights: by table, `[B, P]` float32.
    """

    ids: dict[int, jax.Array]
    weights: dict[int, jax.Array]


class Exchanges:
    """The exchanges of one device's program.

    Args:
      axes: names of the mesh's axes; the devices are numbered row-major.
    """

    def __init__(self, layout: Layout, axes: tuple[str, ...]):
        self._layout, self._axes = layout, axes

    def to_tables(self, ids: Arrays, weights: Arrays) -> tuple[jax.Array, jax.Array]:
        """Sends ids and weights to the devices of their tables, where they become `[B, P of all its tables]`."""
        layout = self._layout
        results = []
        for arrays, filler in ((ids, NO_ID), (weights, 0)):
            rows = [
                [arrays[layout.tables[t].name] for t in layout.tables_on(device)]
                for device in range(layout.num_devices)
            ]
            results.append(_joined_batch(self._exchange(_stacked(rows, next(iter(arrays.values())), filler))))
        return results[0], results[1]

    def to_examples(self, sent: jax.Array) -> jax.Array:
        """Sends pooled rows `[B, W]` to the devices of their examples, which get `[D, b, W]`."""
        num_devices = self._layout.num_devices
        return self._exchange(sent.reshape(num_devices, sent.shape[0] // num_devices, sent.shape[1]))

    def gradients_to_tables(self, gradients: Arrays) -> jax.Array:
        """Sends gradients of pooled rows the other way, where they become `[B, W]`."""
        layout = self._layout
        rows = [
            [gradients[layout.tables[t].name][:, start:end].astype(jnp.float32) for t, start, end in columns]
            for columns in layout.sent
        ]
        some = next(iter(gradients.values())).astype(jnp.float32)
        return _joined_batch(self._exchange(_stacked(rows, some, 0, layout.sent_columns)))

    def joined(self, received: jax.Array, index: int) -> jax.Array:
        """Puts the pooled columns of one table together, and adds those of its rows on several devices."""
        parts = []
        for device, columns in enumerate(self._layout.sent):
            first = 0
            for t, start, end in columns:
                if t == index:
                    parts.append((start, received[device, :, first : first + end - start]))
                first += end - start
        return in_columns(parts, received.shape[1], self._layout.tables[index].dimension)

    def looked(self, device: int, widths: Arrays, ids: jax.Array, weights: jax.Array) -> Looked:
        """Takes the ids `[B, P of all tables]` of a device's tables apart."""
        own_ids, own_weights, start = {}, {}, 0
        for t in self._layout.tables_on(device):
            end = start + widths[self._layout.tables[t].name].shape[1]
            own_ids[t], own_weights[t] = ids[:, start:end], weights[:, start:end]
            start = end
        return Looked(own_ids, own_weights)

    def _exchange(self, parts: jax.Array) -> jax.Array:
        """Sends part d of `[D, b, ...]` to device d, and returns what the devices sent, `[D, b, ...]`."""
        if self._layout.num_devices == 1 or not parts.size:
            return parts
        return lax.all_to_all(parts, self._axes, 0, 0, tiled=True)


def in_columns(parts: Sequence[tuple[int, jax.Array]], num_rows: int, width: int) -> jax.Array:
    """Returns `[num_rows, width]` float32 with parts in their columns, those of the same columns added up.

    Parts of other columns lie side by side: to add each, filled up to the width, would take as many passes as parts.

    Args:
      parts: first columns, with arrays `[num_rows, n]`.
      width: its columns; those without a part are 0.
    """
    sums: dict[tuple[int, int], jax.Array] = {}
    for start, part in parts:
        span = start, start + part.shape[1]
        sums[span] = sums[span] + part if span in sums else part
    layers: list[list[tuple[int, int]]] = [[]]  # spans of a layer do not overlap
    for span in sorted(sums):
        layer = next((own for own in layers if not own or own[-1][1] <= span[0]), None)
        if layer is None:
            layers.append(layer := [])
        layer.append(span)

    def side_by_side(layer: list[tuple[int, int]]) -> jax.Array:
        pieces, end = [], 0
        for span in [*layer, (width, width)]:
            pieces += [jnp.zeros((num_rows, span[0] - end), jnp.float32), *([sums[span]] if span in sums else [])]
            end = span[1]
        return jnp.concatenate(pieces, axis=1)

    return sum(map(side_by_side, layers[1:]), side_by_side(layers[0]))


def joined_columns(parts: Sequence[jax.Array], num_rows: int, width: int, dtype: Any, filler: int) -> jax.Array:
    """Joins arrays `[num_rows, ...]` to one `[num_rows, width]`, filled up."""
    missing = width - sum(part.shape[1] for part in parts)
    return jnp.concatenate([*parts, jnp.full((num_rows, missing), filler, dtype)], axis=1)


def _joined_batch(received: jax.Array) -> jax.Array:
    return received.reshape(received.shape[0] * received.shape[1], received.shape[2])


def _stacked(rows: Sequence[Sequence[jax.Array]], like: jax.Array, filler: int, width: int | None = None) -> jax.Array:
    """Returns `[D, b, width]` from arrays `[b, ...]` for each device, which are joined and filled up."""
    if width is None:
        width = max(sum(array.shape[1] for array in arrays) for arrays in rows)
    return jnp.stack([joined_columns(arrays, like.shape[0], width, like.dtype, filler) for arrays in rows])

"""The cost of placements that networks have learned from measured ones.

Lookups and updates of a device are priced by what all its pieces are together, and exchanges by what all devices send:

    J = max_d F_d + max_d B_d + X + Y

with lookups F, updates B, the exchange X of ids and pooled rows, and the exchange Y of their gradients. Gradients of
copies, and rows in memory of hosts, are priced by bytes as in `search_spaces.embedding_tables.prices`.

Letters for sizes: D devices.

Source: Zha et al., "NeuroShard" (MLSys 2023), section 3.2: networks for what devices compute and for each exchange.
"""

import dataclasses
import io
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from cost.embedding_tables import BACKWARD_FACTOR, copy_reduction_s
from cost.pooled_networks import PooledNetwork, check_network
from cost.real_numbers import Amount, Count
from diffshard.files import write_whole
from diffshard.plans.json_values import MisfitError, from_json_values
from search_spaces.embedding_tables.base import (
    DEVICE,
    EVERY_DEVICE,
    HOST,
    DecodedTables,
    EmbeddingTable,
    Piece,
    TableDevices,
)
from search_spaces.embedding_tables.prices import (
    NUM_DEVICE_FEATURES,
    NUM_PIECE_FEATURES,
    decoded,
    device_features,
    piece_features,
    price_of,
    sent_columns,
)

_NETWORKS = ("lookups", "updates", "row_exchange", "gradient_exchange")
_FORMAT, _VERSION = "diffshard learned cost of embedding tables", 1


class LearnedPrediction(NamedTuple):
    """The seconds of a placement by a learned cost.

    Attributes:
      forward_s: seconds of each device's lookups, `[D]`.
      rest_s: seconds of each device's exchanges and update, `[D]`.
    """

    source: str
    forward_s: tuple[Amount, ...]
    rest_s: tuple[Amount, ...]

    def of_part(self, part: float) -> tuple[float, float]:
        """Returns the seconds of lookups and of the rest, in proportion to the part of the examples."""
        return part * max(self.forward_s), part * max(self.rest_s)

    def in_place_of(self, by_bytes: DecodedTables) -> DecodedTables:
        """Returns a placement that was priced by bytes with these seconds."""
        return by_bytes._replace(forward_s=np.array(self.forward_s), rest_s=np.array(self.rest_s))


@dataclass(frozen=True)
class LearnedTableCost:
    """Networks that predict what placements of embedding tables take; made by `learn_table_cost`.

    Attributes:
      device: the kind of device that was measured.
      date: of the measurement.
      jax_version: with which it was made.
      num_devices: that were there; exchanges of more are an extrapolation.
      lookups: seconds of the lookups of a device's pieces.
      updates: seconds of the update of a device's pieces.
      row_exchange: seconds in which ids and pooled rows are exchanged; None after one device was measured.
      gradient_exchange: seconds in which ids and gradients are exchanged; None likewise.
    """

    device: str
    date: str
    jax_version: str
    num_devices: Count
    lookups: PooledNetwork
    updates: PooledNetwork
    row_exchange: PooledNetwork | None
    gradient_exchange: PooledNetwork | None

    def __post_init__(self):
        if (self.row_exchange is None) != (self.gradient_exchange is None):
            raise ValueError("`row_exchange` and `gradient_exchange` are both measured or neither is.")

    def decoded(
        self, tables: Sequence[EmbeddingTable], pieces: Sequence[Piece], devices: TableDevices
    ) -> DecodedTables:
        """Returns pieces of all tables with what they cost each device."""
        num_devices = devices.num_devices
        features: list[list[list[float]]] = [[] for _ in range(num_devices)]
        forward_s, rest_s = (np.zeros(num_devices) for _ in range(2))
        for piece in pieces:
            table = tables[piece.table]
            own = piece_features(table, piece, devices.batch_size, num_devices)
            forward_s += (added_s := piece_added_s(table, piece, devices))[0]
            rest_s += added_s[1]
            for device in range(num_devices) if piece.device == EVERY_DEVICE else (piece.device,):
                features[device].append(own)
        for device, own in enumerate(features):
            if own:
                forward_s[device] += self.lookups.seconds(self.lookups.embeddings(own).sum(0))
                rest_s[device] += self.updates.seconds(self.updates.embeddings(own).sum(0))
        columns, ids = device_sums(tables, pieces, num_devices)
        exchanged_s = self.exchanged_s(columns, ids, devices.batch_size)
        by_bytes = decoded(tables, pieces, devices)
        return by_bytes._replace(forward_s=forward_s, rest_s=rest_s + sum(exchanged_s))

    def prediction(
        self, tables: Sequence[EmbeddingTable], pieces: Sequence[Piece], devices: TableDevices
    ) -> LearnedPrediction:
        """Returns the seconds of `decoded` with their source, as a plan keeps them."""
        found = self.decoded(tables, pieces, devices)
        source = f"{self.num_devices} measured devices of kind {self.device!r}, {self.date}, JAX {self.jax_version}"
        return LearnedPrediction(source, tuple(found.forward_s.tolist()), tuple(found.rest_s.tolist()))

    def exchanged_s(self, columns: ArrayLike, ids: ArrayLike, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the seconds of both exchanges, `[...]`; arguments are those of `device_features`."""
        if self.row_exchange is None or self.gradient_exchange is None or np.shape(columns)[-1] == 1:
            return np.zeros(np.shape(columns)[:-1]), np.zeros(np.shape(columns)[:-1])
        features = device_features(columns, ids, batch_size)
        networks = self.row_exchange, self.gradient_exchange
        rows_s, gradients_s = (n.seconds(n.embeddings(features).sum(-2)) for n in networks)
        return rows_s, gradients_s

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the networks as a file of arrays, which is replaced whole or not at all.

        Raises:
          OSError: the file cannot be written.
        """
        facts = {"format": _FORMAT, "version": _VERSION}
        facts |= {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in _NETWORKS}
        arrays: dict[str, np.ndarray] = {"facts": np.array(json.dumps(facts))}
        for name in _NETWORKS:
            network = getattr(self, name)
            for key, array in _named_arrays(network).items() if network else ():
                arrays[f"{name}.{key}"] = np.asarray(array, np.float32)
        content = io.BytesIO()
        np.savez_compressed(content, **arrays)  # pyright: ignore[reportArgumentType]
        write_whole(path, content.getvalue())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "LearnedTableCost":
        """Reads what `save` wrote.

        Raises:
          ValueError: the file is no such cost, or is damaged.
          OSError: the file cannot be read.
        """
        with open(path, "rb") as file:
            content = file.read()
        try:
            with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
                facts = json.loads(str(arrays["facts"]))
                if (facts.pop("format"), repr(facts.pop("version"))) != (_FORMAT, repr(_VERSION)):
                    raise ValueError("it is another kind of file, or of another version")
                facts |= {name: _network_of(arrays, name) for name in _NETWORKS}
                return from_json_values(cls, facts, {PooledNetwork: _given, PooledNetwork | None: lambda own: own})
        except Exception as error:  # readers of zip files and of arrays raise many kinds for damaged bytes
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"`{os.fspath(path)}` is not a learned cost of embedding tables: {reason}.") from None


def _named_arrays(network: PooledNetwork) -> dict[str, Any]:
    layers = {f"{kind}.{i}": array for kind in ("weights", "biases") for i, array in enumerate(getattr(network, kind))}
    return {"centre": network.centre, "scale": network.scale, "unit_s": network.unit_s, **layers}


def _network_of(arrays: Any, name: str) -> PooledNetwork | None:
    """Reads a network; None if it is not there.

    Raises:
      KeyError, ValueError: it lacks a part, or is none.
    """
    if not any(key.startswith(f"{name}.") for key in arrays):
        return None
    layers = {kind: tuple(arrays[f"{name}.{kind}.{i}"] for i in range(4)) for kind in ("weights", "biases")}
    unit_s = float(arrays[f"{name}.unit_s"])
    network = PooledNetwork(arrays[f"{name}.centre"], arrays[f"{name}.scale"], **layers, unit_s=unit_s)
    check_network(network, NUM_DEVICE_FEATURES if name.endswith("exchange") else NUM_PIECE_FEATURES)
    return network


def _given(network: PooledNetwork | None) -> PooledNetwork:
    if network is None:
        raise MisfitError("is not there")
    return network


def piece_added_s(table: EmbeddingTable, piece: Piece, devices: TableDevices) -> np.ndarray:
    """Returns seconds of a piece that networks do not see, forward and rest, `[2, D]`."""
    added_s = np.zeros((2, devices.num_devices))
    if piece.device == EVERY_DEVICE:
        added_s[1] = copy_reduction_s(piece.rows, piece.columns, devices.links)
    elif piece.memory == HOST:
        fetched, in_memory = (price_of(table, [p], devices) for p in (piece, piece._replace(memory=DEVICE)))
        added_s[0] = fetched.forward_s - in_memory.forward_s
        added_s[1] = BACKWARD_FACTOR * added_s[0]
    return added_s


def device_sums(tables: Sequence[EmbeddingTable], pieces: Sequence[Piece], num_devices: int) -> np.ndarray:
    """Returns the columns of pooled rows that each device sends, and the ids of an example that it gets, `[2, D]`."""
    columns, ids = sums = np.zeros((2, num_devices))
    for device, count in sent_columns(tables, pieces):
        columns[device] += count
    for device, table in {(p.device, p.table) for p in pieces if p.device != EVERY_DEVICE}:
        ids[device] += math.ceil(tables[table].pooling_factor)
    return sums

"""What others do with embedding tables: random and greedy placements, and NeuroShard's beam search.

All of them split by columns only, and are priced as our own placements are.

Source: Zha et al., "NeuroShard" (MLSys 2023), algorithms 1 and 2, with k = 3 and depth 10.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from search_spaces.embedding_tables.base import EmbeddingTable, Piece, TableDevices
from search_spaces.embedding_tables.prices import piece_bytes, price_of
from search_spaces.embedding_tables.strategies import WIDTH_MULTIPLE

_BEAM_WIDTH, _DEPTH, _CANDIDATES = 3, 10, 10
_CAPS = tuple(1.0 + 0.05 * i for i in range(11))


class Part(NamedTuple):
    """Some columns of a table, on equal devices.

    Attributes:
      table: its index.
      columns: how many.
      forward_s: seconds of its forward lookups.
      rest_s: of exchanges and backward pass.
      num_bytes: with the optimiser's state.
    """

    table: int
    columns: int
    forward_s: float
    rest_s: float
    num_bytes: int

    @property
    def cost_s(self) -> float:
        """All its seconds."""
        return self.forward_s + self.rest_s


Score = Callable[[EmbeddingTable], float]
SCORES: dict[str, Score] = {
    "greedy, dimension": lambda table: table.dimension,
    "greedy, size": lambda table: table.num_bytes,
    "greedy, lookups": lambda table: table.dimension * table.pooling_factor,
    "greedy, size and lookups": lambda t: t.dimension * t.pooling_factor * math.log10(max(t.rows, 2)),
}


def random_s(tables: Sequence[EmbeddingTable], devices: TableDevices, seed: int) -> float:
    """Returns the seconds of whole tables on random devices that have room; inf if a table finds none."""
    rng = np.random.default_rng(seed)
    parts = [whole(table, i, devices) for i, table in enumerate(tables)]
    placed = Placed(devices)
    for i in rng.permutation(len(parts)):
        fits = placed.with_room(parts[i])
        if not fits:
            return math.inf
        placed.put(parts[i], int(rng.choice(fits)))
    return placed.step_s


def greedy_s(tables: Sequence[EmbeddingTable], devices: TableDevices, score: Score) -> float:
    """Returns the seconds of `greedy`; inf if a table finds no room."""
    placed = greedy(tables, devices, score)
    return math.inf if placed is None else placed.step_s


def greedy(tables: Sequence[EmbeddingTable], devices: TableDevices, score: Score) -> "Placed | None":
    """Puts whole tables, each on the device of least score so far; returns None if one finds no room."""
    parts = [whole(table, i, devices) for i, table in enumerate(tables)]
    placed, total = Placed(devices), [0.0] * devices.num_devices
    for i in sorted(range(len(parts)), key=lambda i: -score(tables[i])):
        fits = placed.with_room(parts[i])
        if not fits:
            return None
        device = min(fits, key=total.__getitem__)
        total[device] += score(tables[i])
        placed.put(parts[i], device)
    return placed


class Prices:
    """The costs of parts, each by itself: their bytes and bandwidths."""

    def __init__(self, tables: Sequence[EmbeddingTable], devices: TableDevices):
        self.tables, self.devices = tables, devices

    def part(self, index: int, columns: int) -> Part:
        """Returns some columns of a table."""
        return _part(self.tables[index], index, columns, self.devices)

    def placed(self) -> "Placed":
        """Returns devices without parts."""
        return Placed(self.devices)


def beam_s(tables: Sequence[EmbeddingTable], devices: TableDevices, depth: int = _DEPTH) -> float:
    """Returns the seconds of `beam`; inf if nothing fits."""
    placed = beam(tables, devices, depth)
    return math.inf if placed is None else placed.step_s


def beam(tables: Sequence[EmbeddingTable], devices: TableDevices, depth: int = _DEPTH) -> "Placed | None":
    """Returns the placement of `beam_placed` where parts are priced by their bytes; None if nothing fits."""
    return beam_placed(Prices(tables, devices), depth)


def beam_placed(prices: Prices, depth: int = _DEPTH) -> "Placed | None":
    """Returns the best placement that NeuroShard's beam search finds, None if none fits.

    Each step splits one of the 10 largest or 10 costliest parts of each kept list in halves, and places each new list
    greedily under 11 caps.
    """
    kept = [[prices.part(i, table.dimension) for i, table in enumerate(prices.tables)]]
    best = kept[0]
    best_s = _placed_s(best, prices)
    halves: dict[tuple[int, int], Part] = {}
    for _ in range(depth):
        scored = []
        for parts in kept:
            for i in _candidates(parts):
                key = parts[i].table, parts[i].columns // 2
                if key not in halves:
                    halves[key] = prices.part(*key)
                split = [*parts[:i], *parts[i + 1 :], halves[key], halves[key]]
                scored.append((_placed_s(split, prices), len(scored), split))
        if not scored:
            break
        scored.sort()
        kept = [split for _, _, split in scored[:_BEAM_WIDTH]]
        if scored[0][0] < best_s:
            best_s, _, best = scored[0]
    return min(_placed(best, prices), key=lambda one: math.inf if one is None else one.step_s)


def whole(table: EmbeddingTable, index: int, devices: TableDevices) -> Part:
    """Returns a whole table as one part."""
    return _part(table, index, table.dimension, devices)


def _part(table: EmbeddingTable, index: int, columns: int, devices: TableDevices) -> Part:
    price = price_of(table, [Piece(index, 0, 0, table.rows, 0, columns)], devices)
    return Part(index, columns, price.forward_s[0], price.rest_s[0], piece_bytes(table, table.rows, columns))


def _candidates(parts: Sequence[Part]) -> list[int]:
    """Returns the parts that are worth a split: the largest and the costliest ones of those that can be split."""
    can_split = [i for i, part in enumerate(parts) if part.columns % (2 * WIDTH_MULTIPLE) == 0]
    largest = sorted(can_split, key=lambda i: -parts[i].num_bytes)[:_CANDIDATES]
    costliest = sorted(can_split, key=lambda i: -parts[i].cost_s)[:_CANDIDATES]
    return sorted({*largest, *costliest})


def _placed_s(parts: Sequence[Part], prices: Prices) -> float:
    """Returns the seconds of the best greedy placement over caps on the columns of a device; inf if none fits."""
    return min(math.inf if placed is None else placed.step_s for placed in _placed(parts, prices))


def _placed(parts: Sequence[Part], prices: Prices) -> Iterator["Placed | None"]:
    """Yields the greedy placement under each cap on the columns of a device; None where a part finds no room."""
    ordered = sorted(parts, key=lambda part: -part.cost_s)
    mean = sum(part.columns for part in parts) / prices.devices.num_devices
    return (_capped(ordered, prices, cap * mean) for cap in _CAPS)


def _capped(ordered: Sequence[Part], prices: Prices, most_columns: float) -> "Placed | None":
    num_devices = prices.devices.num_devices
    placed, all_devices = prices.placed(), range(num_devices)
    room = placed.room
    cost, columns = ([0.0] * num_devices for _ in range(2))
    for part in ordered:
        least, device = math.inf, -1
        for d in all_devices:
            if cost[d] < least and room[d] >= part.num_bytes and columns[d] + part.columns <= most_columns:
                least, device = cost[d], d
        if device < 0:
            return None
        placed.put(part, device)
        cost[device] = placed.cost_s(device)
        columns[device] += part.columns
    return placed


class Placed:
    """Parts of tables that are on devices: their seconds `forward_s` and `rest_s`, and bytes of `room` left, `[D]`."""

    def __init__(self, devices: TableDevices):
        self.limits, self.room = devices.memory_limit_bytes, list(devices.memory_limit_bytes)
        self.forward_s, self.rest_s = ([0.0] * devices.num_devices for _ in range(2))

    def with_room(self, part: Part) -> list[int]:
        """Returns the devices that a part fits."""
        return [d for d, room in enumerate(self.room) if room >= part.num_bytes]

    def put(self, part: Part, device: int) -> None:
        """Puts a part on a device."""
        self.forward_s[device] += part.forward_s
        self.rest_s[device] += part.rest_s
        self.room[device] -= part.num_bytes

    def cost_s(self, device: int) -> float:
        """Returns the seconds of all parts on a device."""
        return self.forward_s[device] + self.rest_s[device]

    @property
    def step_s(self) -> float:
        """The seconds of a step."""
        return max(self.forward_s) + max(self.rest_s)

    @property
    def device_bytes(self) -> list[float]:
        """The bytes that each device holds, `[D]`."""
        return [limit - room for limit, room in zip(self.limits, self.room, strict=True)]

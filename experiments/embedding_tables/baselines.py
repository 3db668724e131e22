"""What others do with embedding tables: random and greedy placements, and NeuroShard's beam search.

All of them split by columns only, and are priced as our own placements are.

Source: Zha et al., "NeuroShard" (MLSys 2023), algorithms 1 and 2, with k = 3 and depth 10.
"""

import math
from collections.abc import Callable, Sequence
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
    room = list(devices.memory_limit_bytes)
    forward, rest = [0.0] * len(room), [0.0] * len(room)
    for i in rng.permutation(len(parts)):
        fits = [d for d in range(len(room)) if room[d] >= parts[i].num_bytes]
        if not fits:
            return math.inf
        _put(parts[i], int(rng.choice(fits)), forward, rest, room)
    return max(forward) + max(rest)


def greedy_s(tables: Sequence[EmbeddingTable], devices: TableDevices, score: Score) -> float:
    """Returns the seconds of whole tables, each on the device of least score so far; inf if one finds no room."""
    parts = [whole(table, i, devices) for i, table in enumerate(tables)]
    room = list(devices.memory_limit_bytes)
    forward, rest, total = ([0.0] * len(room) for _ in range(3))
    for i in sorted(range(len(parts)), key=lambda i: -score(tables[i])):
        fits = [d for d in range(len(room)) if room[d] >= parts[i].num_bytes]
        if not fits:
            return math.inf
        device = min(fits, key=total.__getitem__)
        total[device] += score(tables[i])
        _put(parts[i], device, forward, rest, room)
    return max(forward) + max(rest)


def beam_s(tables: Sequence[EmbeddingTable], devices: TableDevices, depth: int = _DEPTH) -> float:
    """Returns the seconds of the best placement that NeuroShard's beam search finds; inf if none fits.

    Each step splits one of the 10 largest or 10 costliest parts of each kept list in halves, and places each new list
    greedily under 11 caps.
    """
    kept = [[whole(table, i, devices) for i, table in enumerate(tables)]]
    best = _placed_s(kept[0], devices)
    halves: dict[tuple[int, int], Part] = {}
    for _ in range(depth):
        scored = []
        for parts in kept:
            for i in _candidates(parts):
                key = parts[i].table, parts[i].columns // 2
                if key not in halves:
                    halves[key] = _part(tables[key[0]], *key, devices)
                split = [*parts[:i], *parts[i + 1 :], halves[key], halves[key]]
                scored.append((_placed_s(split, devices), len(scored), split))
        if not scored:
            break
        scored.sort()
        best, kept = min(best, scored[0][0]), [split for _, _, split in scored[:_BEAM_WIDTH]]
    return best


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


def _placed_s(parts: Sequence[Part], devices: TableDevices) -> float:
    """Returns the seconds of the best greedy placement over caps on the columns of a device; inf if none fits."""
    ordered = sorted(parts, key=lambda part: -part.cost_s)
    mean = sum(part.columns for part in parts) / devices.num_devices
    return min(_capped_s(ordered, devices, cap * mean) for cap in _CAPS)


def _capped_s(ordered: Sequence[Part], devices: TableDevices, most_columns: float) -> float:
    room = list(devices.memory_limit_bytes)
    all_devices = range(len(room))
    forward, rest, cost, columns = ([0.0] * len(room) for _ in range(4))
    for part in ordered:
        least, device = math.inf, -1
        for d in all_devices:
            if cost[d] < least and room[d] >= part.num_bytes and columns[d] + part.columns <= most_columns:
                least, device = cost[d], d
        if device < 0:
            return math.inf
        cost[device] += part.forward_s + part.rest_s
        columns[device] += part.columns
        _put(part, device, forward, rest, room)
    return max(forward) + max(rest)


def _put(part: Part, device: int, forward: list[float], rest: list[float], room: list[float]) -> None:
    forward[device] += part.forward_s
    rest[device] += part.rest_s
    room[device] -= part.num_bytes

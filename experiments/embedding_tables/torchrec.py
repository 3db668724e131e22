"""TorchRec's planner: some ways to split each table, many proposals of a way for each, and a greedy placement of each.

A proposer lists proposals, each of one option for every table, without knowing where pieces will be. A partitioner puts
the pieces of a proposal on devices, greedily. The plan is the proposal whose busiest device has the least seconds by
TorchRec's own estimate (`torchrec_estimates.py`). Nothing here is TorchRec's code; its rules are described anew.

Letters for sizes: T tables, D devices.

Source: pytorch/torchrec of October 2025, torchrec/distributed/planner: proposers, partitioners and
planners.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from experiments.embedding_tables.torchrec_estimates import DEVICE, UNIFORM, Estimate, Option, Topology
from search_spaces.embedding_tables.base import DecodedTables, EmbeddingTable, Piece, TableDevices
from search_spaces.embedding_tables.prices import decoded

_MOST_GRID_PROPOSALS = 10_000
_BINS_PER_DEVICE = 100  # of memory, in dynamic programming
_MOST_BALANCING_ROUNDS, _BALANCING_TOLERANCE = 10, 0.02
_LEAST_BALANCED_BYTES = 10 * 2**20

Proposal = tuple[Option, ...]
Proposer = Callable[[Sequence[Sequence[Option]], float], Iterator[Proposal]]
"""From the options of each table and the bytes of all devices together to proposals, an option for each table."""


class Partition(NamedTuple):
    """A proposal on devices.

    Attributes:
      devices: of the pieces of each option.
      seconds: of the busiest device, as TorchRec estimates them.
      used_bytes: of each device, `[D]`.
    """

    devices: tuple[tuple[int, ...], ...]
    seconds: float
    used_bytes: tuple[float, ...]


_AS_IT_IS = Estimate()
Partitioner = Callable[[Proposal, Topology], Partition | None]


def greedy(
    options: Sequence[Sequence[Option]], room: float, cost: Callable[[Option], float] = lambda o: max(o.seconds)
) -> Iterator[Proposal]:
    """Yields the fastest options, then again and again the next option of the table with the largest piece.

    Args:
      options: of each table.
      room: not used.
      cost: by which options are in order.
    """
    ordered = [sorted(of_table, key=cost) for of_table in options]
    at = [0] * len(ordered)
    while True:
        yield tuple(of_table[i] for of_table, i in zip(ordered, at, strict=True))
        movable = [t for t, of_table in enumerate(ordered) if at[t] + 1 < len(of_table)]
        if not movable:
            return
        at[max(movable, key=lambda t: (max(ordered[t][at[t]].num_bytes), sum(ordered[t][at[t]].num_bytes)))] += 1


def greedy_by_sum(options: Sequence[Sequence[Option]], room: float) -> Iterator[Proposal]:
    """Yields what `greedy` does with options in the order of the seconds of all their pieces together."""
    return greedy(options, room, lambda option: sum(option.seconds))


def uniform(options: Sequence[Sequence[Option]], _: float) -> Iterator[Proposal]:
    """Yields for each kind of option the proposal in which all tables are split in this way."""
    for kind in dict.fromkeys(option.kind for of_table in options for option in of_table):
        same = [[option for option in of_table if option.kind == kind] for of_table in options]
        if all(same):
            yield tuple(min(of_table, key=lambda option: max(option.seconds)) for of_table in same)


def grid(options: Sequence[Sequence[Option]], _: float) -> Iterator[Proposal]:
    """Yields all proposals where these are at most 10,000, and none otherwise."""
    if math.prod(map(len, options)) <= _MOST_GRID_PROPOSALS:
        yield from itertools.product(*(sorted(of_table, key=lambda o: max(o.seconds)) for of_table in options))


def dynamic_programming(
    options: Sequence[Sequence[Option]], room: float, bins: int | None = None
) -> Iterator[Proposal]:
    """Yields the proposal of least bytes, then for each number of bytes in all that of the least seconds in all.

    Bytes of all devices are counted in bins; where a piece will be is not regarded. Small tables come first, because
    of all choices that end in one bin only the fastest is kept, which depends on the order.

    Args:
      options: of each table.
      room: bytes of all devices together.
      bins: of the bytes; 100 for each device by default.
    """
    ordered = [sorted(of_table, key=lambda option: sum(option.num_bytes)) for of_table in options]
    yield tuple(of_table[0] for of_table in ordered)
    order = sorted(range(len(ordered)), key=lambda t: sum(ordered[t][0].num_bytes))
    bins = bins or _BINS_PER_DEVICE * max(len(option.seconds) for of_table in options for option in of_table)
    states: dict[int, tuple[float, float]] = {0: (0.0, 0.0)}  # by bin: seconds, and bytes in bins
    trace: list[dict[int, tuple[int, int]]] = []  # by table and bin: the option, and the bin before
    for table in order:
        found: dict[int, tuple[float, float]] = {}
        before: dict[int, tuple[int, int]] = {}
        sizes = [(sum(option.seconds), sum(option.num_bytes) * bins / room) for option in ordered[table]]
        for index, (seconds, size) in enumerate(sizes):
            for start in sorted(states):
                old_seconds, old_size = states[start]
                end = int(old_size + size)
                if end < bins and (end not in found or old_seconds + seconds < found[end][0]):
                    found[end] = old_seconds + seconds, old_size + size
                    before[end] = index, start
        states = found
        trace.append(before)
    for last in sorted(states, reverse=True):
        chosen, at = {}, last
        for table, before in zip(reversed(order), reversed(trace), strict=True):
            index, at = before[at]
            chosen[table] = ordered[table][index]
        yield tuple(chosen[table] for table in range(len(ordered)))


PROPOSERS: dict[str, Proposer] = {
    "grid": grid,
    "greedy": greedy,
    "greedy by sums": greedy_by_sum,
    "uniform": uniform,
    "dynamic programming": dynamic_programming,
}


def by_bytes(proposal: Proposal, topology: Topology) -> Partition | None:
    """Places pieces greedily, largest options first; see `placed_greedily`."""
    return placed_greedily(proposal, topology, topology.room_bytes, lambda option: sum(option.num_bytes))


def memory_balanced(proposal: Proposal, topology: Topology) -> Partition | None:
    """Places the slowest options first, and halves the room until seconds grow by more than 2% or nothing fits."""

    def placed(room: Sequence[float]) -> Partition | None:
        return placed_greedily(proposal, topology, room, lambda option: sum(option.seconds))

    best = first = placed(topology.room_bytes)
    if first is None or best is None:
        return None
    most = max(first.used_bytes)
    pieces = [num_bytes for option in proposal for num_bytes in option.num_bytes]
    least = max(sum(pieces) / topology.num_devices, *pieces)
    for _ in range(_MOST_BALANCING_ROUNDS):
        if least + _LEAST_BALANCED_BYTES >= most:
            break
        middle = (least + most) / 2
        other = placed((middle,) * topology.num_devices)
        if other is None or other.seconds > first.seconds * (1 + _BALANCING_TOLERANCE):
            least = middle
        else:
            best, most = other, middle
    return best


class _Devices:
    """Devices while pieces are put on them: seconds and room, `[D]`."""

    def __init__(self, topology: Topology, room: Sequence[float]):
        self.per_host, self.seconds, self.room = topology.devices_per_host, [0.0] * len(room), list(room)

    def put(self, option: Option, places: Sequence[int]) -> tuple[int, ...] | None:
        """Puts piece i on place i; returns None, with nothing changed, if one has no room."""
        if any(num_bytes > self.room[d] for num_bytes, d in zip(option.num_bytes, places, strict=True)):
            return None
        for piece, device in enumerate(places):
            self._add(option, piece, device)
        return tuple(places)

    def put_freely(self, option: Option, places: Sequence[int]) -> tuple[int, ...] | None:
        """Puts each piece on the place of least seconds with room; returns None if one has no room."""
        chosen: list[int] = []
        for piece, num_bytes in enumerate(option.num_bytes):
            fits = [d for d in places if num_bytes <= self.room[d]]
            if not fits:
                for put, device in enumerate(chosen):
                    self._add(option, put, device, sign=-1)
                return None
            chosen.append(min(fits, key=lambda d: (self.seconds[d], d % self.per_host, d)))
            self._add(option, piece, chosen[-1])
        return tuple(chosen)

    def _add(self, option: Option, piece: int, device: int, sign: int = 1) -> None:
        self.seconds[device] += sign * option.seconds[piece]
        self.room[device] -= sign * option.num_bytes[piece]


def placed_greedily(
    proposal: Proposal, topology: Topology, room: Sequence[float], first: Callable[[Option], float]
) -> Partition | None:
    """Places uniform options, then the others from the largest value of `first` on.

    Piece i of a uniform option is on device i. A piece of another option goes to the device with the least seconds of
    those that have room, and if the option stays within a host, to a device of the least busy host where all fit.
    """
    devices = _Devices(topology, room)
    hosts = [range(i, i + devices.per_host) for i in range(0, len(room), devices.per_host)]
    chosen: dict[int, tuple[int, ...] | None] = {}
    order = sorted(range(len(proposal)), key=lambda t: (proposal[t].placed != UNIFORM, -first(proposal[t])))
    for table in order:
        option = proposal[table]
        if option.placed == UNIFORM:
            chosen[table] = devices.put(option, range(len(room)))
        elif option.placed == DEVICE:
            chosen[table] = devices.put_freely(option, range(len(room)))
        else:
            put = devices.put if option.by_rows else devices.put_freely
            by_seconds = sorted(hosts, key=lambda host: sum(devices.seconds[d] for d in host))
            tried = (put(option, host) for host in by_seconds)
            chosen[table] = next((places for places in tried if places is not None), None)
        if chosen[table] is None:
            return None
    used = tuple(whole - left for whole, left in zip(room, devices.room, strict=True))
    return Partition(tuple(chosen[t] or () for t in range(len(proposal))), max(devices.seconds), used)


@dataclass(frozen=True)
class Planner:
    """A way to use TorchRec's planner.

    Attributes:
      proposers: names in `PROPOSERS`; by default those that TorchRec has without being asked.
      partitioner: places a proposal.
      estimate: what options cost, and how much of the memory is for tables.
    """

    proposers: tuple[str, ...] = ("grid", "greedy", "greedy by sums", "uniform")
    partitioner: Partitioner = by_bytes
    estimate: Estimate = _AS_IT_IS

    def placement(self, tables: Sequence[EmbeddingTable], devices: TableDevices) -> DecodedTables | None:
        """Returns the plan as pieces with what they cost by our prices; None if no proposal finds room."""
        topology = self.estimate.topology(tables, devices)
        options = [self.estimate.options(table, topology, devices) for table in tables]
        proposals = (p for name in self.proposers for p in PROPOSERS[name](options, sum(topology.room_bytes)))
        best = best_proposal(proposals, topology, self.partitioner) if min(topology.room_bytes) > 0 else None
        if best is None:
            return None
        pieces: list[Piece] = []
        for index, (option, places) in enumerate(zip(best[0], best[1].devices, strict=True)):
            pieces += option.pieces(index, places)
        return decoded(tables, pieces, devices)

    def step_s(self, tables: Sequence[EmbeddingTable], devices: TableDevices) -> float:
        """Returns the seconds of a step by our prices; inf if there is no plan, or it exceeds the devices' memory."""
        placed = self.placement(tables, devices)
        if placed is None or (placed.device_bytes > devices.memory_limit_bytes).any():
            return math.inf
        return float(placed.forward_s.max() + placed.rest_s.max())


_ALL = tuple(PROPOSERS)
_GIVEN = Estimate(reserves=False, rates_given=True)
WAYS = {
    "TorchRec": Planner(),
    "TorchRec, all memory": Planner(estimate=Estimate(reserves=False)),
    "TorchRec, rates given": Planner(estimate=_GIVEN),
    "its greedy proposers": Planner(("greedy", "greedy by sums"), estimate=_GIVEN),
    "its uniform proposer": Planner(("uniform",), estimate=_GIVEN),
    "its dynamic programming": Planner(("dynamic programming",), estimate=_GIVEN),
    "its proposers, memory balanced": Planner(_ALL, memory_balanced, _GIVEN),
    "its proposers, 32 columns": Planner(_ALL, estimate=replace(_GIVEN, columns=32)),
    "its proposers, our prices": Planner(_ALL, estimate=replace(_GIVEN, columns=32, our_prices=True)),
}
"""Ways to use the planner: as it is, with all memory for tables, then also with the devices' bandwidths; of these with
some or all proposers, the other partitioner, and what users can set."""


def best_proposal(
    proposals: Iterable[Proposal], topology: Topology, partitioner: Partitioner
) -> tuple[Proposal, Partition] | None:
    """Returns the proposal of least seconds with its devices; None if none has room."""
    best = None
    tried: set[tuple[int, ...]] = set()
    for proposal in proposals:
        key = tuple(map(id, proposal))
        if key in tried:
            continue
        tried.add(key)
        partition = partitioner(proposal, topology)
        if partition is not None and (best is None or partition.seconds < best[1].seconds):
            best = proposal, partition
    return best

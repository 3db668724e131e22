"""When each instruction of a compiled GPU program runs: a simulation of its schedule on one device.

XLA's scheduled program is a list, so its time follows from playing the list back. The compute stream runs kernels in
the schedule's order. An asynchronous start hands its collective to the links and the stream goes on; the collective
begins once its links are free, and the stream waits at the matching done until it has ended. A synchronous collective
holds the stream. All devices run the same program, so one device tells the time of all.

Not modelled: collectives slow the kernels that run at the same time a little, devices are not equally fast, and XLA may
run collectives on different links one after the other. Rates are those of `diffshard.checks.kernel_work`.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cost.compute import work_s
from diffshard.checks.collectives import collective_record, device_groups, kind_of
from diffshard.checks.hlo import Computation, Instruction, Module, parse, parts_of_tuple
from diffshard.checks.kernel_work import HOST_MEMORY, AchievableRates, custom_call_target, kernel_work, num_bytes_of

COMPUTE = "compute"
MAX_UNROLLED_SPANS = 50_000
"""The most spans that a loop is written out as. A longer loop stays one span: its trace would be slow to open."""


@dataclass(frozen=True)
class Repetition:
    """Further trips of a loop, each a copy of the one before.

    Attributes:
      first: index of the first span of the trip that is copied; the trip ends before the span that has the repetition.
      period_s: by how much each trip is later than the one before, by resource.
    """

    first: int
    times: int
    period_s: Mapping[str, float]


@dataclass(frozen=True)
class Span:
    """A time in which a resource is busy.

    Attributes:
      source: the operation's name in the traced function, or "".
      transfer: kind and mesh axes of a collective, such as "all_gather data"; "" for kernels.
      repeats: the trips for which it stands, where it stands for trips of a loop; None elsewhere.
    """

    name: str
    resource: str
    start_s: float
    end_s: float
    source: str = ""
    transfer: str = ""
    repeats: Repetition | None = None


def unroll(spans: Sequence[Span], max_spans: int = MAX_UNROLLED_SPANS) -> Iterator[Span]:
    """Yields the spans of a timeline with the trips of loops written out.

    Args:
      max_spans: trips of one loop that are more spans than that stay one span, with its repetition.
    """
    yield from _shift(spans, range(len(spans)), {}, max_spans)


def _shift(spans: Sequence[Span], indices: range, later_s: Mapping[str, float], max_spans: int) -> Iterator[Span]:
    for index in indices:
        span = spans[index]
        repeats = span.repeats
        if repeats is None or repeats.times * _count(spans, range(repeats.first, index), max_spans) > max_spans:
            shift_s = later_s.get(span.resource, 0.0)
            yield replace(span, start_s=span.start_s + shift_s, end_s=span.end_s + shift_s)
            continue
        for trip in range(1, repeats.times + 1):
            resources = later_s.keys() | repeats.period_s.keys()
            trip_s = {r: later_s.get(r, 0.0) + trip * repeats.period_s.get(r, 0.0) for r in resources}
            yield from _shift(spans, range(repeats.first, index), trip_s, max_spans)


def _count(spans: Sequence[Span], indices: range, max_spans: int) -> int:
    """Returns how many spans these are when written out."""
    count = 0
    for index in indices:
        repeats = spans[index].repeats
        inner = repeats.times * _count(spans, range(repeats.first, index), max_spans) if repeats else 1
        count += inner if inner <= max_spans else 1
    return count


# The most trips of a loop that are played one by one; those after them are copies of the last one. Most loops are
# steady after two or three trips, unless a link is still busy with what was sent before the loop.
_MAX_PLAYED_TRIPS = 32
# Seconds within which two trips leave the links alike: far below a kernel's launch.
_SAME_S = 1e-12
_WITHOUT_PRICE = ("send", "recv", "infeed", "outfeed")


@dataclass(frozen=True)
class Timeline:
    """A step as one device spends it.

    Attributes:
      step_s: seconds until the compute stream and all links are done.
      busy_s: seconds that each resource is busy.
      waited_s: seconds that the compute stream waits, by what it waits for: a kind of collective and the mesh axes that
        it spans, joined by "+".
      spans: what runs when, in the order of the schedule. A loop's trips that are alike are one span, which
        `spans.unroll` writes out.
      notes: what is priced roughly: custom calls by their bytes, loops of unknown length as one trip.
    """

    step_s: float
    busy_s: Mapping[str, float]
    waited_s: Mapping[tuple[str, str], float]
    spans: tuple[Span, ...]
    notes: tuple[str, ...] = ()


def simulate(hlo: str, axis_sizes: Mapping[str, int], rates: AchievableRates) -> Timeline:
    """Plays a scheduled program back.

    A loop's trip depends on the trips before it only through how much longer each link is busy when it begins. So once
    a trip leaves the links as it found them, all further trips are copies of it, and are added without playing them.
    The same holds once a link falls behind the stream by the same time in each trip. Of a conditional the branch that
    ends last runs.

    Args:
      hlo: `compiled.as_text()` of a GPU program, which is scheduled.
      axis_sizes: `mesh.shape`, axes in order; devices are numbered row-major.
    """
    if "is_scheduled=true" not in hlo.partition("\n")[0]:
        raise ValueError(
            "`hlo` must be a scheduled program (is_scheduled=true), such as `compiled.as_text()` for a GPU."
        )
    module = parse(hlo)
    clock = _Clock()
    player = _Player(module, dict(axis_sizes), rates)
    player.play(module.entry, clock)
    step_s = max([clock.now_s, *clock.free_s.values()])
    return Timeline(step_s, dict(clock.busy_s), dict(clock.waited_s), tuple(clock.spans), tuple(sorted(player.notes)))


@dataclass
class _Clock:
    """How far a simulation is: the compute stream's time, when each link is free, and what was counted so far."""

    now_s: float = 0.0
    free_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    busy_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    waited_s: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    spans: list[Span] = field(default_factory=list)

    def run(self, instruction: Instruction, seconds: float) -> None:
        """Runs a kernel on the compute stream."""
        self._occupy(instruction, COMPUTE, self.now_s, self.now_s + seconds)
        self.now_s += seconds

    def send(self, instruction: Instruction, links: tuple[str, ...], seconds: float, reason: tuple[str, str]) -> float:
        """Puts a transfer on its links, from when all of them are free; returns when it ends."""
        start_s = max([self.now_s, *(self.free_s[link] for link in links)])
        for link in links:
            self._occupy(instruction, link, start_s, start_s + seconds, " ".join(reason))
            self.free_s[link] = start_s + seconds
        return start_s + seconds

    def wait(self, until_s: float, reason: tuple[str, str]) -> None:
        """Holds the compute stream."""
        if until_s > self.now_s:
            self.waited_s[reason] += until_s - self.now_s
            self.now_s = until_s

    def _occupy(
        self, instruction: Instruction, resource: str, start_s: float, end_s: float, transfer: str = ""
    ) -> None:
        self.busy_s[resource] += end_s - start_s
        self.spans.append(Span(instruction.name, resource, start_s, end_s, instruction.source, transfer))

    def lags_s(self) -> dict[str, float]:
        """Returns how much longer each link is busy; links that are free are left out."""
        return {link: free - self.now_s for link, free in self.free_s.items() if free > self.now_s + _SAME_S}

    def fork(self) -> "_Clock":
        """Returns a clock of its own that goes on from here."""
        free_s, busy_s = defaultdict(float, self.free_s), defaultdict(float, self.busy_s)
        return _Clock(self.now_s, free_s, busy_s, defaultdict(float, self.waited_s), list(self.spans))

    def repeat(self, before: "_Clock", times: int, name: str) -> None:
        """Adds more trips like the one that began at `before` and ends now; each link advances as in that trip."""
        for resource in self.busy_s:
            self.busy_s[resource] += times * (self.busy_s[resource] - before.busy_s[resource])
        for reason in self.waited_s:
            self.waited_s[reason] += times * (self.waited_s[reason] - before.waited_s[reason])
        start_s = self.now_s
        trip_s, advance_s = self.advance_s(before)
        self.now_s += times * trip_s
        self.free_s.update({link: self.free_s[link] + times * seconds for link, seconds in advance_s.items()})
        period_s = {resource: advance_s.get(resource, trip_s) for resource in self.busy_s}
        repeats = Repetition(len(before.spans), times, period_s)
        self.spans.append(Span(f"{times} more trips of {name}", COMPUTE, start_s, self.now_s, repeats=repeats))

    def advance_s(self, before: "_Clock") -> tuple[float, dict[str, float]]:
        """Returns by how much the compute stream and the busy links have advanced."""
        links = {link: self.free_s[link] - max(before.now_s, before.free_s[link]) for link in self.lags_s()}
        return self.now_s - before.now_s, links


class _Player:
    """Plays the computations of one program; remembers what kernels and collectives take."""

    def __init__(self, module: Module, axis_sizes: dict[str, int], rates: AchievableRates) -> None:
        self.module, self.axis_sizes, self.rates = module, axis_sizes, rates
        self.num_devices = math.prod(axis_sizes.values())
        self.notes: set[str] = set()

    def play(self, name: str, clock: _Clock) -> None:
        """Runs a computation on the clock."""
        computation = self.module.computations[name]
        ends: dict[str, tuple[float, tuple[str, str]]] = {}
        for instruction in computation.instructions:
            opcode = instruction.opcode
            if opcode == "while":
                self._loop(instruction, clock)
            elif opcode == "conditional":
                self._branch(instruction, clock)
            elif opcode == "call":
                self.play(instruction.callees[0], clock)
            elif opcode.endswith(("-done", "-update")):
                pending = ends.get(instruction.operands[0]) if instruction.operands else None
                if pending and opcode.endswith("-done"):
                    clock.wait(*pending)
                elif pending:
                    ends[instruction.name] = pending
            elif transfer := self._transfer(instruction, clock):
                ends[instruction.name] = transfer
            elif opcode == "async-start":
                self.play(instruction.callees[0], clock)
            elif opcode in _WITHOUT_PRICE:
                self.notes.add(f"{opcode} is not priced{_place(instruction)}")
            else:
                self._kernel(computation, instruction, clock)

    def _transfer(self, instruction: Instruction, clock: _Clock) -> tuple[float, tuple[str, str]] | None:
        """Starts a collective or a copy; returns when it ends and what a wait for it is called, None for kernels."""
        if instruction.opcode == "copy-start":
            seconds = num_bytes_of(parts_of_tuple(instruction.type)[0]) / self.rates.host_memory_bytes_per_s
            reason = "copy", "host"
            return clock.send(instruction, (HOST_MEMORY,), seconds, reason), reason
        collective = self._collective(instruction)
        if collective is None:
            return None
        record = collective_record(collective, self.axis_sizes)
        reason = (str(record.kind), "+".join(record.axes))
        if record.num_devices < 2 or record.num_bytes == 0:
            return clock.now_s, reason
        groups = device_groups(collective, self.num_devices)
        seconds = self.rates.collective_s(record.kind, record.num_bytes, groups)
        end_s = clock.send(instruction, self.rates.links(groups), seconds, reason)
        if not instruction.opcode.endswith("-start") or '"is_sync":true' in instruction.attributes:
            clock.wait(end_s, reason)
        return end_s, reason

    def _collective(self, instruction: Instruction) -> Instruction | None:
        """Returns the collective that an instruction is or wraps."""
        if kind_of(instruction):
            return instruction
        if instruction.opcode not in ("async-start", "fusion"):
            return None
        inner = self.module.computations[instruction.callees[0]].instructions
        return next((i for i in inner if kind_of(i)), None)

    def _kernel(self, computation: Computation, instruction: Instruction, clock: _Clock) -> None:
        work = kernel_work(self.module, computation, instruction)
        if work is None:
            return
        if not work.is_known:
            self.notes.add(
                f"custom call {custom_call_target(instruction)!r} is priced by its bytes alone{_place(instruction)}"
            )
        if work.attention is not None:
            clock.run(instruction, work_s(work.attention, self.rates.device))
        else:
            clock.run(instruction, self.rates.kernel_s(work.flops, work.num_bytes))

    def _loop(self, instruction: Instruction, clock: _Clock) -> None:
        trips, body = instruction.trip_count, instruction.body
        if trips is None:
            self.notes.add(
                f"loop {instruction.name!r} has an unknown length and is priced as one trip{_place(instruction)}"
            )
            trips = 1
        previous = clock.fork()
        for trip in range(1, trips + 1):
            before = clock.fork()
            self.play(body, clock)
            if trip < trips and (trip == _MAX_PLAYED_TRIPS or _is_steady(previous, before, clock)):
                clock.repeat(before, trips - trip, instruction.name)
                return
            previous = before

    def _branch(self, instruction: Instruction, clock: _Clock) -> None:
        outcomes = []
        for name in instruction.callees:
            outcome = clock.fork()
            self.play(name, outcome)
            outcomes.append(outcome)
        if outcomes:
            slowest = max(outcomes, key=lambda outcome: max([outcome.now_s, *outcome.free_s.values()]))
            vars(clock).update(vars(slowest))


def _is_steady(previous: _Clock, before: _Clock, after: _Clock) -> bool:
    """Returns whether the trips after the one from `before` to `after` are copies of it.

    They are where the links are as busy after the trip as before it, and where a link falls behind the stream by as
    much as in the trip from `previous` to `before`: nothing in the body waits for that link.
    """
    lags_s, earlier_s = after.lags_s(), before.lags_s()
    if lags_s.keys() == earlier_s.keys() and all(abs(lags_s[link] - earlier_s[link]) < _SAME_S for link in lags_s):
        return True
    if lags_s.keys() != earlier_s.keys() or any(lags_s[link] < earlier_s[link] - _SAME_S for link in lags_s):
        return False
    (trip_s, advance_s), (previous_trip_s, previous_advance_s) = after.advance_s(before), before.advance_s(previous)
    return abs(trip_s - previous_trip_s) < _SAME_S and all(
        abs(seconds - previous_advance_s.get(link, 0.0)) < _SAME_S for link, seconds in advance_s.items()
    )


def _place(instruction: Instruction) -> str:
    """Says where in the traced function an instruction comes from, if XLA has kept that."""
    return f", {instruction.source}" if instruction.source else ""

"""Makes the schedule of a device program: in which window each collective of a weight or its gradient runs.

A schedule depends on what is chosen, and memory has to be known before. So `held_positions`, which says how long
memory holds what collectives bring early or take late, follows the windows of a program whose
devices do equal shares of each product.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from cost.base import Hardware
from cost.compute import equation_dtype, equation_flops
from search_spaces.partition_specs import IndexedSpec
from search_spaces.sharding.base import Layout, ReshardStep
from search_spaces.sharding.coded_sums import finished_steps
from search_spaces.sharding.graph import (
    Graph,
    Region,
    Value,
    Vertex,
    follows_contraction,
    is_contraction,
    leads_to_contraction,
    values_of,
)
from search_spaces.sharding.product_formats import FORMATS
from search_spaces.sharding.reshard_costs import is_message_coded
from search_spaces.sharding.resharding import Paths
from search_spaces.sharding.schedule import (
    Barrier,
    Fetch,
    FetchStage,
    ProgramSchedule,
    Windows,
    straight_lines,
    windows_around,
)

# A window's products take at least this many latencies of the slowest link, so that a collective's latency is a small
# part of the window. Chosen by `python -m experiments.schedule`: on a decoder for 32 GPUs 6, 12, 24 and 40 give steps
# of 42.4, 42.4, 40.2 and 42.6 ms, no barriers 45.2.
_LATENCIES_IN_WINDOW = 24
# How many windows before its reader a weight is gathered at most, and how many after its product a gradient is reduced:
# what is gathered early or reduced late takes memory.
_FARTHEST = 6
# How many windows XLA may put off what is neither a product nor read soon. A vision transformer of 12 layers on 32 GPUs
# takes 30.4 ms and 0.78 GiB with none, 29.8 ms and 0.80 GiB with one, 29.8 ms and 0.87 GiB with two.
_GRACE = 1
# Operations that move one array. On one device's part they cost little: to have a weight early they run a second time,
# and to let a reduction run they are put off.
_CHEAP = frozenset(("convert_element_type", "reshape", "transpose", "squeeze", "expand_dims", "copy"))


def make_schedule(
    graph: Graph, layout: Layout, path: Paths, compute_s: np.ndarray, is_written: np.ndarray
) -> ProgramSchedule:
    """Returns when the collectives of a layout start and end.

    Args:
      path: the steps between two specs, with their rates.
      compute_s: `[vertices]` seconds of the arithmetic of one execution on one device.
      is_written: `[values]` booleans, by value id, whether the value exists in memory.
    """
    schedule, least_s = ProgramSchedule(), least_window_s(path)
    is_needed = leads_to_contraction(graph)
    for line in straight_lines(graph.block):
        windows = Windows(line, compute_s, is_needed, least_s)
        if len(windows) > 1:
            _LineScheduler(graph, layout, path, windows, is_written, schedule).run()
    return schedule


def least_window_s(path: Paths) -> float:
    """Returns the seconds of contractions that a window has at least."""
    return _LATENCIES_IN_WINDOW * max((r.latency_s(kind) for r in path.rates for kind in r.lines), default=0.0)


class _Request(NamedTuple):
    """A fetch, the place of its first reader, and its steps from the spec `before`."""

    place: int
    before: IndexedSpec
    steps: tuple[ReshardStep, ...]
    fetch: Fetch


class _LineScheduler:
    """A scheduler of one line, which fills in the schedule of the program."""

    def __init__(
        self,
        graph: Graph,
        layout: Layout,
        path: Paths,
        windows: Windows,
        is_written: np.ndarray,
        schedule: ProgramSchedule,
    ):
        self.graph, self.layout, self.path, self.windows, self.schedule = graph, layout, path, windows, schedule
        self.is_written, self.follows_contraction = is_written, follows_contraction(graph)
        self.line = windows.line
        self.in_line = {step.index for step, _ in self.line if isinstance(step, Vertex)}
        self.made_at = {value.id: i for i, (step, _) in enumerate(self.line) for value in step.results}
        self.readers: dict[int, list[int]] = defaultdict(list)
        for i, (step, _) in enumerate(self.line):
            for value in values_of(step.operands):
                self.readers[value.id].append(i)
        self.common_gathers: set[int] = set()
        self.read_last = {v.id for v in values_of(graph.outputs)}
        self.num_readers = [len(readers) for readers in graph.consumers()]
        self.free_s: dict[int, list[float]] = defaultdict(lambda: list(windows.seconds))
        self.barriers = [Barrier() for _ in windows.start]
        self.first_barrier = int(isinstance(self.line[0][0], Region))

    def run(self) -> None:
        """Plans fetches from the last to the first, then reductions from the first to the last."""
        requests = [*self._gathers_for_all(), *self._gathers_for_one()]
        for request in sorted(requests, key=lambda request: -request.place):
            value = request.fetch.value
            if self._plan_fetch(request) and request.fetch.spec == self.layout.value_specs[value.id]:
                self._leave_out(request.fetch)
        for place, (step, _) in enumerate(self.line):
            self._plan_results(place, step)
        for window, place in enumerate(self.windows.start):
            vertex = self.line[place][0]
            if isinstance(vertex, Vertex):
                self.schedule.barriers[vertex.index] = self.barriers[window]

    def _gathers_for_all(self) -> Iterator["_Request"]:
        """Yields weights that are gathered as soon as they are made or stored, with the place of the first reader."""
        for vertex in (*self.graph.inputs, *(step for step, _ in self.line if isinstance(step, Vertex))):
            strategy = self.layout.strategies[vertex.index]
            if len(vertex.results) != 1 or not (value := vertex.results[0]).shape or value.id in self.read_last:
                continue
            target, result_spec = self.layout.value_specs[value.id], strategy.results[0]
            before = strategy.unreduced[0] if vertex.kind == "input" else result_spec
            steps = (*(strategy.reductions[0] if vertex.kind == "input" else ()), *self.path(result_spec, target))
            places = self.readers[value.id]
            read_here = len(places) == self.num_readers[value.id]
            if places and read_here and _gathers(steps) and (chain := self._chain(value)) is not None:
                readers = tuple(step.index for step, _ in (self.line[i] for i in places) if isinstance(step, Vertex))
                if len(readers) == len(places):
                    self.common_gathers.add(value.id)
                    yield _Request(min(places), before, steps, Fetch(value, chain[1], chain[0], target, readers))

    def _gathers_for_one(self) -> Iterator["_Request"]:
        """Yields reshards of weights for some of their readers, with the place of the first one."""
        requests: dict[tuple, _Request] = {}
        for place, (step, region) in enumerate(self.line):
            if not isinstance(step, Vertex) or step.kind != "operation":
                continue
            specs = self.layout.strategies[step.index].operands
            for position, (operand, spec) in enumerate(zip(step.operands, specs, strict=True)):
                if not isinstance(operand, Value) or not operand.shape or operand.id in self.common_gathers:
                    continue
                is_coded = is_message_coded(self.path, self.layout, step, position)
                if is_coded and step.operands.count(operand) > 1:
                    continue  # as each of the operands it may have a format of its own
                before = self.layout.value_specs[operand.id]
                dtype = FORMATS[self.layout.strategies[step.index].format].dtypes(step)[position] if is_coded else None
                steps, key = self.path(before, spec), (operand.id, spec, region, dtype)
                if key in requests:
                    fetch = requests[key].fetch
                    requests[key] = requests[key]._replace(fetch=fetch._replace(readers=(*fetch.readers, step.index)))
                elif _gathers(steps) and (chain := self._chain(operand)) is not None:
                    fetch = Fetch(operand, chain[1], chain[0], spec, (step.index,), position if is_coded else None)
                    requests[key] = _Request(place, before, steps, fetch)
        yield from requests.values()

    def _leave_out(self, fetch: Fetch) -> None:
        """Does not gather in place what is fetched for all readers."""
        if fetch.chain:
            self.schedule.late_operations.add(fetch.chain[-1].index)
        else:
            self.schedule.bare_inputs.add(fetch.root.vertex)

    def _chain(self, value: Value) -> tuple[tuple[Vertex, ...], Value] | None:
        """Returns the cheap operations that make a value of a stored array, and that array; None for other values."""
        chain: list[Vertex] = []
        while True:
            vertex = self.graph.vertices[value.vertex]
            if vertex.kind != "operation":
                is_on_host = self.layout.strategies[vertex.index].on_host
                return None if is_on_host else (tuple(reversed(chain)), value)
            values = values_of(vertex.operands)
            has_reduction = any(self.layout.strategies[vertex.index].reductions)
            is_coded = bool(self.layout.strategies[vertex.index].exchanged_in)  # and made where that is exchanged
            is_cheap = vertex.primitive in _CHEAP and len(values) == 1 and not has_reduction and not is_coded
            if not is_cheap or vertex.index not in self.in_line:
                return None
            chain.append(vertex)
            value = values[0]
            if value.id in self.common_gathers:
                return None

    def _plan_fetch(self, request: _Request) -> bool:
        """Finds windows for the steps of a fetch, the last one first; tells whether there are any."""
        fetch, before, reader = request.fetch, request.before, self.windows.of_place[request.place]
        made_at = self.made_at.get(fetch.root.id)
        earliest = self.first_barrier if made_at is None else self.windows.of_place[made_at] + 1
        stages: list[tuple[int, list[ReshardStep]]] = []
        latest = reader - 1
        for step in reversed(request.steps):
            seconds = self._step_s(step, fetch.value, 1 if fetch.encoded_for is not None else None)
            if seconds or not stages:
                window = self._reserve(range(latest, max(earliest, reader - _FARTHEST) - 1, -1), {step.axis}, seconds)
                if window is None:
                    if not stages:
                        return False
                    stages[0][1].insert(0, step)  # no window is left: with the step after it
                    continue
                stages.insert(0, (window, [step]))
                latest = window - 1
            else:
                stages[0][1].insert(0, step)
        ends = [window for window, _ in stages[1:]] + [reader]
        for number, ((window, part), end) in enumerate(zip(stages, ends, strict=True)):
            self.barriers[window].stages.append(FetchStage(fetch, number == 0, before, tuple(part)))
            self.barriers[end].arrivals.append(fetch)
            before = part[-1].spec
        self.schedule.fetches.update(((reader, fetch.value.id), fetch) for reader in fetch.readers)
        return True

    def _reserve(self, windows: range, axes: set[int], seconds: float) -> int | None:
        """Takes the time of a collective on its links from windows in their order; returns the last one it needs.

        Returns None without windows. Where they have too little time, the collective is waited for.
        """
        last_window = None
        for window in windows:
            free_s = min(self.free_s[axis][window] for axis in axes)
            if free_s <= 0 and window != windows[-1]:
                continue
            taken_s = min(seconds, max(free_s, 0.0))
            for axis in axes:
                self.free_s[axis][window] -= taken_s
            seconds, last_window = seconds - taken_s, window
            if seconds <= 0:
                break
        return last_window

    def _plan_results(self, place: int, step: Vertex | Region) -> None:
        """Says by when the results of a product or a loop must be there, and what XLA would otherwise put off."""
        is_product = isinstance(step, Region) or is_contraction(step)
        window = self.windows.of_place[place] + (0 if is_product else _GRACE)
        if window + 1 >= len(self.windows):
            return
        border = self.windows.start[window + 1]
        for number, value in enumerate(step.results):
            if isinstance(step, Vertex) and not is_product and not self._would_be_put_off(step, value, border):
                continue
            steps = ()
            if isinstance(step, Vertex):
                steps, _ = finished_steps(self.path, value, self.layout.strategies[step.index], number)
            late = self._late(value, border) if steps and len(step.results) == 1 else None
            if late is not None:
                assert isinstance(step, Vertex)
                self._defer(step, value, steps, late, window + 1)
            elif value.shape and (form := self._form_at(value, border)) is not None:
                self.barriers[window + 1].values.append(form)

    def _would_be_put_off(self, vertex: Vertex, value: Value, border: int) -> bool:
        """Returns whether XLA may compute a value windows after its operands, which would stay in memory until then."""
        is_candidate = self.follows_contraction[vertex.index] and self.is_written[value.id]
        waits = vertex.index in self.schedule.late_operations  # for a reduction, whose end is planned
        return bool(is_candidate and not waits and self._late(value, border) is not None)

    def _defer(
        self, vertex: Vertex, value: Value, steps: Sequence[ReshardStep], late: list[Vertex], window: int
    ) -> None:
        """Lets a reduction run in the window after the product, and what reads it there at once run after it."""
        self.schedule.late_reductions.add(vertex.index)
        self.schedule.late_operations.update(v.index for v in late)
        self.barriers[window].reductions.append(vertex)
        self.barriers[window].operations += late
        if not is_contraction(vertex):
            return  # it is small: XLA combines it with others
        seconds = sum(self._step_s(step, value) for step in steps)
        later = range(window, min(window + _FARTHEST, len(self.windows)))
        end = self._reserve(later, {step.axis for step in steps}, seconds)
        assert end is not None
        border = self.windows.start[end + 1] if end + 1 < len(self.windows) else None
        if border is not None and (form := self._form_at(value, border)) is not None:
            self.barriers[end + 1].values.append(form)
            self.schedule.reduced_values.add(form.id)

    def _late(self, value: Value, border: int) -> list[Vertex] | None:
        """Returns the cheap operations on a value before a place; None if anything else reads it there."""
        late: list[Vertex] = []
        unread = [value]
        while unread:
            for place in self.readers[unread.pop().id]:
                step = self.line[place][0]
                if place >= border:
                    continue
                if not isinstance(step, Vertex) or step.primitive not in _CHEAP:
                    return None
                late.append(step)
                unread += step.results
        late.sort(key=lambda vertex: vertex.position)
        return late

    def _form_at(self, value: Value, place: int) -> Value | None:
        """Returns the value, or a cheap operation's result of it, that is read from a place on; None if none is."""
        while value.id not in self.read_last and all(reader < place for reader in self.readers[value.id]):
            steps = (self.line[i][0] for i in self.readers[value.id])
            forms = [step.results[0] for step in steps if isinstance(step, Vertex) and step.primitive in _CHEAP]
            if not forms:
                return None
            value = forms[0]
        return value

    def _step_s(self, step: ReshardStep, value: Value, itemsize: int | None = None) -> float:
        num_bytes = value.num_bytes if itemsize is None else value.num_bytes / value.dtype.itemsize * itemsize
        return self.path.step_s(step, num_bytes)


def _gathers(steps: Sequence[ReshardStep]) -> bool:
    return any(step.kind == "all_gather" for step in steps)


class HeldPositions(NamedTuple):
    """The values that a schedule holds in memory for the sake of collectives, by id.

    Attributes:
      fetch_from: for weights that are gathered early, the position of the gather.
      reduce_until: for products that are reduced late, as the gradients of weights are, the position of the reduction.
    """

    fetch_from: dict[int, int]
    reduce_until: dict[int, int]


def held_positions(graph: Graph, axis_sizes: tuple[int, ...], hardware: Hardware, path: Paths) -> HeldPositions:
    """Returns how long a schedule holds gathered weights before they are read, and gradients before they are reduced.

    Where collectives hold arithmetic, no weight is gathered early, and no gradient reduced late.
    """
    if hardware.exposed_share == 1:
        return HeldPositions({}, {})
    compute_s = np.zeros(len(graph.vertices))
    for vertex in filter(is_contraction, graph.operations()):
        assert vertex.equation is not None
        flops_per_s = hardware.reached_flops_per_s(equation_dtype(vertex.equation)) * prod(axis_sizes)
        compute_s[vertex.index] = equation_flops(vertex.equation) / flops_per_s
    around = windows_around(graph, compute_s, least_window_s(path), num_after=1)
    consumers, is_weight = graph.consumers(), ~follows_contraction(graph)
    is_last = ~leads_to_contraction(graph)
    return HeldPositions(
        {
            value.id: min(int(around[reader.index, 0]) for reader, _ in consumers[value.id])
            for value in graph.values
            if is_weight[value.vertex] and consumers[value.id]
        },
        {
            value.id: int(around[vertex.index, 1])
            for vertex in graph.operations()
            if is_last[vertex.index] and is_contraction(vertex)
            for value in vertex.results
        },
    )

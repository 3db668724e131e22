"""Seconds of collectives and reshards on the axes of one mesh, as matrices over lists of specs.

Collectives of weights and of their gradients overlap with arithmetic, and compilers combine them. `CollectiveShares`
says which part of their time the step waits for, and which part of a latency each value pays.

A compiled loop ends all that a trip has begun before the next one begins. So the collectives of two trips are never
combined, and what the first product of a trip is computed from has no time to come from the trip before.

An operand that reaches a product in fewer bits is rounded before it is moved or after, whichever takes less time.
Rounding an array and then gathering the codes gives the same numbers as gathering it and then rounding, where one
scale is that of the whole array either way. Operands with scales for rows or blocks are rounded after they are moved.
Codes have one byte for each element, a quarter of float32's; but the largest magnitude of an array is a maximum over
the mesh axes that split it, and before a gather these are more. A maximum before a gather runs when the gather does, so
that the step waits for the same share of it; one after it is waited for.
"""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from cost.base import COLLECTIVE_KINDS, CollectiveKind, Hardware, Link
from cost.collectives import collective_lines
from cost.compute import roofline_s
from cost.lines import Line
from search_spaces.partition_specs import IndexedSpec
from search_spaces.sharding.base import Layout, Rates, ReshardStep
from search_spaces.sharding.coded_exchanges import exchange_bytes
from search_spaces.sharding.graph import (
    Graph,
    Region,
    Step,
    Value,
    Vertex,
    follows_contraction,
    is_contraction,
    leads_to_contraction,
    operations_in,
    values_of,
)
from search_spaces.sharding.product_formats import FORMATS, ProductFormat, contracted
from search_spaces.sharding.resharding import Paths
from search_spaces.sharding.spec import axes_in, divides, local_bytes

_FREE = Link(0.0, 0.0)
_REDUCTIONS = ("all_reduce", "reduce_scatter")


MAXIMUM_BYTES = 4.0
"""Bytes of a largest magnitude, which is float32."""


class Message(NamedTuple):
    """An operand on its way to a reader.

    Attributes:
      is_coded: whether it is rounded before it is moved.
      num_bytes: of the whole array as it is moved.
      maxima: mesh axes over which its largest magnitudes are found.
      rounded: the spec in which it is rounded; None if it is not, or if that was done for several readers.
    """

    is_coded: bool
    num_bytes: float
    maxima: tuple[int, ...]
    maxima_bytes: float = MAXIMUM_BYTES
    rounded: IndexedSpec | None = None


def message_of(
    path: Paths,
    value: Value,
    source: IndexedSpec,
    target: IndexedSpec,
    reader: Vertex | None = None,
    position: int = 0,
    name: str = "",
    is_shared: bool = False,
) -> Message:
    """Returns how a value goes from one spec to the one in which an operation reads it.

    Args:
      path: the steps between specs, with their seconds.
      source: the spec in which it is there.
      target: the spec in which the operation reads it.
      reader: the operation, where it is a product in a format.
      name: of the format; "" for none.
      is_shared: whether it is rounded to the format for several readers where it is.
    """
    if not name:
        return Message(False, float(value.num_bytes), ())
    to = FORMATS[name]
    if to.scaled != "tensor":
        assert reader is not None
        return Message(False, float(value.num_bytes), *maxima_of(path.axis_sizes, reader, position, target, to), target)
    key = value.shape, value.dtype.itemsize, source, target, to.is_delayed
    if key not in path.messages:
        path.messages[key] = _faster_message(path, value, source, target, to.is_delayed)
    message = path.messages[key]
    has_codes = is_shared and message.rounded == source
    return message._replace(maxima=(), rounded=None) if has_codes else message


def _faster_message(path: Paths, value: Value, source: IndexedSpec, target: IndexedSpec, is_delayed: bool) -> Message:
    own = float(value.num_bytes)
    before, after = (() if is_delayed else tuple(sorted(axes_in(spec))) for spec in (source, target))
    coded = Message(True, own / value.dtype.itemsize, before, rounded=source)
    exact = Message(False, own, after, rounded=target)
    is_even = all(divides(spec, value.shape, path.axis_sizes) for spec in (source, target))  # padding has no maximum
    if source == target or not is_even:
        return exact
    steps = path(source, target)
    return min(coded, exact, key=lambda message: _seconds(path, steps, message))


def shared_message(spec: IndexedSpec, name: str) -> Message:
    """Returns how a value that has a spec is rounded there to a format for several readers."""
    return Message(True, 0.0, () if FORMATS[name].is_delayed else tuple(sorted(axes_in(spec))), rounded=spec)


def is_message_coded(path: Any, layout: Layout, vertex: Vertex, position: int) -> bool:
    """Returns whether an operand of a vertex is rounded before it is moved to it; `path` is a `Paths` if any is."""
    strategy, operand = layout.strategies[vertex.index], vertex.operands[position]
    if not strategy.format or not isinstance(operand, Value):
        return False
    specs = layout.value_specs[operand.id], strategy.operands[position]
    return message_of(path, operand, *specs, vertex, position, strategy.format).is_coded


def maxima_of(
    axis_sizes: tuple[int, ...], reader: Vertex, position: int, spec: IndexedSpec, to: ProductFormat
) -> tuple[tuple[int, ...], float]:
    """Returns the mesh axes over which an operand's largest magnitudes are found, and their bytes on one device."""
    value, axes = reader.operands[position], to.maxima(reader, position, spec)
    assert isinstance(value, Value)
    if to.scaled == "tensor" or not axes:
        return axes, MAXIMUM_BYTES
    free = [d for d in range(len(value.shape)) if d not in contracted(reader, position)]
    parts = prod(axis_sizes[axis] for d in free for axis in spec[d])
    return axes, MAXIMUM_BYTES * prod(value.shape[d] for d in free) / parts


def maximum_step(axis: int) -> ReshardStep:
    """Returns the collective that finds largest magnitudes along a mesh axis; `MAXIMUM_BYTES` for each of them."""
    return ReshardStep("all_reduce", axis, 1.0, ())


def _seconds(path: Paths, steps: tuple[ReshardStep, ...], message: Message) -> float:
    moved_s = sum(path.step_s(step, message.num_bytes) for step in steps if step.kind != "slice")
    return moved_s + sum(path.step_s(maximum_step(axis), MAXIMUM_BYTES) for axis in message.maxima)


class ReshardCosts:
    """The costs of reshards on a mesh. Matrices are cached, because the layers of a model ask for the same ones.

    Args:
      hardware: has a link for each axis of more than one device.

    Attributes:
      path: the steps of a reshard on this mesh, as a function of two specs.
      largest_s_per_byte: of all kinds of large collectives on all axes.
    """

    def __init__(self, axis_names: Sequence[str], axis_sizes: tuple[int, ...], hardware: Hardware):
        self.axis_names, self.axis_sizes = tuple(axis_names), axis_sizes
        links = [hardware.link(name) if n > 1 else _FREE for name, n in zip(axis_names, axis_sizes, strict=True)]
        self.rates = tuple(_rates(link, n) for link, n in zip(links, axis_sizes, strict=True))
        self.path = Paths(axis_sizes, self.rates)
        self._hardware, self._combines_gathers = hardware, hardware.combines_gathers
        self.largest_s_per_byte = max((r.s_per_byte(kind) for r in self.rates for kind in r.lines), default=0.0)
        self._pairs: dict[tuple[IndexedSpec, IndexedSpec], tuple[Line, ...]] = {}
        self._grids: dict[tuple[tuple[IndexedSpec, ...], tuple[IndexedSpec, ...]], tuple[np.ndarray, np.ndarray]] = {}
        self._matrices: dict[tuple, np.ndarray] = {}

    def step_s(self, step: ReshardStep, num_bytes: float, latency_share: float = 1.0) -> float:
        """Returns the seconds that one step takes on its link, for an array with this number of bytes as a whole."""
        shares = self._combines_gathers or step.kind in _REDUCTIONS
        return self.path.step_s(step, num_bytes, latency_share if shares else 1.0)

    def collective_s(self, kind: CollectiveKind, axis: int, num_bytes: float) -> float:
        """Returns the seconds of a collective of some bytes that is no part of a reshard."""
        return self.step_s(ReshardStep(kind, axis, 1.0, ()), num_bytes)

    def maximum_s(self, axis: int, num_bytes: float = MAXIMUM_BYTES) -> float:
        """Returns the seconds in which an array's largest magnitudes, of some bytes, are found along an axis."""
        return self.collective_s("all_reduce", axis, num_bytes)

    def rounding_s(self, value: Value, message: Message, name: str) -> float:
        """Returns the seconds in which a device rounds its block of a value to a format, as a message has it.

        A kernel finds the largest magnitude, which reads nothing that is not at hand, and one reads the block and
        writes its codes. A kernel that rounds rows or blocks finds theirs itself, unless rows are split.
        """
        if message.rounded is None:
            return 0.0
        to = FORMATS[name]
        num_bytes = local_bytes(value, message.rounded, self.axis_sizes) * (1 + to.num_bytes / value.dtype.itemsize)
        num_kernels = 2 if to.scaled == "tensor" or message.maxima else 1
        kernel_s = float(roofline_s(0.0, num_bytes, str(value.dtype), self._hardware))
        return kernel_s + num_kernels * self._hardware.kernel_launch_s

    def coding_s(
        self, value: Value, sources: Sequence[IndexedSpec], targets: Sequence[IndexedSpec], name: str
    ) -> np.ndarray:
        """Returns the seconds `[sources, targets]` in which a device encodes its block of a value, and decodes another.

        A kernel reads the numbers and writes the codes of a format, and one does the reverse.
        """
        before, after = ([local_bytes(value, spec, self.axis_sizes) for spec in specs] for specs in (sources, targets))
        num_bytes = np.add.outer(before, after) * (1 + exchange_bytes(value, name) / value.num_bytes)
        return roofline_s(0.0, num_bytes, str(value.dtype), self._hardware) + 2 * self._hardware.kernel_launch_s

    def reshard_s(
        self,
        sources: tuple[IndexedSpec, ...],
        targets: tuple[IndexedSpec, ...],
        num_bytes: float,
        latency_share: float,
        weight: float,
    ) -> np.ndarray:
        """Returns the transfer matrix `[sources, targets]`, seconds. Equal requests return the same array.

        Args:
          latency_share: the part of the latency that is this array's own, where collectives are combined.
          weight: how often a step moves the array.
        """
        latency_share = latency_share if self._combines_gathers else 1.0
        key = (sources, targets, num_bytes, latency_share, weight)
        if key not in self._matrices:
            latency, slope = self._grid(sources, targets)
            seconds = latency * latency_share + slope * num_bytes
            matrix = weight * (seconds[0] if len(seconds) == 1 else seconds.min(axis=0))
            matrix.flags.writeable = False
            self._matrices[key] = matrix
        return self._matrices[key]

    def axes_s(
        self, sources: tuple[IndexedSpec, ...], targets: tuple[IndexedSpec, ...], num_bytes: float, latency_share: float
    ) -> np.ndarray:
        """Returns the seconds on each axis's link, `[sources, targets, A]`, of which `reshard_s` has the sums.

        Args:
          sources: as for `reshard_s`, and so are the others.
          latency_share: the part of the latency that is this array's own.
        """
        rows = {spec: i for i, spec in enumerate(dict.fromkeys(sources))}
        columns = {spec: j for j, spec in enumerate(dict.fromkeys(targets))}
        grid = np.zeros((len(rows), len(columns), len(self.axis_sizes)))
        for source, i in rows.items():
            for target, j in columns.items():
                for step in self.path(source, target):
                    grid[i, j, step.axis] += self.step_s(step, num_bytes, latency_share)
        return grid[np.ix_([rows[s] for s in sources], [columns[t] for t in targets])]

    def _grid(
        self, sources: tuple[IndexedSpec, ...], targets: tuple[IndexedSpec, ...]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns latency and slope of all pairs, `[lines, sources, targets]` each; equal specs are priced once.

        Where pairs have different numbers of lines, those with fewer repeat their last one.
        """
        if (sources, targets) not in self._grids:
            rows = {spec: i for i, spec in enumerate(dict.fromkeys(sources))}
            columns = {spec: j for j, spec in enumerate(dict.fromkeys(targets))}
            pairs = [self._pair(s, t) for s in rows for t in columns]
            most = max(map(len, pairs), default=1)
            padded = [lines + lines[-1:] * (most - len(lines)) for lines in pairs]
            small = np.array(padded).reshape(len(rows), len(columns), most, 2)
            grid = small[np.ix_([rows[s] for s in sources], [columns[t] for t in targets])].transpose(3, 2, 0, 1)
            self._grids[sources, targets] = np.ascontiguousarray(grid[0]), np.ascontiguousarray(grid[1])
        return self._grids[sources, targets]

    def _pair(self, source: IndexedSpec, target: IndexedSpec) -> tuple[Line, ...]:
        if (source, target) not in self._pairs:
            self._pairs[source, target] = self.path.lines(source, target)
        return self._pairs[source, target]


class CollectiveShares:
    """The parts of a collective's latency and time that count for a value of a graph.

    A value that lies between two contractions is an activation or its gradient: its collectives wait for each other and
    the arithmetic waits for them, so each counts in full. So do those of a value between a contraction of one trip of a
    loop and the first one of the next. All others, weights and what becomes of their gradients, are combined, so that
    they share one latency by their bytes, in each trip if they are in a loop; and they have time: a gather can start
    before the product that reads the weight, a reduction end long after the product that made the gradient. Of these
    the step waits for a share of their seconds only.

    Source for what has time: values that derive from parameters alone, and those that lead to outputs alone, as in
    autoparallel's overlap model (github.com/meta-pytorch/autoparallel, pull request 353).

    Args:
      exposed_share: the part of the seconds of collectives with time that a step waits for, from 0 to 1.
    """

    def __init__(self, graph: Graph, exposed_share: float = 1.0):
        carried = carries_waited_for(graph)
        is_activation = follows_contraction(graph, carried)
        self._is_critical = is_activation & leads_to_contraction(graph, carried)
        self._stored_bytes = float(max(1, sum(v.results[0].num_bytes for v in graph.inputs)))
        self._bytes_of_trip = bytes_of_trips(graph, is_activation)
        self._exposed_share = exposed_share

    def latency(self, value: Value) -> float:
        """Returns the part of a latency that is the value's own, from 0 to 1."""
        if self._is_critical[value.vertex]:
            return 1.0
        return min(1.0, value.num_bytes / self._bytes_of_trip.get(value.vertex, self._stored_bytes))

    def exposed(self, value: Value) -> float:
        """Returns the part of a collective's seconds that the step waits for, from 0 to 1."""
        return 1.0 if self._is_critical[value.vertex] else self._exposed_share


def _rates(link: Link, num_devices: int) -> Rates:
    return Rates({kind: collective_lines(kind, num_devices, link) for kind in COLLECTIVE_KINDS})


def loops_of(steps: Sequence[Step]) -> Iterator[Region]:
    """Returns the scans and while loops among some steps and inside of these, outer ones before inner ones."""
    for step in steps:
        if isinstance(step, Region):
            if step.carries or step.slices:
                yield step
            for block in step.blocks:
                yield from loops_of(block.steps)


def carries_waited_for(graph: Graph) -> set[int]:
    """Returns the indices of carries that the first contraction of a loop's body is computed from.

    They are activations that go from layer to layer. A parameter that a loop over training steps carries is another
    matter: unless it is the first layer's, the products before it leave time to gather it.
    """
    found: set[int] = set()
    for loop in loops_of(graph.block.steps):
        if loop.equation.params.get("length") == 1:  # there is no next trip
            continue
        first = next(filter(is_contraction, operations_in(loop.blocks[-1].steps)), None)
        if first is not None:
            found |= _ancestors(graph, first) & {carry.index for carry in loop.carries}
    return found


def bytes_of_trips(graph: Graph, is_activation: np.ndarray) -> dict[int, float]:
    """Returns for the vertices inside of loops the bytes of what a trip of the innermost loop reads of stacked weights.

    Loops that read none are left out, and so are the vertices that are in no other loop.

    Args:
      is_activation: for each vertex whether it depends on a contraction, as what a backward pass reads does.
    """
    num_bytes: dict[int, float] = {}
    for loop in loops_of(graph.block.steps):
        of_trip = sum(vertex.results[0].num_bytes for vertex in loop.slices if not is_activation[vertex.index])
        if of_trip:
            inside = [*loop.slices, *(vertex for block in loop.blocks for vertex in operations_in(block.steps))]
            num_bytes.update((vertex.index, float(of_trip)) for vertex in inside)
    return num_bytes


def _ancestors(graph: Graph, vertex: Vertex) -> set[int]:
    """Returns the vertices that a vertex is computed from in its own trip of each loop, itself included."""
    seen, left = {vertex.index}, [vertex]
    while left:
        one = left.pop()
        operands = one.operands[:1] if one.kind == "carry" else one.operands
        makers = {value.vertex for value in values_of(operands)} - seen
        seen |= makers
        left += [graph.vertices[index] for index in makers]
    return seen

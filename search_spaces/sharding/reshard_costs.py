"""Seconds of collectives and reshards on the axes of one mesh, as matrices over lists of specs.

Collectives of weights and of their gradients overlap with arithmetic, and compilers combine them. `CollectiveShares`
says which part of their time the step waits for, and which part of a latency each value pays.

A compiled loop ends all that a trip has begun before the next one begins. So the collectives of two trips are never
combined, and what the first product of a trip is computed from has no time to come from the trip before.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from cost.base import COLLECTIVE_KINDS, Hardware, Link
from cost.collectives import collective_lines
from cost.compute import roofline_s
from cost.lines import Line
from search_spaces.partition_specs import IndexedSpec
from search_spaces.sharding.base import Rates, ReshardStep
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
from search_spaces.sharding.product_formats import FORMATS
from search_spaces.sharding.resharding import MAXIMUM_BYTES, Message, Paths, maximum_step
from search_spaces.sharding.spec import local_bytes

_FREE = Link(0.0, 0.0)
_REDUCTIONS = ("all_reduce", "reduce_scatter")


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

    def maximum_s(self, axis: int, num_bytes: float = MAXIMUM_BYTES) -> float:
        """Returns the seconds in which an array's largest magnitudes, of some bytes, are found along an axis."""
        return self.step_s(maximum_step(axis), num_bytes)

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

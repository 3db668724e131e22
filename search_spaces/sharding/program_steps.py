"""The steps of a device program with their seconds, without a compiler: what its timeline is played from.

The interpreter that runs a program (`interpreter.py`) runs here on tokens instead of arrays. A token names the step
that makes an array, so that what an operation reads, where a collective stands and what a barrier joins is written down
exactly as the program has it, in its order. There is no second account of the schedule that could differ.

The body of a loop is interpreted once, and its steps have the seconds of all trips. Finishing times are sums and maxima
of seconds, so a body whose steps take n times as long takes n times as long: what is played once that way is n trips,
each of which begins when the one before has ended. That is how a compiled loop runs: its collectives end in the trip
in which they start.
"""

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from math import prod
from typing import Any, NamedTuple

import jax

from cost.streams import COMPUTE, Step
from search_spaces.partition_specs import IndexedSpec
from search_spaces.sharding.base import Layout, ReshardStep
from search_spaces.sharding.coded_exchanges import exchange_bytes
from search_spaces.sharding.coded_sums import finished_steps
from search_spaces.sharding.executor import Flow, Keeping, ReadOperand
from search_spaces.sharding.graph import Graph, Value, Vertex
from search_spaces.sharding.interpreter import GraphInterpreter
from search_spaces.sharding.kept_codes import LateReads
from search_spaces.sharding.node_costs import NodeCosts
from search_spaces.sharding.product_formats import FORMATS
from search_spaces.sharding.reshard_costs import Message, maxima_of
from search_spaces.sharding.schedule import ProgramSchedule
from search_spaces.sharding.spec import local_bytes, parts_of

INSIDE_HOST, BETWEEN_HOSTS, HOST_MEMORY = COMPUTE + 1, COMPUTE + 2, COMPUTE + 3
"""Streams of links. A device sends to all others of its host through one link, whatever the mesh axis."""
# Collectives that XLA combines, and the size of a combined result: xla/service/gpu, `kDefaultAllGatherCombineThreshold`
# and those of reduce-scatters and all-reduces.
_COMBINED = ("all_gather", "reduce_scatter", "all_reduce")
_MOST_COMBINED_BYTES = 30 * 2**20


class StepOrigin(NamedTuple):
    """Where a step of a program comes from.

    Attributes:
      kind: the kind of a collective; "copy" from or to the host's memory; "compute" for arithmetic, "barrier" where the
        program joins what must be there.
      vertex: the index of the operation, or of the one whose result a collective moves; -1 for barriers.
    """

    kind: str
    vertex: int = -1
    axes: tuple[int, ...] = ()


class ProgramSteps(NamedTuple):
    """A device program as steps, in program order, with the origin of each."""

    steps: tuple[Step, ...]
    origins: tuple[StepOrigin, ...]


class _Token(NamedTuple):
    """An array that a step makes; those of index -1 are there from the start. Codes have a byte for each element."""

    step: int
    is_coded: bool = False


_THERE = _Token(-1)


def _is_token(array: Any) -> bool:
    return isinstance(array, _Token)


def program_steps(
    graph: Graph, layout: Layout, costs: NodeCosts, schedule: ProgramSchedule, late: LateReads
) -> ProgramSteps:
    """Returns the steps of a layout's program on one device.

    Args:
      costs: seconds of arithmetic and collectives.
      late: what is kept as codes for the backward pass.
    """
    recorder = _Recorder(graph, layout, costs)
    copies = {"from_host": recorder.from_host, "to_host": recorder.to_host}
    flow = Flow(recorder.barrier, recorder.scan, recorder.while_loop, recorder.switch, **copies)
    keeping = Keeping(recorder.keep, recorder.kept, late)
    run = GraphInterpreter(graph, layout, costs.reshard_costs.path, recorder, schedule, flow, recorder.encode, keeping)
    run([_THERE] * len(graph.inputs), [_THERE] * len(graph.constants))
    return ProgramSteps(tuple(recorder.steps), tuple(recorder.origins))


def links_of_axes(costs: NodeCosts) -> list[tuple[int, ...]]:
    """Returns for each mesh axis the links that its collectives take: all axes in a host share that of a device."""
    links = []
    for name, size in zip(costs.reshard_costs.axis_names, costs.axis_sizes, strict=True):
        num_hosts = costs.hardware.link(name).num_hosts if size > 1 else 1
        inside = (INSIDE_HOST,) if size > num_hosts else ()
        links.append((*inside, BETWEEN_HOSTS) if num_hosts > 1 else (INSIDE_HOST,))
    return links


class _Recorder:
    """An executor on tokens, as `executor.Arrays` and `executor.Flow`, that writes steps down."""

    def __init__(self, graph: Graph, layout: Layout, costs: NodeCosts):
        self.graph, self.layout, self.costs = graph, layout, costs
        self.steps: list[Step] = []
        self.origins: list[StepOrigin] = []
        self.weight = 1.0
        self.combined_bytes: dict[tuple[str, tuple[int, ...]], float] = {}  # since the last barrier
        self.links_of_axis = links_of_axes(costs)
        self.holds = costs.hardware.exposed_share == 1
        self.begin = -1  # the step at which the innermost loop begins
        self.rounded: dict[Hashable, _Token] = {}

    # `executor.Arrays`

    def reshard(
        self, array: Any, value: Value, source: IndexedSpec, steps: Sequence[ReshardStep], exchanged_in: str = ""
    ) -> Any:
        """Adds the collective of each step; before those of an exchange as codes, what encodes and decodes."""
        num_bytes = float(value.num_bytes)
        if array.is_coded:
            num_bytes /= value.dtype.itemsize
        elif exchanged_in:
            costs, num_bytes = self.costs.reshard_costs, exchange_bytes(value, exchanged_in)
            seconds = self.weight * costs.coding_s(value, [source], [steps[-1].spec], exchanged_in).item()
            array = self._add((COMPUTE,), seconds, [array], StepOrigin("compute", value.vertex))
        for step in steps:
            array = self._send(array, value, [step], num_bytes)._replace(is_coded=array.is_coded)
        return array

    def fix(self, array: Any, value: Value, spec: IndexedSpec) -> Any:
        """Adds what a loop writes of the rows of its trips; other arrays are as they are."""
        del spec
        vertex = self.graph.vertices[value.vertex]
        if vertex.kind != "stack":
            return array
        seconds = self.costs.chosen_compute_s(vertex, self.layout.strategies[vertex.index])
        return self._add((COMPUTE,) if seconds else (), seconds, [array], StepOrigin("compute", vertex.index))

    def operate(self, vertex: Vertex, read: ReadOperand) -> Sequence[Any]:
        """Adds an operation with what it sends itself."""
        self.weight = vertex.weight
        strategy = self.layout.strategies[vertex.index]
        operands = zip(vertex.operands, strategy.operands, strict=True)
        tokens = [read(operand, spec, i) for i, (operand, spec) in enumerate(operands)]
        if strategy.format:
            tokens = [
                token if token.is_coded else self.encode(token, vertex, i, strategy.operands[i])
                for i, token in enumerate(tokens)
            ]
        seconds = self.costs.chosen_compute_s(vertex, strategy)
        token = self._add((COMPUTE,) if seconds else (), seconds, tokens, StepOrigin("compute", vertex.index))
        for collective, _, exposed_s in self.costs.own_collectives(vertex, strategy):
            origin = StepOrigin(collective.kind, vertex.index, (collective.axis,))
            token = self._add(self._links((collective.axis,)), vertex.weight * exposed_s, [token], origin)
        return [token] * len(vertex.results)

    def encode(self, array: _Token, vertex: Vertex, position: int, spec: IndexedSpec) -> _Token:
        """Adds the collectives that find an operand's largest magnitude, and what rounds it.

        Products that read the same numbers have them rounded once: XLA merges what computes the same.
        """
        operand = vertex.operands[position]
        assert isinstance(operand, Value)
        name, reshards = self.layout.strategies[vertex.index].format, self.costs.reshard_costs
        axes, num_bytes = maxima_of(self.costs.axis_sizes, vertex, position, spec, FORMATS[name])
        own = None if FORMATS[name].scaled == "tensor" else (vertex.index, position)
        key = array, operand.id, FORMATS[name].dtypes(vertex)[position], spec, own
        if key not in self.rounded:
            origin = StepOrigin("all_reduce", operand.vertex)
            for axis in axes:
                seconds = vertex.weight * reshards.maximum_s(axis, num_bytes)
                array = self._add(self._links((axis,)), seconds, [array], origin._replace(axes=(axis,)))
            message = Message(True, 0.0, axes, num_bytes, spec)
            seconds = vertex.weight * reshards.rounding_s(operand, message, name)
            array = self._add((COMPUTE,), seconds, [array], StepOrigin("compute", vertex.index))
            self.rounded[key] = array._replace(is_coded=True)
        return self.rounded[key]

    def keep(self, array: _Token, value: Value) -> tuple[_Token, _Token]:
        """Adds what encodes a value for the backward pass, and decodes it, which has the same seconds."""
        vertex = self.graph.vertices[value.vertex]
        seconds = self.costs.chosen_keeping_s(vertex, self.layout)
        codes = self._add((COMPUTE,), seconds, [array], StepOrigin("compute", vertex.index))
        return array, codes

    def kept(self, codes: _Token, value: Value) -> _Token:
        """Returns the decoded value; `keep` has the seconds."""
        del value
        return codes

    def reduce(self, vertex: Vertex, results: Sequence[Any], residual: Any = None) -> Sequence[Any]:
        """Adds the collectives that finish an operation's partial results."""
        del residual
        self.weight = vertex.weight
        strategy = self.layout.strategies[vertex.index]
        reduced = []
        for i, (token, value) in enumerate(zip(results, vertex.results, strict=True)):
            steps, num_coded = finished_steps(self.costs.reshard_costs.path, value, strategy, i)
            for _, group in groupby(enumerate(steps), key=lambda step: step[0] if num_coded else step[1].kind):
                token = self._send(token, value, [step for _, step in group], float(value.num_bytes))
            reduced.append(token)
        return reduced

    def from_host(self, array: Any, value: Value, after: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
        """Adds the copy of an array of the state to the device."""
        return self._copy([array, *after], value, self.graph.vertices[value.vertex].index), after

    def to_host(self, array: Any, value: Value) -> Any:
        """Adds the copy of what replaces an array of the state to the host's memory."""
        (argument,) = (i for o, i in zip(self.graph.outputs, self.graph.feedback, strict=True) if o is value)
        assert argument is not None
        return self._copy([array], value, self.graph.inputs[argument].index)

    def _copy(self, arrays: Sequence[Any], value: Value, vertex: int) -> _Token:
        rate = self.costs.hardware.host_memory_bytes_per_s
        assert rate is not None
        num_bytes = local_bytes(value, self.layout.strategies[vertex].unreduced[0], self.costs.axis_sizes)
        streams = (COMPUTE,) if self.holds else (HOST_MEMORY,)
        return self._add(streams, num_bytes / rate, arrays, StepOrigin("copy", value.vertex))

    def context_of(self, equation: Any) -> AbstractContextManager[None]:
        """Returns a context that changes nothing."""
        del equation
        return nullcontext()

    # `executor.Flow`

    def barrier(self, arrays: Sequence[Any]) -> list[Any]:
        """Joins arrays; what is computed after it in the program is computed after it."""
        self.combined_bytes.clear()
        token = self._add((COMPUTE,), 0.0, jax.tree.leaves(arrays, is_leaf=_is_token), StepOrigin("barrier"))
        return jax.tree.map(lambda array: token._replace(is_coded=array.is_coded), arrays, is_leaf=_is_token)

    def scan(self, equation: Any, body: Callable[..., Any], carries: Any, slices: Any) -> tuple[Any, Any]:
        """Runs the body once, with the seconds of all trips."""
        return self._loop(equation.params["length"], (carries, slices), body)

    def while_loop(self, proceed: Callable[..., Any], step: Callable[..., Any], carries: Any) -> Any:
        """Runs condition and body once: their length is not known."""

        def body(carries: Any) -> Any:
            proceed(carries)
            return step(carries)

        return self._loop(1, (carries,), body)

    def switch(self, index: Any, branches: Sequence[Callable[[], list[Any]]]) -> list[Any]:
        """Runs all branches, as their price has it."""
        results = [branch() for branch in branches]
        return [self._add((), 0.0, [index, *own], StepOrigin("barrier")) for own in zip(*results, strict=True)]

    def _loop(self, trips: int, arrays: tuple[Any, ...], body: Callable[..., Any]) -> Any:
        """Runs a body between two joins: it begins when all it reads is there, and ends when all it began has ended."""
        outside = self.begin, self.weight
        tokens = jax.tree.leaves(arrays, is_leaf=_is_token)
        self._add((COMPUTE,), 0.0, tokens, StepOrigin("barrier"))
        self.begin, self.weight = len(self.steps) - 1, self.weight * trips
        results = body(*jax.tree.map(lambda _: _Token(self.begin), arrays, is_leaf=_is_token))
        end = self._add((COMPUTE,), 0.0, self._unread(self.begin), StepOrigin("barrier"))
        self.begin, self.weight = outside
        return jax.tree.map(lambda _: end, results, is_leaf=_is_token)

    def _unread(self, first: int) -> list[_Token]:
        """Returns the steps from one on that no other reads."""
        read = {i for step in self.steps[first:] for i in step.reads}
        return [_Token(i) for i in range(first, len(self.steps)) if i not in read]

    def _send(self, array: Any, value: Value, steps: Sequence[ReshardStep], num_bytes: float) -> Any:
        """Adds a collective over the axes of some steps of one kind, for an array of some bytes as a whole."""
        costs = self.costs
        steps = [step for step in steps if step.kind != "slice" and costs.axis_sizes[step.axis] > 1]
        if not steps:
            return array
        kind, axes = steps[0].kind, tuple(step.axis for step in steps)
        latency_share = self._latency_share(kind, axes, value, steps, num_bytes)
        price = costs.reshard_costs.path.step_s
        sending_s = max(price(step, num_bytes, 0.0) for step in steps)
        latency_s = sum(price(step, 0.0, latency_share) for step in steps)
        seconds = self.weight * (sending_s + latency_s)
        return self._add(self._links(axes), seconds, [array], StepOrigin(kind, value.vertex, axes))

    def _latency_share(
        self, kind: str, axes: tuple[int, ...], value: Value, steps: Sequence[ReshardStep], num_bytes: float
    ) -> float:
        """Returns 0 for a collective that XLA combines with one before it in the same window, else 1."""
        if kind not in _COMBINED or self.costs.shares.latency(value) == 1.0:
            return 1.0
        size = num_bytes / prod(parts_of(steps[-1].spec, self.costs.axis_sizes))
        before = self.combined_bytes.get((kind, axes))
        fits = before is not None and before + size <= _MOST_COMBINED_BYTES
        self.combined_bytes[kind, axes] = size + (before or 0.0) if fits else size
        return 0.0 if fits else 1.0

    def _links(self, axes: tuple[int, ...]) -> tuple[int, ...]:
        return (COMPUTE,) if self.holds else tuple(sorted({link for axis in axes for link in self.links_of_axis[axis]}))

    def _add(self, streams: tuple[int, ...], seconds: float, arrays: Sequence[Any], origin: StepOrigin) -> _Token:
        reads = tuple(dict.fromkeys(a.step for a in arrays if isinstance(a, _Token) and a.step >= 0))
        if self.begin >= 0 and all(i < self.begin for i in reads):
            reads = (*reads, self.begin)
        if not streams and len(reads) < 2:
            return _Token(reads[0]) if reads else _THERE
        self.steps.append(Step(streams, seconds, reads))
        self.origins.append(origin)
        return _Token(len(self.steps) - 1)

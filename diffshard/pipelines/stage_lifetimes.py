"""How often the programs of a stage run, and until when their arrays are in memory.

The function of a stage (`stage_function.py`) is traced as one program, but it runs as several. What goes from one to
another is in memory whoever reads it: residuals until the backward program ends, arrays that other stages send until
the program that reads them ends, and the next micro-batch's beside them, which may have arrived from both sides.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import prod
from typing import Any

from jax.sharding import AbstractMesh, NamedSharding

from cost.pipeline_schedules import BACKWARD, FORWARD, WEIGHTS, ScheduleGraph, in_flight
from diffshard.pipelines.copies import bytes_each
from diffshard.pipelines.stage_function import StageFunction
from search_spaces.pipelines.stage_labels import Key, Label
from search_spaces.pipelines.stage_programs import StagedStep
from search_spaces.sharding.graph import Graph, Value, Vertex, is_contraction
from search_spaces.sharding.memory import has_one_trip


def weigh(function: StageFunction, graph: Graph, mesh: AbstractMesh) -> None:
    """Makes the traced graph of a stage's function say what the programs of the stage do.

    What runs for each micro-batch counts M times.

    Args:
      graph: of this function; it is changed.
    """
    _Lifetimes(function, graph).write(tuple(mesh.shape.values()))
    for vertex in graph.vertices:
        if function.is_each(vertex):
            vertex.weight *= function.staged.num_microbatches
            vertex.operand_weight = [w * function.staged.num_microbatches for w in vertex.operand_weight]


_COMBINED_BYTES = 30 * 2**20
"""Up to this size of their results XLA's GPU compiler combines reductions, which then wait for the last of them.

Source: XLA, `xla_gpu_reduce_scatter_combine_threshold_bytes` and the like.
"""


class _Lifetimes:
    """Until when arrays of a stage are in memory.

    Attributes:
      ends: the positions of the last operations of the forward and the backward program.
      inputs: the flat arguments of the graph, each with its key; with None for sums.
    """

    def __init__(self, function: StageFunction, graph: Graph):
        self.function, self.graph = function, graph
        self._named = {v.equation.params["name"]: v for v in graph.operations() if v.primitive == "name" and v.equation}
        forward_end = max((v.position for v in graph.vertices if function.is_forward(v)), default=-1)
        end = max((v.position for v in graph.vertices if function.is_each(v)), default=0)
        self.ends = {"forward": forward_end, "backward": end}
        arguments = function.arguments
        queue = function.queued * (function.in_flight - 1)
        keys = [*arguments.kept, *(None for _ in function.sums), *queue, *arguments.read, *arguments.received]
        self.inputs = list(zip(keys, (v.results[0] for v in graph.inputs), strict=True))

    def write(self, axis_sizes: tuple[int, ...]) -> None:
        """Writes them to the graph."""
        self._keep_residuals()
        self._keep_for_step()
        own = self._receive()
        self._give_up(own, self._send())
        self._store_as_received(axis_sizes)
        self._combine_reductions(prod(axis_sizes))

    def named(self, key: Key) -> Value | None:
        """Returns the value that has the name of a key; None where a key has none, as single numbers."""
        vertex: Vertex | None = self._named.get(self.function.names.get(key, ""))
        return None if vertex is None else vertex.results[0]

    def _keep_residuals(self) -> None:
        """Keeps residuals whoever reads them, to the end of the backward program."""
        values = [self.named(key) for key in self.function.residuals] + [value for _, value in self._queue()]
        self.graph.stored_until.update({value.id: self.ends["backward"] for value in values if value is not None})

    def _queue(self) -> list[tuple[Key, Value]]:
        """Returns the residuals of the micro-batch that has been kept the longest; of it the backward program runs."""
        function, first = self.function, len(self.function.arguments.kept) + len(self.function.sums)
        return self.inputs[first : first + len(function.queued)] if function.in_flight > 1 else []

    def _keep_for_step(self) -> None:
        """Keeps what the begin program makes, copies of arguments included, until the last micro-batch."""
        function, end = self.function, self.ends["backward"]
        read = {
            key for program in (function.forward, function.backward) if program is not None for key in program.reads
        }
        begin = function.programs.get(Label("begin", function.stage))
        for key in () if begin is None else begin.makes:
            value = self.named(key)
            if key in read and value is not None:
                self.graph.stored_until[value.id] = end
        self._free_copies(read)
        of_step = {*function.arguments.kept, *function.arguments.read} & read
        self.graph.copied_until.update({value.id: end for key, value in self.inputs if key in of_step})

    def _free_copies(self, read: set[Key]) -> None:
        """Frees arguments that another stage keeps after the last program of this one that reads them."""
        function = self.function
        finished = {key for label, p in function.programs.items() if label.kind == "finish" for key in p.reads}
        begin_end = min((v.position for v in self.graph.vertices if function.is_each(v)), default=0) - 1
        homes = dict(zip(function.staged.inputs, function.staged.homes, strict=True))
        for key, value in self.inputs:
            if key in homes and homes[key] != function.stage and key in function.arguments.read and key not in finished:
                self.graph.stored_until[value.id] = self.ends["backward"] if key in read else begin_end

    def _send(self) -> dict[str, list[Any]]:
        """Ends what is made for other stages with its program; returns the types, by the kind of the program."""
        types: dict[str, list[Any]] = {"forward": [], "backward": []}
        for key in self.function.sent:
            value, kind = self.named(key), self.function.staged.makers[key].kind
            if value is not None and kind in types:
                value.last_read_at = self.ends[kind]
                types[kind].append(self.function.type_of(key))
        return types

    def _receive(self) -> dict[str, dict[Key, Value]]:
        """Keeps what has arrived for the next micro-batch; returns what is there of the one that runs, by program.

        The argument stands for the next micro-batch's array, and its name for that of the one that runs.
        """
        function, own = self.function, {"forward": {}, "backward": {}}
        num_received = len(function.arguments.received)
        for key, argument in self.inputs[len(self.inputs) - num_received :]:
            is_gradient, value = function.is_sent_back(key), self.named(key)
            if value is None or not (is_gradient or function.is_sent_forward(key)):
                continue
            has_next = function.in_flight > 1 if is_gradient else function.in_flight < function.staged.num_microbatches
            if has_next:
                self.graph.stored_until[argument.id] = self.ends["backward"]
            if key not in function.residuals:
                own["backward" if is_gradient else "forward"][key] = value
        of_backward = self._queue() or [(key, self.named(key)) for key in function.queued]
        own["backward"].update({key: value for key, value in of_backward if value is not None})
        return own

    def _give_up(self, own: dict[str, dict[Key, Value]], sent: dict[str, list[Any]]) -> None:
        """Keeps what a program reads to its end, but for arrays whose memory a result of their type takes."""
        function = self.function
        for program in filter(None, (function.forward, function.backward)):
            kind = program.label.kind
            for key in program.reads:
                value = own[kind].get(key)
                if value is None:
                    continue
                if function.type_of(key) in sent[kind]:
                    sent[kind].remove(function.type_of(key))
                    self.graph.stored_until[value.id] = value.made_at
                else:
                    self.graph.stored_until[value.id] = self.ends[kind]

    def _store_as_received(self, axis_sizes: tuple[int, ...]) -> None:
        """Leaves what is received on devices as it came: in equal parts, from a mesh like this one."""
        for key, value in self.inputs:
            if key is not None and (self.function.is_sent_forward(key) or self.function.is_sent_back(key)):
                parts, _ = shared_parts(self.function.staged.avals[key].shape, axis_sizes, axis_sizes)
                self.graph.stored_parts[value.id] = parts

    def _combine_reductions(self, num_devices: int) -> None:
        """Keeps gradients of weights unreduced until those are there with which they are reduced in one collective."""
        found = [self._product_of(a.part) for a in self.function.sums]
        products = sorted((value for value in found if value is not None), key=lambda value: value.made_at)
        group: list[Value] = []
        size = 0.0
        for value in products:
            num_bytes = value.num_bytes / num_devices
            if size + num_bytes > _COMBINED_BYTES:
                group, size = [], 0.0
            group.append(value)
            size += num_bytes
            self.graph.reduced_until.update({v.id: value.made_at for v in group})

    def _product_of(self, key: Key) -> Value | None:
        """Returns the product that an array is, perhaps in another shape or type; None if it is none."""
        value = self.named(key)
        while value is not None:
            vertex = self.graph.vertices[value.vertex]
            if is_contraction(vertex):
                return value
            operands = [o for o in vertex.operands if isinstance(o, Value)]
            is_single_trip = vertex.kind == "stack" and has_one_trip(vertex)
            value = operands[0] if len(operands) == 1 and (vertex.kind == "operation" or is_single_trip) else None
        return None


def shared_parts(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> tuple[int, int]:
    """Returns into how many parts an array is split that goes from one mesh to another, and along which dimension.

    The parts are even, and as many as some first axes of both meshes have together.
    """
    possible = _first_products(one) & _first_products(other)
    parts, dim = max(((n, -d) for d, size in enumerate(shape) for n in possible if size % n == 0), default=(1, 0))
    return parts, -dim


def _first_products(sizes: Sequence[int]) -> set[int]:
    return {prod(sizes[:count]) for count in range(len(sizes) + 1)}


def split_bytes(
    staged: StagedStep, stage: int, graph: ScheduleGraph, sharding: Callable[[int, Key], NamedSharding]
) -> int:
    """Returns the bytes that a stage keeps more on each device than its residuals times the micro-batches in flight.

    Args:
      staged: a step with split backward programs.
      stage: which one.
      graph: the schedule.
      sharding: how a stage stores an array.
    """
    programs = [staged.programs.get(Label(kind, stage)) for kind in ("backward", "weights")]
    backward, weights = (set() if program is None else set(program.reads) for program in programs)

    def total(keys: set[Key], *kinds: str) -> int:
        of_kinds = (key for key in keys if key in staged.makers and staged.makers[key].kind in kinds)
        avals = ((key, staged.avals[key]) for key in of_kinds)
        return sum(bytes_each(aval.shape, aval.dtype, sharding(stage, key)) for key, aval in avals)

    before, after = total(backward | weights, "forward"), total(weights, "forward", "backward")
    change = {FORWARD: before, BACKWARD: after - before, WEIGHTS: -after}
    kinds = graph.kind[(graph.stage == stage)].tolist()
    most = max(accumulate(change.get(kind, 0) for kind in kinds))
    return most - int(in_flight(graph)[stage]) * before

"""A stage of a pipeline as one function, so that the sharding search prices and lays out all of it together.

The function runs what a stage does in a step: the forward and the backward program of one micro-batch, which count M
times, and the end of the step. A stage that keeps k micro-batches has the residuals of k - 1 earlier ones as arguments,
from which the backward program reads and to which the forward program adds, so that they count as memory. Arrays that
have a key leave a name in the traced function, by which their specs are found in a layout.

It is for planning; what runs are the programs themselves. What goes from one of these to another is in memory whoever
reads it: residuals until the backward program ends, arrays that other stages send until the program that reads them
ends, and the next micro-batch's beside them, which may have arrived from both sides.
"""

from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core
from jax.sharding import AbstractMesh

from diffshard.pipelines.copies import shared_parts
from search_spaces.pipelines.microbatches import combined_with
from search_spaces.pipelines.stage_labels import NUMBER, Accumulation, Key, Label
from search_spaces.pipelines.stage_programs import StagedStep, StageProgram
from search_spaces.replay import bind, context_of
from search_spaces.sharding.graph import Graph, Value, Vertex, is_contraction
from search_spaces.sharding.memory import has_one_trip

_COMBINED = ("sum", "max", "min")
_SCOPE, _FORWARD = "each micro-batch", "forward program"


class StageFunction:
    """The function of a stage.

    Args:
      in_flight: k, how many micro-batches it keeps at most.

    Attributes:
      kept, read, received: the keys of the arguments that results replace, of others of the step, and of what other
        stages send.
      results: the keys of other results.
      residuals: the keys of what the backward program of a micro-batch reads that its forward program made or read
        itself, if it is not there for the whole step: these arrays are there for each micro-batch that is kept.
      queued: those that devices keep for each micro-batch in flight; the others are offloaded.
      sent: the keys of what it makes only for other stages and its own micro-batches.
      totals: the keys of what micro-batches make together, of all stages.
    """

    def __init__(self, staged: StagedStep, stage: int, in_flight: int):
        self.staged, self.stage, self.in_flight = staged, stage, in_flight
        self.programs = {label: p for label, p in staged.programs.items() if label.stage == stage}
        made = {key for program in self.programs.values() for key in program.makes}
        made |= {a.total for program in self.programs.values() for a in program.accumulations}
        reads = dict.fromkeys(key for program in self.programs.values() for key in program.reads)
        inputs = {key: position for position, key in enumerate(staged.inputs)}
        own = made | {key for key, home in staged.home_of.items() if home == stage and key in reads}
        self.result_of = {  # of the arguments that this stage keeps and replaces; by others, as previous versions are
            key: staged.outputs[result]
            for key, position in inputs.items()
            if (result := staged.replaced_by[position]) is not None
            and staged.homes[position] == stage
            and staged.outputs[result] in own
        }
        self.kept = tuple(key for key in inputs if key in self.result_of)
        self.read = tuple(key for key in reads if key in inputs and key not in self.result_of)
        self.received = tuple(key for key in reads if key not in inputs and key not in made and key != NUMBER)
        results = {key for key in staged.outputs if not isinstance(key, core.Literal)}
        read_elsewhere = {key for key, stages in staged.readers.items() if stages - {stage}}
        self.totals = {a.total for program in staged.programs.values() for a in program.accumulations}
        self.sent = made & read_elsewhere - results - self.totals
        self.results = tuple(k for k in made if (k in results or k in read_elsewhere) and k not in self.kept)
        self.names: dict[Key, str] = {}
        self.forward = self.programs.get(Label("forward", stage))
        self.backward = self.programs.get(Label("backward", stage))
        self.sums: tuple[Accumulation, ...] = () if self.backward is None else self.backward.accumulations
        made_forward = set() if self.forward is None else set(self.forward.makes)
        waiting = {key for key in self.received if self.is_sent_forward(key)}
        made_forward |= waiting
        self.residuals = [] if self.backward is None else [key for key in self.backward.reads if key in made_forward]
        self.queued = [key for key in self.residuals if key not in staged.offloaded]

    @property
    def shapes(self) -> tuple[list[Any], list[Any], list[list[Any]], list[Any], list[Any]]:
        """The types of the arguments of a call."""
        type_of = self.staged.type_of
        queue = [[type_of(key) for key in self.queued] for _ in range(self.in_flight - 1)]
        kept, read, received = ([type_of(key) for key in keys] for keys in (self.kept, self.read, self.received))
        totals = [type_of(a.total) for a in self.sums]
        return kept, totals, queue, read, received

    def __call__(
        self, kept: list[Any], totals: list[Any], queue: list[list[Any]], read: list[Any], received: list[Any]
    ) -> tuple[list[Any], list[Any], list[list[Any]], dict[str, Any]]:
        """Returns the results that replace the first three arguments, and the others."""
        env: dict[Key, Any] = {NUMBER: jnp.int32(0), **dict(zip(self.kept, kept, strict=True))}
        env.update(zip(self.read, read, strict=True))
        env.update({key: self._named(key, array) for key, array in zip(self.received, received, strict=True)})
        self._run(env, self.programs.get(Label("begin", self.stage)))
        with jax.named_scope(_SCOPE):
            with jax.named_scope(_FORWARD):
                self._run(env, self.forward)
            queue = [*queue, [env[key] for key in self.queued]]
            env.update(zip(self.queued, queue[0], strict=True))
            self._run(env, self.backward)
            totals = [self._added(a, total, env[a.part]) for a, total in zip(self.sums, totals, strict=True)]
        env.update({a.total: total for a, total in zip(self.sums, totals, strict=True)})
        for label, program in self.programs.items():
            if label.kind == "finish":
                self._run(env, program)
        others = {f"result {i}": env[key] for i, key in enumerate(self.results) if key in env}
        return [env[self.result_of[key]] for key in self.kept], totals, queue[1:], others

    def is_sent_forward(self, key: Key) -> bool:
        """Returns whether the forward program of another stage sends an array, which then waits for its readers."""
        maker = self.staged.makers.get(key)
        return maker is not None and maker.kind == "forward" and maker.stage != self.stage

    def is_sent_back(self, key: Key) -> bool:
        """Returns whether the backward program of another stage sends an array for each micro-batch."""
        maker = self.staged.makers.get(key)
        return maker is not None and maker.kind == "backward" and maker.stage != self.stage and key not in self.totals

    @staticmethod
    def is_each(vertex: Vertex) -> bool:
        """Returns whether an operation of the traced function runs for each micro-batch, not at the end of a step."""
        return _SCOPE in vertex.scope

    @staticmethod
    def is_forward(vertex: Vertex) -> bool:
        """Returns whether an operation of the traced function is of the forward program."""
        return _FORWARD in vertex.scope

    def name(self, key: Key) -> str:
        """Returns the name that an array leaves in the traced function."""
        return self.names.setdefault(key, f"stage array {len(self.names)}")

    def _named(self, key: Key, array: Any) -> Any:
        is_number = jnp.issubdtype(array.dtype, jnp.number) or array.dtype == jnp.bool
        return checkpoint_name(array, self.name(key)) if is_number and array.ndim else array

    def _run(self, env: dict[Key, Any], program: StageProgram | None) -> list[Key]:
        """Runs a program, and returns the keys that it made.

        What it makes has its name from where it is made on, so that no array is there twice, under two names.
        """
        if program is None:
            return []
        jaxpr, consts = program.program.jaxpr, program.program.consts
        keys = dict(zip(jaxpr.outvars, program.makes, strict=True))
        arrays: dict[core.Var, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        arrays.update(zip(jaxpr.invars, (env[key] for key in program.reads), strict=True))
        for equation in jaxpr.eqns:
            operands = [arrays[v] if isinstance(v, core.Var) else v.val for v in equation.invars]
            with context_of(equation):
                made = bind(equation, operands)
            for variable, array in zip(equation.outvars, made, strict=True):
                if not isinstance(variable, core.DropVar):
                    arrays[variable] = self._named(keys[variable], array) if variable in keys else array
        for variable, key in zip(jaxpr.outvars, program.makes, strict=True):
            array = arrays[variable] if isinstance(variable, core.Var) else jnp.asarray(variable.val)
            env[key] = array if keys.get(variable) == key and variable not in jaxpr.invars else self._named(key, array)
        return list(program.makes)

    def _added(self, accumulation: Accumulation, total: Any, part: Any) -> Any:
        is_combined = accumulation.state in _COMBINED
        return self._named(accumulation.total, combined_with(accumulation.state, total, part) if is_combined else part)


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
        queue = function.queued * (function.in_flight - 1)
        keys = [*function.kept, *(None for _ in function.sums), *queue, *function.read, *function.received]
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
        function, first = self.function, len(self.function.kept) + len(self.function.sums)
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
        of_step = {*function.kept, *function.read} & read
        self.graph.copied_until.update({value.id: end for key, value in self.inputs if key in of_step})

    def _free_copies(self, read: set[Key]) -> None:
        """Frees arguments that another stage keeps after the last program of this one that reads them."""
        function = self.function
        finished = {key for label, p in function.programs.items() if label.kind == "finish" for key in p.reads}
        begin_end = min((v.position for v in self.graph.vertices if function.is_each(v)), default=0) - 1
        homes = function.staged.home_of
        for key, value in self.inputs:
            if key in homes and homes[key] != function.stage and key in function.read and key not in finished:
                self.graph.stored_until[value.id] = self.ends["backward"] if key in read else begin_end

    def _send(self) -> dict[str, list[Any]]:
        """Ends what is made for other stages with its program; returns the types, by the kind of the program."""
        types: dict[str, list[Any]] = {"forward": [], "backward": []}
        for key in self.function.sent:
            value, kind = self.named(key), self.function.staged.makers[key].kind
            if value is not None and kind in types:
                value.last_read_at = self.ends[kind]
                types[kind].append(self.function.staged.type_of(key))
        return types

    def _receive(self) -> dict[str, dict[Key, Value]]:
        """Keeps what has arrived for the next micro-batch; returns what is there of the one that runs, by program.

        The argument stands for the next micro-batch's array, and its name for that of the one that runs.
        """
        function, own = self.function, {"forward": {}, "backward": {}}
        num_received = len(function.received)
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
                if (type_ := function.staged.type_of(key)) in sent[kind]:
                    sent[kind].remove(type_)
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

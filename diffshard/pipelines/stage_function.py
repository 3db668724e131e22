"""A stage of a pipeline as one function, so that the sharding search prices and lays out all of it together.

The function runs what a stage does in a step: the forward and the backward program of one micro-batch, which count M
times, and the end of the step. A stage that keeps k micro-batches has the residuals of k - 1 earlier ones as arguments,
from which the backward program reads and to which the forward program adds, so that they count as memory. Arrays that
have a key leave a name in the traced function, by which their specs are found in a layout.

It is for planning; what runs are the programs themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from search_spaces.pipelines.microbatches import combined_with
from search_spaces.pipelines.stage_keys import NUMBER, Accumulation, Key, Label
from search_spaces.pipelines.stage_programs import StagedStep, StageProgram
from search_spaces.sharding.graph import Graph, Vertex

_COMBINED = ("sum", "max", "min")
_SCOPE = "each micro-batch"


@dataclass(frozen=True)
class StageArguments:
    """The arguments of a stage's function, as keys.

    Attributes:
      kept: what the step replaces, such as weights.
      read: other arguments of the step, the batch among them.
      received: what other stages send: activations, gradients, sums.
    """

    kept: tuple[Key, ...]
    read: tuple[Key, ...]
    received: tuple[Key, ...]


class StageFunction:
    """The function of a stage.

    Args:
      staged: a step in stages.
      stage: which one.
      in_flight: k, how many micro-batches it keeps at most.
      replaced: for each flat argument of the step the flat result that replaces it, or None.

    Attributes:
      arguments: the keys of `kept`, `read` and `received`.
      results: the keys of other results.
      sums: what the micro-batches make together.
      residuals: the keys of what the backward program of a micro-batch reads that its forward program made or read
        itself, if it is not there for the whole step: these arrays are there for each micro-batch that is kept.
      queued: those that devices keep for each micro-batch in flight; the others are offloaded.
    """

    def __init__(self, staged: StagedStep, stage: int, in_flight: int, replaced: Sequence[int | None]):
        self.staged, self.stage, self.in_flight = staged, stage, in_flight
        self.programs = {label: p for label, p in staged.programs.items() if label.stage == stage}
        made = {key for program in self.programs.values() for key in program.makes}
        made |= {a.total for program in self.programs.values() for a in program.accumulations}
        reads = dict.fromkeys(key for program in self.programs.values() for key in program.reads)
        inputs = {key: position for position, key in enumerate(staged.inputs)}
        homes = zip(staged.inputs, staged.homes, strict=True)
        own = made | {key for key, home in homes if home == stage and key in reads}
        self.result_of = {  # of the arguments that this stage keeps and replaces; by others, as previous versions are
            key: staged.outputs[result]
            for key, position in inputs.items()
            if (result := replaced[position]) is not None
            and staged.homes[position] == stage
            and staged.outputs[result] in own
        }
        kept = [key for key in inputs if key in self.result_of]
        self.arguments = StageArguments(
            tuple(kept),
            tuple(key for key in reads if key in inputs and key not in self.result_of),
            tuple(key for key in reads if key not in inputs and key not in made and key != NUMBER),
        )
        results = {key for key in staged.outputs if not isinstance(key, core.Literal)}
        read_elsewhere = {key for key, stages in staged.readers.items() if stages - {stage}}
        self.results = tuple(k for k in made if (k in results or k in read_elsewhere) and k not in kept)
        self.names: dict[Key, str] = {}
        self.forward = self.programs.get(Label("forward", stage))
        self.backward = self.programs.get(Label("backward", stage))
        self.sums: tuple[Accumulation, ...] = () if self.backward is None else self.backward.accumulations
        made_forward = set() if self.forward is None else set(self.forward.makes)
        if self.forward is not None:
            received = {k for k in self.arguments.received if not self._is_of_step(k)}
            made_forward |= received & set(self.forward.reads)
        self.residuals = [] if self.backward is None else [key for key in self.backward.reads if key in made_forward]
        self.queued = [key for key in self.residuals if key not in staged.offloaded]

    @property
    def shapes(self) -> tuple[list[Any], list[Any], list[list[Any]], list[Any], list[Any]]:
        """The types of the arguments of a call."""
        arguments = self.arguments
        totals = [self._shape(a.total) for a in self.sums]
        queue = [[self._shape(key) for key in self.queued] for _ in range(self.in_flight - 1)]
        kept, read, received = (
            [self._shape(key) for key in keys] for keys in (arguments.kept, arguments.read, arguments.received)
        )
        return kept, totals, queue, read, received

    def __call__(
        self, kept: list[Any], totals: list[Any], queue: list[list[Any]], read: list[Any], received: list[Any]
    ) -> tuple[list[Any], list[Any], list[list[Any]], dict[str, Any]]:
        """Returns what replaces the first three arguments, and the other results."""
        arguments = self.arguments
        env: dict[Key, Any] = {NUMBER: jnp.int32(0), **dict(zip(arguments.kept, kept, strict=True))}
        env.update(zip(arguments.read, read, strict=True))
        env.update({key: self._named(key, array) for key, array in zip(arguments.received, received, strict=True)})
        self._run(env, self.programs.get(Label("begin", self.stage)))
        with jax.named_scope(_SCOPE):
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
        return [env[self.result_of[key]] for key in arguments.kept], totals, queue[1:], others

    def _is_of_step(self, key: Key) -> bool:
        """Tells whether an array is made once in a step, by a program that begins it."""
        maker = self.staged.makers.get(key)
        return maker is None or maker.kind not in ("forward", "backward")

    def weigh(self, graph: Graph) -> None:
        """Makes the traced graph of this function say what the programs of the stage do.

        What runs for each micro-batch counts M times. Residuals are results of one program and arguments of another:
        they are in memory whoever reads them, to the end of the backward program.
        """
        residuals = {self.names[key] for key in self.residuals if key in self.names}
        end = max((vertex.position for vertex in graph.vertices if self.is_each(vertex)), default=0)
        for vertex in graph.operations():
            named = vertex.equation.params["name"] if vertex.primitive == "name" and vertex.equation else None
            if named in residuals:
                graph.stored_until[vertex.results[0].id] = end
        if self.in_flight > 1:  # the backward program runs for the micro-batch that has been kept the longest
            first = len(self.arguments.kept) + len(self.sums)
            for vertex in graph.inputs[first : first + len(self.queued)]:
                graph.stored_until[vertex.results[0].id] = end
        for vertex in graph.vertices:
            if self.is_each(vertex):
                vertex.weight *= self.staged.num_microbatches
                vertex.operand_weight = [w * self.staged.num_microbatches for w in vertex.operand_weight]

    @staticmethod
    def is_each(vertex: Vertex) -> bool:
        """Tells whether an operation of the traced function runs for each micro-batch, and not at the end of a step."""
        return _SCOPE in vertex.scope

    def name(self, key: Key) -> str:
        """Returns the name that an array leaves in the traced function."""
        return self.names.setdefault(key, f"stage array {len(self.names)}")

    def _named(self, key: Key, array: Any) -> Any:
        is_number = jnp.issubdtype(array.dtype, jnp.number) or array.dtype == jnp.bool
        return checkpoint_name(array, self.name(key)) if is_number and array.ndim else array

    def _run(self, env: dict[Key, Any], program: StageProgram | None) -> list[Key]:
        """Runs a program, and returns the keys that it made."""
        if program is None:
            return []
        made = core.jaxpr_as_fun(program.program)(*(env[key] for key in program.reads))
        env.update({key: self._named(key, array) for key, array in zip(program.makes, made, strict=True)})
        return list(program.makes)

    def _added(self, accumulation: Accumulation, total: Any, part: Any) -> Any:
        is_combined = accumulation.state in _COMBINED
        return self._named(accumulation.total, combined_with(accumulation.state, total, part) if is_combined else part)

    def _type(self, key: Key) -> tuple[tuple[int, ...], Any]:
        aval = self.staged.avals[key]
        return tuple(aval.shape), aval.dtype

    def _shape(self, key: Key) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(*self._type(key))

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
from search_spaces.pipelines.stage_labels import NUMBER, Accumulation, Key, Label
from search_spaces.pipelines.stage_programs import StagedStep, StageProgram
from search_spaces.replay import bind, context_of
from search_spaces.sharding.graph import Vertex

_COMBINED = ("sum", "max", "min")
_SCOPE, _FORWARD = "each micro-batch", "forward program"


@dataclass(frozen=True)
class StageArguments:
    """The arguments of a stage's function, as keys."""

    kept: tuple[Key, ...]
    read: tuple[Key, ...]
    received: tuple[Key, ...]


class StageFunction:
    """The function of a stage.

    Args:
      in_flight: k, how many micro-batches it keeps at most.
      replaced: for each flat argument of the step the flat result that replaces it, or None.

    Attributes:
      arguments: the keys of `kept`, `read` and `received`.
      results: the keys of other results.
      residuals: the keys of what the backward program of a micro-batch reads that its forward program made or read
        itself, if it is not there for the whole step: these arrays are there for each micro-batch that is kept.
      queued: those that devices keep for each micro-batch in flight; the others are offloaded.
      sent: the keys of what it makes only for other stages and its own micro-batches.
      totals: the keys of what micro-batches make together, of all stages.
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
        self.totals = {a.total for program in staged.programs.values() for a in program.accumulations}
        self.sent = made & read_elsewhere - results - self.totals
        self.results = tuple(k for k in made if (k in results or k in read_elsewhere) and k not in kept)
        self.names: dict[Key, str] = {}
        self.forward = self.programs.get(Label("forward", stage))
        self.backward = self.programs.get(Label("backward", stage))
        self.sums: tuple[Accumulation, ...] = () if self.backward is None else self.backward.accumulations
        made_forward = set() if self.forward is None else set(self.forward.makes)
        waiting = {key for key in self.arguments.received if self.is_sent_forward(key)}
        made_forward |= waiting
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
        """Returns the results that replace the first three arguments, and the others."""
        arguments = self.arguments
        env: dict[Key, Any] = {NUMBER: jnp.int32(0), **dict(zip(arguments.kept, kept, strict=True))}
        env.update(zip(arguments.read, read, strict=True))
        env.update({key: self._named(key, array) for key, array in zip(arguments.received, received, strict=True)})
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
        return [env[self.result_of[key]] for key in arguments.kept], totals, queue[1:], others

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

    def type_of(self, key: Key) -> tuple[tuple[int, ...], Any]:
        """Returns the shape and dtype of an array."""
        aval = self.staged.avals[key]
        return tuple(aval.shape), aval.dtype

    def _shape(self, key: Key) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(*self.type_of(key))

"""Cuts a training step into the programs of pipeline stages.

Every stage has a program that begins a step, one for the forward and one for the backward pass of a micro-batch, and
some that finish the step.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
from jax.extend import core
from jax.sharding import PartitionSpec

from cost.compute import CONTRACTIONS
from search_spaces.pipelines.stage_labels import (
    PROGRAM_KINDS,
    Accumulation,
    Key,
    Label,
    LabelledStep,
    StageEquation,
)
from search_spaces.pipelines.step_parts import StepParts, abstract
from search_spaces.replay import bind, context_of

_MOVEMENT = ("transpose", "reshape", "broadcast_in_dim", "squeeze", "slice", "iota", "copy")
"""What a program does itself with an argument, rather than store the result for a step."""


@dataclass(frozen=True)
class StageProgram:
    """A program of a stage.

    Attributes:
      program: a function of the arrays that it reads.
      reads: their keys.
      makes: the keys of its results.
      accumulations: of a backward program; it makes their parts, or reads them.
    """

    label: Label
    program: core.ClosedJaxpr
    reads: tuple[Key, ...]
    makes: tuple[Key, ...]
    accumulations: tuple[Accumulation, ...] = ()


@dataclass(frozen=True)
class StagedStep:
    """A training step as the programs of its stages.

    Attributes:
      num_stages: S.
      num_microbatches: M.
      programs: by label, in an order in which they could run one after the other; those without results are missing.
      inputs: the keys of the flat arguments.
      homes: for each argument the stage that keeps it.
      outputs: for each flat result its key, or a literal.
      replaced_by: for each flat argument the flat result that replaces it in the next step, or None.
      batch: the positions of the arguments that micro-batches divide.
      avals: the shape and dtype of each key.
      offloaded: keys of residuals that wait in pinned memory of the host for the backward pass; see `offloading`.
      num_groups: into how many groups the micro-batches are divided, one group after the other; `in_groups` makes one
        micro-batch of those that have the same place in their groups.
      given: how the user wants arguments to be sharded by the stages that keep them, on the axes of their meshes.
    """

    num_stages: int
    num_microbatches: int
    programs: dict[Label, StageProgram]
    inputs: tuple[Key, ...]
    homes: tuple[int, ...]
    outputs: tuple[Key | core.Literal, ...]
    replaced_by: tuple[int | None, ...]
    batch: tuple[int, ...]
    avals: dict[Key, Any]
    offloaded: frozenset[Key] = frozenset()
    num_groups: int = 1
    given: Mapping[Key, PartitionSpec] = field(default_factory=dict)

    @cached_property
    def home_of(self) -> dict[Key, int]:
        """For each argument the stage that keeps it, by its key."""
        return dict(zip(self.inputs, self.homes, strict=True))

    @cached_property
    def makers(self) -> dict[Key, Label]:
        """For each key that a program makes its label; of several programs that begin a step the first one's."""
        found: dict[Key, Label] = {}
        for label, program in self.programs.items():
            for key in (*program.makes, *(a.total for a in program.accumulations)):
                if label.kind != "begin" or key not in found:
                    found[key] = label
        return found

    @cached_property
    def readers(self) -> dict[Key, frozenset[int]]:
        """For each key the stages that read it."""
        found: dict[Key, set[int]] = defaultdict(set)
        for label, program in self.programs.items():
            for key in program.reads:
                found[key].add(label.stage)
        return {key: frozenset(stages) for key, stages in found.items()}

    def type_of(self, key: Key) -> jax.ShapeDtypeStruct:
        """Returns the shape and dtype of an array."""
        return abstract(self.avals[key])

    def stage_of(self, key: Key) -> int:
        """Returns the stage that has an array of the whole step: it keeps the argument, or makes the result."""
        return self.home_of[key] if key in self.home_of else self.makers[key].stage

    @property
    def has_split_backward(self) -> bool:
        """Whether gradients of weights are programs of their own; see `split_backward`."""
        return any(label.kind == "weights" for label in self.programs)


def layer_scope(layer: int, kind: str) -> str:
    """Returns the name scope of a layer's equations in the programs of a kind."""
    return f"layer#{layer}#{kind}"


def copy_of(key: Key) -> Key:
    """Returns the key of an argument's copy that a stage makes when a step begins."""
    return ("copy", key)


def staged_step(
    parts: StepParts, cuts: Sequence[int], copied: Collection[tuple[int, Key]] = (), layers: LabelledStep | None = None
) -> StagedStep:
    """Cuts a step into stages.

    Args:
      cuts: indices of equations of `parts.each`; with each of them a stage begins.
      copied: stages with arguments that their micro-batches read from a copy, such as one that is gathered once.
      layers: the same step, cut at more places; every equation then has the scope `layer_scope` of its part there.

    Raises:
      ValueError: the step has no backward pass.
    """
    return _Assembly(LabelledStep(parts, cuts), copied, layers).staged_step()


class _Assembly:
    """Makes the programs of a step whose equations have labels."""

    def __init__(self, step: LabelledStep, copied: Collection[tuple[int, Key]], layers: LabelledStep | None):
        of_layers = () if layers is None else layers.equations
        self.layer_of = {id(e.equation): e.label for e in of_layers if e.label is not None}
        self.step, self.maker, self.copied = step, step.maker, set(copied)
        step.avals.update({copy_of(key): step.avals[key] for _, key in copied})
        self.owned: dict[Label, list[StageEquation]] = {}
        for equation in _live_equations(step):
            if equation.label is not None:
                self.owned.setdefault(equation.label, []).append(equation)
        self.wanted: dict[Label, dict[Key, None]] = {}  # what a program has to make or read besides
        for label, accumulation in step.sums.values():
            self._want(label, accumulation.part)
        for key in step.outputs:
            maker = None if isinstance(key, core.Literal) else self.maker.get(key)
            if not isinstance(key, core.Literal) and key in step.constants:
                self._want(Label("begin", 0), key)
            elif maker is not None and maker.label is None:
                self._want(Label("begin" if maker.part == "before" else "finish", 0), key)

    def staged_step(self) -> StagedStep:
        """Returns the step as programs."""
        step, outputs = self.step, {key for key in self.step.outputs if not isinstance(key, core.Literal)}
        contents = {label: self._contents(label) for label in {**self.owned, **self.wanted}}
        for label, (_, reads) in list(contents.items()):
            for key in reads:
                is_copy = isinstance(key, tuple) and key[0] == "copy"
                if label.kind != "begin" and (is_copy or (key in self.maker and self.maker[key].part == "before")):
                    self._want(Label("begin", label.stage), key)
        contents.update({label: self._contents(label) for label in self.wanted if label.kind == "begin"})
        wanted = outputs.union(*(reads for _, reads in contents.values()))
        programs: dict[Label, StageProgram] = {}
        for label in sorted(contents, key=lambda label: (PROGRAM_KINDS.index(label.kind), label.phase, label.stage)):
            equations, reads = contents[label]
            made = [k for e in self.owned.get(label, ()) for k in e.makes if k in wanted]
            made += [k for k in self.wanted.get(label, ()) if k not in made and k not in reads]
            sums = tuple(a for at, a in step.sums.values() if at == label)
            program = self._program(equations, reads, made)
            programs[label] = StageProgram(label, program, tuple(reads), tuple(made), sums)
        inputs = [("value", i) for i in step.parts.inputs]
        return StagedStep(
            step.num_stages,
            step.parts.num_microbatches,
            programs,
            tuple(inputs),
            tuple(step.homes[key] for key in inputs),
            tuple(step.outputs),
            step.parts.replaced_by,
            tuple(n for n, i in enumerate(step.parts.inputs) if i in step.parts.batch),
            step.avals,
            num_groups=step.parts.num_groups,
        )

    def _scope(self, equation: core.JaxprEqn) -> AbstractContextManager[Any]:
        layer = self.layer_of.get(id(equation))
        return nullcontext() if layer is None else jax.named_scope(layer_scope(layer.stage, layer.kind))

    def _want(self, label: Label, key: Key) -> None:
        self.wanted.setdefault(label, {})[key] = None

    def _contents(self, label: Label) -> tuple[list[StageEquation], list[Key]]:
        """Returns the equations of a program in order, with those that it has for itself, and what it reads."""
        contents = dict.fromkeys(self.owned.get(label, ()))
        reads: dict[Key, None] = {}
        pending = [*(k for e in contents for k in e.reads), *self.wanted.get(label, ())]
        while pending:
            key = pending.pop()
            maker = self.maker.get(key)
            if key in self.step.constants or (maker is not None and maker in contents):
                continue
            if label.kind in ("forward", "backward") and (label.stage, key) in self.copied:
                key = copy_of(key)
            elif label.kind == "begin" and isinstance(key, tuple) and key[0] == "copy":
                key = key[1]
            if maker is not None and _is_copied(maker, label):
                contents[maker] = None
                pending += maker.reads
            else:
                reads[key] = None
        return [e for e in self.step.equations if e in contents], list(reads)

    def _program(
        self, equations: Sequence[StageEquation], reads: Sequence[Key], makes: Sequence[Key]
    ) -> core.ClosedJaxpr:
        """Returns some equations as a program."""
        constants = [k for k in dict.fromkeys(k for e in equations for k in e.reads) if k in self.step.constants]

        def run(*arrays: Any) -> list[Any]:
            env: dict[Key, Any] = dict(zip(reads, arrays, strict=True))
            env.update({copy_of(key): array for key, array in env.items()})
            env.update({key[1]: env[key] for key in reads if isinstance(key, tuple) and key[0] == "copy"})
            env.update({k: self.step.constants[k] for k in constants})
            for entry in equations:
                equation, keys = entry.equation, iter(entry.reads)
                operands = [env[next(keys)] if isinstance(v, core.Var) else v.val for v in equation.invars]
                with self._scope(equation), context_of(equation):
                    results = bind(equation, operands)
                made = [r for v, r in zip(equation.outvars, results, strict=True) if not isinstance(v, core.DropVar)]
                env.update(zip(entry.makes, made, strict=True))
            return [env[key] if key in env else self.step.constants[key] for key in makes]

        return jax.make_jaxpr(run)(*(abstract(self.step.avals[key]) for key in reads))


def _live_equations(step: LabelledStep) -> list[StageEquation]:
    """Returns the equations that a result or a sum needs: additions of what the stages sum up themselves are none."""
    needed = {key for key in step.outputs if not isinstance(key, core.Literal)}
    needed.update(a.part for _, a in step.sums.values())
    live: list[StageEquation] = []
    for equation in reversed(step.equations):
        if equation.equation.effects or any(key in needed for key in equation.makes):
            needed.update(equation.reads)
            live.append(equation)
    return live[::-1]


def _is_copied(equation: StageEquation, label: Label) -> bool:
    """Returns whether a program has an equation for itself that belongs to no program."""
    if equation.label is not None:
        return False
    if equation.part == "before" and label.kind == "finish":
        return equation.equation.primitive.name not in CONTRACTIONS
    if equation.part == "before" and label.kind != "begin":
        return equation.equation.primitive.name in _MOVEMENT
    return equation.part == {"begin": "before", "finish": "after"}.get(label.kind, "each")

"""Gives each equation of a training step to a program of a pipeline stage.

The equations of a micro-batch follow the cuts of its forward pass. What runs at the end of the step, such as an
optimiser's update, runs where the largest array that it reads is. What is cheap and depends on no parameter, such as
masks, belongs to every program that reads it.

An array is known by a key: `("value", i)` for argument i of the traced step, `("sum", key)` for what all micro-batches
of a stage make together, `("constant", i)` for a number, `("closed over", i)` for a result that the step closes over,
`NUMBER` for the number of the micro-batch, and for all else its variable.
"""

import functools
import operator
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.extend import core

from search_spaces.pipelines.batch_states import State
from search_spaces.pipelines.microbatches import neutral
from search_spaces.pipelines.step_parts import StepParts, contracts, num_bytes, parameters_of, places

Key = Any
"""The name of an array; see the module."""
NUMBER = ("number", 0)
ProgramKind = Literal["begin", "forward", "backward", "weights", "finish"]
PROGRAM_KINDS: tuple[ProgramKind, ...] = get_args(ProgramKind)
"""In the order in which programs of one micro-batch could run; "weights" where the backward program is split."""
MICROBATCH_KINDS: tuple[ProgramKind, ...] = ("forward", "backward", "weights")
"""The programs that run for each micro-batch."""
PartName = Literal["before", "each", "after"]


class Label(NamedTuple):
    """Which program an equation belongs to.

    Attributes:
      stage: from 0.
      phase: of "finish": how often results went from stage to stage before; else 0.
    """

    kind: ProgramKind
    stage: int
    phase: int = 0


class Accumulation(NamedTuple):
    """A total over the micro-batches of a stage."""

    total: Key
    part: Key
    state: State


@dataclass(eq=False)
class StageEquation:
    """An equation with the keys that it reads and makes.

    Attributes:
      reads, makes: keys; literals are missing.
      label: the program that it belongs to; None where every reader has its own.
    """

    equation: core.JaxprEqn
    part: PartName
    reads: list[Key]
    makes: list[Key]
    label: Label | None = None


_SMALL_BYTES = 1024  # what every stage may compute for itself at the end of a step: counters, schedules


class LabelledStep:
    """A step whose equations have labels.

    Args:
      cuts: indices of equations of `parts.each`; with each of them a stage begins.

    Attributes:
      num_stages: S.
      equations: all of them, in order.
      maker: the equation that makes an array, by key.
      constants: arrays that the step closes over, and numbers.
      sums: what micro-batches make together, with the program that does, by the key of the total.
      outputs: for each flat result its key, or a literal.
      homes: for each argument the stage that keeps it: one that reads it, or else the one that makes what replaces it.

    Raises:
      ValueError: the step has no backward pass.
    """

    def __init__(self, parts: StepParts, cuts: Sequence[int]):
        self.parts, self.cuts, self.num_stages = parts, sorted(cuts), len(cuts) + 1
        self.alias: dict[core.Var, Key] = {}
        self.avals: dict[Key, Any] = {}
        self.constants: dict[Key, Any] = {}
        self.equations: list[StageEquation] = []
        self.maker: dict[Key, StageEquation] = {}
        self.sums: dict[Key, tuple[Label, Accumulation]] = {}
        self.homes: dict[Key, int] = {}
        self._readers: dict[Key, list[StageEquation]] = {}
        values: dict[int, Key] = {i: ("value", i) for i in parts.inputs}
        begun = self._enter(parts.before.program, "before", [values[i] for i in parts.before.reads])
        num_values = len(begun) - len(parts.batch)
        values.update(zip(parts.before.makes[:num_values], begun[:num_values], strict=True))
        divided = dict(zip(parts.batch, begun[num_values:], strict=True))
        first = len(self.equations)
        kept = self._enter(parts.each.program, "each", [NUMBER, *(divided.get(i, values[i]) for i in parts.each.reads)])
        self._label_each(self.equations[first:])
        values.update({i: self._total(i, key) for i, key in zip(parts.each.makes, kept, strict=True)})
        ended = self._enter(parts.after.program, "after", [values[i] for i in parts.after.reads])
        values.update(zip(parts.after.makes, ended, strict=True))
        self._enter_constants(values)
        self.outputs = [values[o] if isinstance(o, int) else o for o in parts.outputs]
        self._defer_passes()
        self._find_homes("each")
        self._house_versions()
        self._label_after()
        self._find_homes("after")
        self._house_unread()

    # Entering parts.

    def _enter(self, program: core.ClosedJaxpr, name: PartName, keys: Sequence[Key]) -> list[Key]:
        """Adds the equations of a program that reads some keys; returns the keys of its results."""
        jaxpr = program.jaxpr
        for variable, key in zip(jaxpr.invars, keys, strict=True):
            self.alias[variable] = key
            self.avals.setdefault(key, variable.aval)
        for variable, array in zip(jaxpr.constvars, program.consts, strict=True):
            self.constants[variable], self.avals[variable] = array, variable.aval
        for equation in jaxpr.eqns:
            made = [v for v in equation.outvars if not isinstance(v, core.DropVar)]
            self.equations.append(entry := StageEquation(equation, name, self._keys(equation.invars), made))
            self.maker.update(dict.fromkeys(made, entry))
            self.avals.update({v: v.aval for v in made})
        return [self._key_of_result(v) for v in jaxpr.outvars]

    def _keys(self, atoms: Iterable[Any]) -> list[Key]:
        return [self.alias.get(v, v) for v in atoms if isinstance(v, core.Var)]

    def _key_of_result(self, atom: Any) -> Key:
        if isinstance(atom, core.Var):
            return self.alias.get(atom, atom)
        key = ("constant", len(self.constants))
        self.constants[key], self.avals[key] = atom.val, atom.aval
        return key

    def _enter_constants(self, values: dict[int, Key]) -> None:
        """Adds the keys of the arguments that no part reads, and of the results that the step closes over."""
        self.avals.update({k: s for i, s in self.parts.shapes.items() if (k := ("value", i)) not in self.avals})
        for i, array in self.parts.constants.items():
            if i in self.parts.outputs:
                values[i] = key = ("closed over", i)
                self.constants[key], self.avals[key] = array, jax.typeof(array)

    # Micro-batches.

    def _label_each(self, equations: Sequence[StageEquation]) -> None:
        jaxpr = self.parts.each.program.jaxpr
        where = places(jaxpr, parameters_of(self.parts))
        if not any(place.direction == "backward" for place in where):
            raise ValueError("The function has no backward pass: a pipeline is for training steps.")
        for equation, place in zip(equations, where, strict=True):
            if place.direction != "anywhere":
                equation.label = Label(place.direction, bisect_right(self.cuts, place.position))

    def _total(self, number: int, part: Key) -> Key:
        """Returns the key of what all micro-batches make together of a value.

        A sum of what several stages make is added up in each of them, and then once.
        """
        state = self.parts.states[number]
        terms = self._terms(part) if state == "sum" else [part]
        totals = [self._accumulated(term, state) for term in terms]
        if not isinstance(state, str) or state == "whole":
            return totals[0]
        dtype = self.avals[part].dtype
        shapes = [jax.ShapeDtypeStruct(self.avals[key].shape, self.avals[key].dtype) for key in totals]

        def add(*arrays: Any) -> Any:
            return functools.reduce(operator.add, arrays).astype(dtype)

        if len(totals) == 1 and shapes[0].dtype == dtype:
            return totals[0]
        return self._enter(jax.make_jaxpr(add)(*shapes), "after", totals)[0]

    def _accumulated(self, part: Key, state: State) -> Key:
        total = ("sum", part)
        maker = self.maker.get(part)
        stage = maker.label.stage if maker is not None and maker.label is not None else self.num_stages - 1
        self.sums[total] = Label("backward", stage), Accumulation(total, part, state)
        aval = self.avals[part]
        self.avals[total] = (
            jax.eval_shape(lambda: neutral(state, aval.shape, aval.dtype))
            if isinstance(state, str) and state != "whole"
            else aval
        )
        return total

    def _terms(self, key: Key) -> list[Key]:
        """Returns the keys of what is added up to one that several stages make together."""
        maker = self.maker.get(key)
        if maker is None or maker.equation.primitive.name not in ("add_any", "add") or len(maker.reads) != 2:
            return [key]
        makers = [self.maker.get(k) for k in maker.reads]
        labels = [None if m is None else m.label for m in makers]
        if any(label is None or label.kind != "backward" for label in labels):
            return [key]
        if any(self.avals[k].shape != self.avals[key].shape for k in maker.reads):
            return [key]
        terms = [term for k in maker.reads for term in self._terms(k)]
        stages = {label.stage for t in terms if (m := self.maker.get(t)) is not None and (label := m.label) is not None}
        return terms if len(stages) > 1 else [key]

    def _find_homes(self, part: PartName) -> None:
        """Gives each argument to the first stage that reads it in a part of the step, also through `before`."""
        homes: dict[Key, int] = {}
        pending = [(k, e.label.stage) for e in self.equations if e.part == part and e.label for k in e.reads]
        seen: set[tuple[Key, int]] = set()
        while pending:
            entry = key, stage = pending.pop()
            if entry in seen:
                continue
            seen.add(entry)
            maker = self.maker.get(key)
            if maker is None:
                homes[key] = min(stage, homes.get(key, stage))
            elif maker.label is None:
                pending += ((k, stage) for k in maker.reads)
        self.homes = {**homes, **self.homes}

    def _house_versions(self) -> None:
        """Gives each argument that is the previous version of another one in the next step to the stage of that one."""
        for output, position in zip(self.outputs, self.parts.replaced, strict=True):
            key = None if position is None else ("value", self.parts.inputs[position])
            if key in self.homes and not isinstance(output, core.Literal) and output not in self.maker:
                self.homes.setdefault(output, self.homes[key])

    def _house_unread(self) -> None:
        """Gives each argument that is not read to the stage that makes what replaces it, or else to the first one."""
        for output, position in zip(self.outputs, self.parts.replaced, strict=True):
            if position is None or isinstance(output, core.Literal):
                continue
            maker = self.maker.get(output)
            label = self.sums[output][0] if output in self.sums else None if maker is None else maker.label
            stage = self.homes.get(output, 0) if label is None else label.stage
            self.homes.setdefault(("value", self.parts.inputs[position]), stage)
        for i in self.parts.inputs:
            self.homes.setdefault(("value", i), 0)

    # The end of a step.

    def _defer_passes(self) -> None:
        """Moves to the end what contracts arrays, micro-batches do not read, and only the end does.

        A pass over data of its own then goes from stage to stage, where the weights are. At the beginning, a stage
        makes all for itself.
        """
        early = {key for e in self.equations if e.part == "each" for key in e.reads}
        early.update(key for key in self.outputs if not isinstance(key, core.Literal))
        before = [equation for equation in self.equations if equation.part == "before"]
        for equation in reversed(before):
            if any(key in early for key in equation.makes):
                early.update(equation.reads)
        deferred: set[Key] = set()
        for equation in before:
            is_pass = contracts(equation.equation) or any(key in deferred for key in equation.reads)
            if is_pass and not any(key in early for key in equation.makes):
                equation.part = "after"
                deferred.update(equation.makes)

    def _label_after(self) -> None:
        """Puts each equation that runs at the end where the largest array that it reads is."""
        equations, at_hand = [], set()
        for equation in (e for e in self.equations if e.part == "after"):
            if all(self._is_at_hand(key, at_hand) for key in equation.reads) and self._is_small(equation):
                at_hand.update(equation.makes)
            else:
                equations.append(equation)
        stages: dict[Key, int] = {**self.homes, **{key: label.stage for key, (label, _) in self.sums.items()}}
        for equation in (
            e for e in self.equations if e.part == "before"
        ):  # such as a cast, which readers do themselves
            sizes = [(num_bytes(self.avals[k]), -stages[k]) for k in equation.reads if k in stages]
            largest, stage = max(sizes, default=(0, 0))
            if largest > _SMALL_BYTES:
                stages.update((key, -stage) for key in equation.makes if key not in stages)
        self._find_passes()
        owners: dict[StageEquation, int] = {}
        while len(owners) < len(equations):
            num_owned = len(owners)
            for equation in (*equations, *reversed(equations)):
                if equation not in owners:
                    self._give(equation, self._stage_of(equation, stages, at_hand), owners, stages)
            if len(owners) == num_owned:
                first = next(e for e in equations if e not in owners)
                self._give(first, min((stages[k] for k in first.reads if k in stages), default=0), owners, stages)
        times: dict[Key, tuple[int, int]] = {key: (0, label.stage) for key, (label, _) in self.sums.items()}
        for equation in equations:
            stage = owners[equation]
            phase = max((p + (s != stage) for p, s in (times[k] for k in equation.reads if k in times)), default=0)
            equation.label = Label("finish", stage, phase)
            times.update(dict.fromkeys(equation.makes, (phase, stage)))

    def _find_passes(self) -> None:
        """Finds what is made of weights or of sums and as large, and what contractions at the end lead to.

        A pass over data at the end, such as one that tries moved weights, goes to the weights that it reads, although
        its activations may be larger.
        """
        is_float = {key for key in self.homes if jnp.issubdtype(self.avals[key].dtype, jnp.inexact)}
        self._weights: set[Key] = {*self.sums, *(is_float - {("value", i) for i in self.parts.batch})}
        self._passes: set[Key] = set()
        for equation in (e for e in self.equations if e.part != "each"):
            largest = max((num_bytes(self.avals[k]) for k in equation.reads), default=0)
            of_largest = {k for k in equation.reads if num_bytes(self.avals[k]) == largest}
            if of_largest & self._weights and not of_largest & self._passes and not contracts(equation.equation):
                self._weights.update(k for k in equation.makes if num_bytes(self.avals[k]) <= largest)
            elif contracts(equation.equation) or any(k in self._passes for k in equation.reads):
                self._passes.update(equation.makes)

    def _give(
        self, equation: StageEquation, stage: int | None, owners: dict[StageEquation, int], stages: dict[Key, int]
    ) -> None:
        """Gives an equation to a stage, and with it what it makes and the arguments that no other stage has."""
        if stage is None:
            return
        owners[equation] = stage
        stages.update(dict.fromkeys(equation.makes, stage))
        for key in equation.reads:
            if key not in self.maker:
                stages.setdefault(key, stage)

    def _stage_of(self, equation: StageEquation, stages: dict[Key, int], at_hand: set[Key]) -> int | None:
        """Returns the stage of the largest operand, the first of equal ones, or of a reader; None while not known.

        Broadcasts are made where they are read, so that they need not be sent. A pass goes to its weights, and
        otherwise on from the latest stage that it reads.
        """
        reads, is_product = [k for k in equation.reads if k not in at_hand], contracts(equation.equation)
        readers = [stages[k] for reader in self._readers_of(equation) for k in reader.makes if k in stages]
        if equation.equation.primitive.name == "broadcast_in_dim" and self._readers_of(equation):
            return min(readers, default=None)
        of_passes = [stages.get(k) for k in reads if k in self._passes]
        if is_product and any(k in self._weights for k in reads):
            reads = [k for k in reads if k in self._weights]
        elif of_passes and self._passes.issuperset(equation.makes):
            return None if None in of_passes else max(stage for stage in of_passes if stage is not None)
        sizes = [(num_bytes(self.avals[k]), stages.get(k)) for k in reads]
        largest = max((size for size, _ in sizes), default=0)
        known = [stage for size, stage in sizes if size == largest and stage is not None]
        return min(known) if known else min(readers, default=None)

    def _readers_of(self, equation: StageEquation) -> list[StageEquation]:
        if not self._readers:
            for entry in self.equations:
                for key in entry.reads:
                    self._readers.setdefault(key, []).append(entry)
        return [reader for key in equation.makes for reader in self._readers.get(key, ())]

    def _is_at_hand(self, key: Key, at_hand: set[Key]) -> bool:
        """Returns whether every stage can have an array without waiting for another."""
        maker = self.maker.get(key)
        return key in at_hand or (key not in self.sums and (maker is None or maker.part == "before"))

    def _is_small(self, equation: StageEquation) -> bool:
        if contracts(equation.equation):
            return False
        arrays = (*equation.reads, *equation.makes)
        return sum(num_bytes(self.avals[k]) for k in arrays) <= _SMALL_BYTES

"""Divides a program in two: the first part makes some of its results, and the second one makes the others.

The first part runs the operations that its results need. The second one runs the rest and reads what it needs of the
first one, so that nothing of weight is computed twice. A scan that makes results of both parts becomes two scans (loop
fission): the trips of the first one also leave, stacked, what the trips of the second one read.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.extend import core

from cost.compute import CONTRACTIONS
from search_spaces.pipelines.recomputed_programs import traced_program
from search_spaces.pipelines.stage_labels import PROGRAM_KINDS, Key, Label
from search_spaces.pipelines.stage_programs import StagedStep, StageProgram
from search_spaces.pipelines.step_parts import num_bytes
from search_spaces.replay import CALLS, REMAT, bind, context_of, scan_again, scan_operands, without_calls

_MOVEMENT = ("transpose", "reshape", "broadcast_in_dim", "squeeze", "iota", "convert_element_type")
"""What the second part does itself again, if it reads no more than it makes."""


class DividedProgram:
    """A program in two parts.

    Args:
      program: without calls of other programs and without rematerialisation, as `flattened` returns it.
      is_first: for each result, whether the first part makes it.
      only_first: positions of operands that the second part does not have.

    Attributes:
      read_first: operands of the program that the first part reads, and all else that it needs.
      read_second: operands that the second part reads.
      has_work: whether the second part runs a product or a scan.
    """

    def __init__(self, program: core.ClosedJaxpr, is_first: Sequence[bool], only_first: Collection[int] = ()):
        self._program, self._is_first = program, list(is_first)
        jaxpr = program.jaxpr
        self._loops: dict[int, _DividedScan] = {}
        self.read_first = {v for v in self._results(True) if isinstance(v, core.Var)}
        self._first = [index for index in reversed(range(len(jaxpr.eqns))) if self._add_first(index)][::-1]
        held_back = {jaxpr.invars[position] for position in only_first}
        self.read_second: set[core.Var] = set()
        self._left: dict[core.Var, None] = {}  # what the second part reads of the first one
        second = self._run_second(held_back)
        self._second = sorted(second)
        names = [jaxpr.eqns[index].primitive.name for index in second]
        self.has_work = any(name in CONTRACTIONS or name == "scan" for name in names)

    def first(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Runs the first part; returns its results, and what it leaves for the second one."""
        env, stacks = self._environment(operands), list[Any]()
        for index in self._first:
            equation = self._program.jaxpr.eqns[index]
            given = _operands(env, equation)
            with context_of(equation):
                if index in self._loops:
                    loop = self._loops[index]
                    made, left = loop.first(given)
                    env.update(zip(loop.results(True), made, strict=True))
                    stacks += left if index in self._second else []
                else:
                    env.update(zip(equation.outvars, bind(equation, given), strict=True))
        return [_array(env, v) for v in self._results(True)], [*(env[v] for v in self._left), *stacks]

    def second(self, operands: Sequence[Any], left: Sequence[Any]) -> list[Any]:
        """Runs the second part; returns its results."""
        env = self._environment(operands)
        stacks = iter(left[len(self._left) :])
        env.update(zip(self._left, left, strict=False))
        for index in self._second:
            equation = self._program.jaxpr.eqns[index]
            given = _operands(env, equation)
            with context_of(equation):
                if index in self._loops:
                    loop = self._loops[index]
                    own = [next(stacks) for _ in range(loop.num_left)]
                    env.update(zip(loop.results(False), loop.second(given, own), strict=True))
                else:
                    env.update(zip(equation.outvars, bind(equation, given), strict=True))
        return [_array(env, v) for v in self._results(False)]

    @property
    def num_left(self) -> int:
        """How many arrays the first part leaves for the second one."""
        return len(self._left) + sum(self._loops[index].num_left for index in self._second if index in self._loops)

    def _results(self, is_first: bool) -> list[Any]:
        return [v for v, first in zip(self._program.jaxpr.outvars, self._is_first, strict=True) if first == is_first]

    def _environment(self, operands: Sequence[Any]) -> dict[core.Var, Any]:
        jaxpr = self._program.jaxpr
        constants = zip(jaxpr.constvars, self._program.consts, strict=True)
        return {**dict(constants), **dict(zip(jaxpr.invars, operands, strict=True))}

    def _add_first(self, index: int) -> bool:
        """Adds what an equation reads to what the first part reads, if it runs there; equations come last to first."""
        equation = self._program.jaxpr.eqns[index]
        is_first = [v in self.read_first for v in equation.outvars]
        if not any(is_first) and not equation.effects:
            return False
        reads: Iterable[Any] = equation.invars
        if equation.primitive.name == "scan" and not all(is_first) and not equation.effects:
            loop = _DividedScan(equation, is_first)
            if loop.has_work:
                self._loops[index], reads = loop, loop.reads(True)
        self.read_first.update(v for v in reads if isinstance(v, core.Var))
        return True

    def _run_second(self, held_back: Collection[core.Var]) -> set[int]:
        """Returns the equations of the second part, and finds what it reads."""
        jaxpr = self._program.jaxpr
        maker = {v: index for index, equation in enumerate(jaxpr.eqns) for v in equation.outvars}
        of_first, run = set(self._first), set[int]()
        pending, seen = self._results(False), set[core.Var]()
        while pending:
            variable = pending.pop()
            if not isinstance(variable, core.Var) or variable in seen:
                continue
            seen.add(variable)
            index = maker.get(variable)
            if index is None:
                if variable in held_back:
                    self._left[variable] = None
                else:
                    self.read_second.add(variable)
            elif index in self._loops and variable in self._loops[index].results(False):
                run.add(index)
                pending += self._loops[index].reads(False)
            elif index not in of_first or _is_cheap(jaxpr.eqns[index]):
                run.add(index)
                pending += jaxpr.eqns[index].invars
            else:
                self._left[variable] = None
        return run


class _DividedScan:
    """A scan as two scans, by which of its results the first one makes."""

    def __init__(self, equation: core.JaxprEqn, is_first: Sequence[bool]):
        self._equation, self._is_first = equation, list(is_first)
        body = flattened(equation.params["jaxpr"])
        inner = scan_operands(equation, body.jaxpr.invars)
        self._num_constants, self._num_carries = len(inner.constants), len(inner.carries)
        while True:  # what the first scan carries, it has to make
            of_first = [self._num_constants + i for i in range(self._num_carries) if self._is_first[i]]
            self._body = DividedProgram(body, self._is_first, of_first)
            carried = [v in self._body.read_first for v in inner.carries]
            if all(first or not read for first, read in zip(self._is_first, carried, strict=False)):
                break
            self._is_first[: self._num_carries] = [
                first or read for first, read in zip(self._is_first, carried, strict=False)
            ]
        self._invars = body.jaxpr.invars
        self.has_work, self.num_left = self._body.has_work, self._body.num_left

    def results(self, is_first: bool) -> list[Any]:
        """Returns the variables of the results that a part makes."""
        return [v for v, first in zip(self._equation.outvars, self._is_first, strict=True) if first == is_first]

    def reads(self, is_first: bool) -> list[Any]:
        """Returns the operands that a part reads."""
        read = self._body.read_first if is_first else self._body.read_second
        carries = range(self._num_constants, self._num_constants + self._num_carries)
        return [
            operand
            for i, (operand, v) in enumerate(zip(self._equation.invars, self._invars, strict=True))
            if (self._is_first[i - self._num_constants] == is_first if i in carries else v in read)
        ]

    def first(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Runs the first scan; returns its results, and the stacks for the second one."""
        given = scan_operands(self._equation, operands)

        def trip(carries: list[Any], slices: list[Any]) -> tuple[list[Any], tuple[list[Any], list[Any]]]:
            made, left = self._body.first([*given.constants, *self._all_carries(carries, True), *slices])
            return made[: len(carries)], (made[len(carries) :], left)

        carries, (stacked, left) = scan_again(self._equation, trip, self._own(given.carries, True), given.slices)
        return [*carries, *stacked], left

    def second(self, operands: Sequence[Any], left: Sequence[Any]) -> list[Any]:
        """Runs the second scan; returns its results."""
        given = scan_operands(self._equation, operands)

        def trip(carries: list[Any], slices: tuple[list[Any], list[Any]]) -> tuple[list[Any], list[Any]]:
            read, stacks = slices
            made = self._body.second([*given.constants, *self._all_carries(carries, False), *read], stacks)
            return made[: len(carries)], made[len(carries) :]

        carries, stacked = scan_again(self._equation, trip, self._own(given.carries, False), (given.slices, list(left)))
        return [*carries, *stacked]

    def _own(self, carries: Sequence[Any], is_first: bool) -> list[Any]:
        return [carry for carry, first in zip(carries, self._is_first, strict=False) if first == is_first]

    def _all_carries(self, carries: Sequence[Any], is_first: bool) -> list[Any]:
        own = iter(carries)
        return [next(own) if first == is_first else None for first in self._is_first[: self._num_carries]]


def flattened(program: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Returns a program without calls and without rematerialisation: what each part reads decides what is kept."""
    return without_calls(program, {**CALLS, **dict.fromkeys(REMAT, "jaxpr")})


def _is_cheap(equation: core.JaxprEqn) -> bool:
    """Returns whether the second part runs an equation of the first one again, rather than keep its result for it."""
    read = sum(num_bytes(v.aval) for v in equation.invars if isinstance(v, core.Var))
    return equation.primitive.name in _MOVEMENT and read <= sum(num_bytes(v.aval) for v in equation.outvars)


def _operands(env: dict[core.Var, Any], equation: core.JaxprEqn) -> list[Any]:
    """Returns the operands of an equation; None for those of a scan that only the other part has."""
    return [env.get(v) if isinstance(v, core.Var) else v.val for v in equation.invars]


def _array(env: dict[core.Var, Any], atom: Any) -> Any:
    return atom.val if isinstance(atom, core.Literal) else env[atom]


_BETWEEN = "between"


def is_between(key: Key) -> bool:
    """Returns whether an array is what the first half of a backward program leaves for the second one."""
    return isinstance(key, tuple) and key[0] == _BETWEEN


def with_split_backward(staged: StagedStep) -> StagedStep:
    """Returns a step whose stages have a program "weights" after the program "backward", which ends sooner.

    A stage that sends no gradients to others has all of it in the program "weights".
    """
    programs, avals = dict(staged.programs), dict(staged.avals)
    for stage in range(staged.num_stages):
        program = programs.pop(Label("backward", stage), None)
        if program is None:
            continue
        programs.update({half.label: half for half in _halves(staged, program, avals)})
    order = sorted(programs, key=lambda label: (PROGRAM_KINDS.index(label.kind), label.phase, label.stage))
    programs = {label: programs[label] for label in order}
    return replace(staged, programs=programs, avals=avals)


def _halves(staged: StagedStep, program: StageProgram, avals: dict[Key, Any]) -> list[StageProgram]:
    """Returns the programs that a backward program is split into, and adds the types of what goes between them."""
    stage, parts = program.label.stage, {a.part for a in program.accumulations}
    later = Label("weights", stage)
    is_sent = [key not in parts and bool(staged.readers.get(key, frozenset()) - {stage}) for key in program.makes]
    if not any(is_sent):
        return [replace(program, label=later)]
    divided = DividedProgram(flattened(program.program), is_sent)
    _, left = jax.eval_shape(lambda *arrays: divided.first(arrays), *map(staged.type_of, program.reads))
    between = [(_BETWEEN, stage, number) for number in range(len(left))]
    avals.update(zip(between, left, strict=True))
    num_reads = len(program.reads)

    def second(*arrays: Any) -> list[Any]:
        return divided.second(arrays[:num_reads], arrays[num_reads:])

    traced, reads = traced_program(second, (*program.reads, *between), avals, parts)
    is_read = [key in reads for key in between]

    def first(*arrays: Any) -> list[Any]:
        made, left = divided.first(arrays)
        return [*made, *(array for array, read in zip(left, is_read, strict=True) if read)]

    traced_first, reads_first = traced_program(first, program.reads, avals)
    sent = _where(program.makes, is_sent)
    makes_first = (*sent, *_where(between, is_read))
    makes = tuple(key for key in program.makes if key not in sent)
    return [
        StageProgram(program.label, traced_first, reads_first, makes_first),
        StageProgram(later, traced, reads, makes, program.accumulations),
    ]


def _where(keys: Sequence[Key], chosen: Sequence[bool]) -> list[Key]:
    return [key for key, is_chosen in zip(keys, chosen, strict=True) if is_chosen]

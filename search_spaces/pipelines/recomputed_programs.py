"""The programs of a pipeline stage whose backward program makes some residuals again.

The forward program leaves only what is kept. The backward program runs an operation again just before the first one
that reads its results, so that little of what it makes again is in memory at once. Trips of an opened scan run again
inside the scan of the backward program that reads them.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.extend import core
from jax.interpreters.partial_eval import dce_jaxpr

from search_spaces.pipelines.residuals import OUTSIDE, OpenedScan, StageResiduals, Value
from search_spaces.pipelines.stage_labels import NUMBER, Key
from search_spaces.pipelines.stage_programs import StagedStep, StageProgram
from search_spaces.pipelines.step_parts import abstract, num_bytes
from search_spaces.rematerialisation.choices import RematChoice
from search_spaces.replay import bind, context_of, scan_again, scan_operands


def recomputed_stage(residuals: StageResiduals, choice: RematChoice) -> StagedStep:
    """Returns a step whose stage keeps what a choice says, and makes the other residuals again."""
    return _Recomputation(residuals, choice).staged_step()


def working_bytes(staged: StagedStep, program: StageProgram) -> int:
    """Returns the most bytes of a micro-batch's arrays that are in memory at once while a program runs, whole ones.

    What an operation needs inside is left out, and so are arrays that are there for the whole step.
    """
    jaxpr, inputs = program.program.jaxpr, set(staged.inputs)
    for_step = {k for k in program.reads if k in inputs or k == NUMBER or staged.makers[k].kind == "begin"}
    last = {v: index for index, e in enumerate(jaxpr.eqns) for v in e.invars if isinstance(v, core.Var)}
    last.update((v, len(jaxpr.eqns)) for v in jaxpr.outvars if isinstance(v, core.Var))
    live = {v: num_bytes(v.aval) for v, key in zip(jaxpr.invars, program.reads, strict=True) if key not in for_step}
    most = now = sum(live.values())
    ending: dict[int, list[core.Var]] = {}
    for variable, index in last.items():
        ending.setdefault(index, []).append(variable)
    for index, equation in enumerate(jaxpr.eqns):
        live.update((v, num_bytes(v.aval)) for v in equation.outvars if v in last)
        now += sum(num_bytes(v.aval) for v in equation.outvars if v in last)
        most = max(most, now)
        now -= sum(live.pop(v, 0) for v in ending.get(index, ()))
    return most


class _Lazy:
    """A program that runs an equation only when its results are wanted."""

    def __init__(self, program: core.ClosedJaxpr, known: Mapping[core.Var, Any]):
        self._equations = program.jaxpr.eqns
        self._maker = {v: index for index, equation in enumerate(self._equations) for v in equation.outvars}
        self._arrays = {**dict(zip(program.jaxpr.constvars, program.consts, strict=True)), **known}

    def wanted(self, variables: Iterable[Any]) -> tuple[list[int], list[core.Var]]:
        """Returns the equations that have to run for some variables, in order, and the inputs that are missing."""
        pending, equations = [v for v in variables if isinstance(v, core.Var)], set()
        missing: dict[core.Var, None] = {}
        while pending:
            variable = pending.pop()
            if variable in self._arrays:
                continue
            if variable not in self._maker:
                missing[variable] = None
            elif self._maker[variable] not in equations:
                index = self._maker[variable]
                equations.add(index)
                pending += [v for v in self._equations[index].invars if isinstance(v, core.Var)]
        return sorted(equations), list(missing)

    def add(self, arrays: Mapping[core.Var, Any]) -> None:
        self._arrays.update(arrays)

    def arrays(self, atoms: Sequence[Any]) -> list[Any]:
        """Returns the arrays of some variables and literals."""
        for index in self.wanted(atoms)[0]:
            equation = self._equations[index]
            with context_of(equation):
                results = bind(equation, [self._array(v) for v in equation.invars])
            self._arrays.update(zip(equation.outvars, results, strict=True))
        return [self._array(atom) for atom in atoms]

    def _array(self, atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else self._arrays[atom]


class _Recomputation:
    """The programs of a stage for a choice of what is kept."""

    def __init__(self, residuals: StageResiduals, choice: RematChoice):
        self.residuals, self.staged = residuals, residuals.staged
        self.forward, self.backward = residuals.forward, residuals.backward
        inputs = set(self.forward.program.jaxpr.invars)
        values = [residuals.values[number] for number in sorted(choice.kept)]
        self.old_keys = dict(self._old_keys())
        kept = [v for v in values if v.scan != OUTSIDE or v.variable not in inputs]
        stage = self.forward.label.stage
        self.keys: dict[Value, Key] = {  # of what the forward program leaves for the backward one
            value: self.old_keys.get(value, ("residual", stage, number)) for number, value in enumerate(kept)
        }

    def _old_keys(self) -> Iterable[tuple[Value, Key]]:
        """Yields the keys under which residuals go to the backward program where all are kept."""
        residuals, backward = self.residuals, self.backward
        key_of = dict(zip(backward.program.jaxpr.invars, backward.reads, strict=True))
        read_in_trips = residuals.read_in_trips
        for variable, source in residuals.residuals.items():
            yield read_in_trips.get(variable, Value(OUTSIDE, source)), key_of[variable]

    def staged_step(self) -> StagedStep:
        staged, old = self.staged, set(self.old_keys.values())
        left = [key for key in self.forward.makes if key not in old or self._is_read_elsewhere(key)]
        left += [key for key in self.keys.values() if key not in left]
        new_forward = self._forward(left)
        avals = {**staged.avals, **dict(zip(left, new_forward.program.out_avals, strict=True))}
        backward_reads = [key for key in self.backward.reads if key not in old]
        available = tuple(dict.fromkeys([*backward_reads, *self.forward.reads, *self.keys.values()]))
        new_backward = self._backward(available, avals)
        programs = {**staged.programs, self.forward.label: new_forward, self.backward.label: new_backward}
        return replace(staged, programs=programs, avals=avals)

    def _is_read_elsewhere(self, key: Key) -> bool:
        """Returns whether a residual is also a result of the step, or some other program reads it."""
        own = (self.forward.label, self.backward.label)
        others = [program for label, program in self.staged.programs.items() if label not in own]
        outputs = [output for output in self.staged.outputs if not isinstance(output, core.Literal)]
        return key in outputs or any(key in program.reads for program in others)

    def _forward(self, left: Sequence[Key]) -> StageProgram:
        """Returns a forward program that leaves some keys."""
        program, jaxpr = self.forward, self.forward.program.jaxpr

        def run(*arrays: Any) -> list[Any]:
            forward = _Lazy(self.forward.program, dict(zip(jaxpr.invars, arrays, strict=True)))
            stacked: dict[Value, Any] = {}
            for index in self.residuals.scans:
                variables = [value.variable for value in self.keys if value.scan == index]
                if variables:
                    equation = jaxpr.eqns[index]
                    results, stacks = _with_stacks(equation, forward.arrays(equation.invars), variables)
                    forward.add(dict(zip(equation.outvars, results, strict=True)))
                    stacked.update({Value(index, v): s for v, s in zip(variables, stacks, strict=True)})
            found = {
                key: forward.arrays([value.variable])[0] if value.scan == OUTSIDE else stacked[value]
                for value, key in self.keys.items()
            }
            variable_of = dict(zip(program.makes, jaxpr.outvars, strict=True))
            return [found[key] if key in found else forward.arrays([variable_of[key]])[0] for key in left]

        traced, reads = traced_program(run, program.reads, self.staged.avals)
        return replace(program, program=traced, reads=reads, makes=tuple(left))

    def _backward(self, available: Sequence[Key], avals: Mapping[Key, Any]) -> StageProgram:
        """Returns the backward program; it reads what it needs of some keys."""
        program, jaxpr = self.backward, self.backward.program.jaxpr
        scans = self.residuals.scans
        read_in_trips = self.residuals.read_in_trips

        def run(*arrays: Any) -> list[Any]:
            array_of = dict(zip(available, arrays, strict=True))
            known = {v: array_of[k] for v, k in zip(self.forward.program.jaxpr.invars, self.forward.reads, strict=True)}
            known.update({v.variable: array_of[key] for v, key in self.keys.items() if v.scan == OUTSIDE})
            forward = _Lazy(self.forward.program, known)
            env = {v: array_of[k] for v, k in zip(jaxpr.invars, program.reads, strict=True) if k in array_of}
            env.update(zip(jaxpr.constvars, program.program.consts, strict=True))
            for variable in read_in_trips:
                env[variable] = None

            def operand(atom: Any) -> Any:
                if isinstance(atom, core.Literal):
                    return atom.val
                if atom not in env:
                    env[atom] = forward.arrays([self.residuals.residuals[atom]])[0]
                return env[atom]

            for index, equation in enumerate(jaxpr.eqns):
                operands = [operand(v) for v in equation.invars]
                read = {n: scan for n, scan in scans.items() if scan.reader == index}
                with context_of(equation):
                    if read:
                        results = self._reading_scan(equation, operands, read, forward, array_of)
                    else:
                        results = bind(equation, operands)
                env.update(zip(equation.outvars, results, strict=True))
            return [operand(v) for v in jaxpr.outvars]

        traced, reads = traced_program(run, available, avals, {a.part for a in program.accumulations})
        return replace(program, program=traced, reads=reads)

    def _reading_scan(
        self,
        equation: core.JaxprEqn,
        operands: Sequence[Any],
        scans: Mapping[int, OpenedScan],
        forward: _Lazy,
        array_of: Mapping[Key, Any],
    ) -> list[Any]:
        """Runs a scan of the backward program, in whose trips those of forward scans run again."""
        given = scan_operands(equation, operands)
        body = equation.params["jaxpr"]
        first_slice = len(operands) - len(given.slices)
        makers = {index: self._trips(index, scan, forward, array_of) for index, scan in scans.items()}
        made = {operand for scan in scans.values() for operand in scan.results}
        read = [None if first_slice + n in made else array for n, array in enumerate(given.slices)]

        def trip(carries: list[Any], slices: tuple[list[Any], dict[int, list[Any]]]) -> tuple[list[Any], list[Any]]:
            own, of_scans = slices
            arrays = [*given.constants, *carries, *own]
            for index, scan in scans.items():
                results = makers[index][1](of_scans[index])
                for operand, result in zip(scan.results, results, strict=True):
                    arrays[operand] = result
            results = core.jaxpr_as_fun(body)(*arrays)
            return results[: len(carries)], results[len(carries) :]

        stacks = {index: stack for index, (stack, _) in makers.items()}
        carries, stacked = scan_again(equation, trip, list(given.carries), (read, stacks))
        return [*carries, *stacked]

    def _trips(
        self, index: int, scan: OpenedScan, forward: _Lazy, array_of: Mapping[Key, Any]
    ) -> tuple[list[Any], Callable[[list[Any]], list[Any]]]:
        """Returns the stacked arrays from which a scan's trips run again, and the function of one trip's slices."""
        equation = self.forward.program.jaxpr.eqns[index]
        body = equation.params["jaxpr"]
        inner, outer = scan_operands(equation, body.jaxpr.invars), scan_operands(equation, equation.invars)
        kept = {value.variable: array_of[key] for value, key in self.keys.items() if value.scan == index}
        missing = _Lazy(body, dict.fromkeys(kept)).wanted(scan.results.values())[1]
        held = _arrays_of(inner.constants, outer.constants, missing, forward)
        stacks = _arrays_of(inner.slices, outer.slices, missing, forward)
        carries = [v for v in inner.carries if v in missing]
        if carries:
            operands = forward.arrays(equation.invars)
            stacks.update(zip(carries, _with_stacks(equation, operands, carries)[1], strict=True))
        stacks.update(kept)

        def results(arrays: list[Any]) -> list[Any]:
            known = {**held, **dict(zip(stacks, arrays, strict=True))}
            return _Lazy(body, known).arrays(list(scan.results.values()))

        return list(stacks.values()), results


def _arrays_of(
    inner: Sequence[core.Var], outer: Sequence[Any], wanted: Sequence[core.Var], forward: _Lazy
) -> dict[core.Var, Any]:
    """Returns the operands of a scan for some of its body's variables."""
    operands = {v: operand for v, operand in zip(inner, outer, strict=True) if v in wanted}
    return dict(zip(operands, forward.arrays(list(operands.values())), strict=True))


def _with_stacks(
    equation: core.JaxprEqn, operands: Sequence[Any], variables: Sequence[core.Var]
) -> tuple[list[Any], list[Any]]:
    """Runs a scan, and returns its results and some variables of its body, stacked over its trips."""
    body, given = equation.params["jaxpr"], scan_operands(equation, operands)

    def trip(carries: list[Any], slices: list[Any]) -> tuple[list[Any], tuple[list[Any], list[Any]]]:
        known = dict(zip(body.jaxpr.invars, [*given.constants, *carries, *slices], strict=True))
        lazy = _Lazy(body, known)
        results = lazy.arrays(body.jaxpr.outvars)
        return results[: len(carries)], (results[len(carries) :], lazy.arrays(list(variables)))

    with context_of(equation):
        carries, (stacked, stacks) = scan_again(equation, trip, list(given.carries), list(given.slices))
    return [*carries, *stacked], stacks


def traced_program(
    run: Callable[..., Sequence[Any]], keys: Sequence[Key], avals: Mapping[Key, Any], always: Collection[Key] = ()
) -> tuple[core.ClosedJaxpr, tuple[Key, ...]]:
    """Returns a function as a program without dead code, and which of its inputs it reads, some of them always."""
    traced = jax.make_jaxpr(run)(*(abstract(avals[key]) for key in keys))
    is_always = [key in always for key in keys]
    live, is_read = dce_jaxpr(traced.jaxpr, [True] * len(traced.jaxpr.outvars), instantiate=is_always)
    return core.ClosedJaxpr(live, traced.consts), tuple(k for k, used in zip(keys, is_read, strict=True) if used)

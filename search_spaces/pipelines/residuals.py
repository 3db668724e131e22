"""What the forward program of a pipeline stage leaves for its backward program, and what could make it again.

A residual is kept in memory for each micro-batch in flight, or the backward program makes it again: from what is kept,
and from what the stage has anyway, such as its parameters. Every operation of the forward program is a step that may
run again. A scan over layers whose stacked results only one scan of the backward program reads is opened: its trips may
run again one by one, each from the carries with which it began. These are kept, or the whole scan runs again to make
them. What is best to keep for a price of memory is a minimum cut (`rematerialisation.choices`).

A residual may also be offloaded: it leaves the forward program in pinned memory of the host and is read back from there
by the backward program, so that devices have it only while one of the two runs.

The forward pass of a micro-batch can be cut before an equation, or between trips of a scan over layers.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from cost.compute import equation_flops
from search_spaces.pipelines.layer_flow import stacked_of
from search_spaces.pipelines.stage_labels import Key, Label
from search_spaces.pipelines.stage_programs import StagedStep
from search_spaces.pipelines.step_parts import StepParts, num_bytes, parameters_of, places
from search_spaces.rematerialisation.choices import Choices
from search_spaces.replay import scan_operands


class Cut(NamedTuple):
    """Where a stage begins.

    Attributes:
      equation: the index of an equation of `StepParts.each`.
      trip: of a scan, 1 to L - 1; 0 for a stage that begins with the whole equation.
    """

    equation: int
    trip: int = 0


class CutCandidate(NamedTuple):
    """A place at which the forward pass can be cut.

    Attributes:
      cut: the place.
      bytes_sent: by the earlier stage in each micro-batch: activations that later equations of the forward pass read.
      flops_before: arithmetic operations of the forward pass before it, of a micro-batch.
    """

    cut: Cut
    bytes_sent: int
    flops_before: float


def cut_candidates(parts: StepParts) -> list[CutCandidate]:
    """Returns all places at which the forward pass can be cut, in order; the first equation is none."""
    jaxpr = parts.each.program.jaxpr
    forward = [i for i, place in enumerate(places(jaxpr, parameters_of(parts))) if place.direction == "forward"]
    last_read = {v: i for i in forward for v in jaxpr.eqns[i].invars if isinstance(v, core.Var)}
    stacked = _of_parameters_alone(parts)
    live: dict[core.Var, int] = {}
    candidates, flops = [], 0.0
    for index in forward:
        equation = jaxpr.eqns[index]
        if index != forward[0]:
            candidates.append(CutCandidate(Cut(index), sum(live.values()), flops))
        equation_total = equation_flops(equation)
        if is_scan_over_layers(equation, stacked):
            candidates += _between_trips(index, equation, live, last_read, flops, equation_total)
        live.update({v: num_bytes(v.aval) for v in equation.outvars if last_read.get(v, -1) > index})
        live = {v: n for v, n in live.items() if last_read[v] > index}
        flops += equation_total
    return candidates


def is_scan_over_layers(equation: core.JaxprEqn, stacked: set[core.Var]) -> bool:
    """Returns whether an equation is a scan that reads stacked parameters slice by slice.

    Args:
      stacked: the variables that depend on parameters alone.
    """
    if equation.primitive.name != "scan" or equation.params["length"] < 2:
        return False
    return any(v in stacked for v in scan_operands(equation, equation.invars).slices if isinstance(v, core.Var))


def _between_trips(
    index: int,
    equation: core.JaxprEqn,
    live: dict[core.Var, int],
    last_read: dict[core.Var, int],
    flops: float,
    scan_flops: float,
) -> list[CutCandidate]:
    """Returns the cuts between two trips of a scan over layers."""
    constants, carries, slices = scan_operands(equation, equation.invars)
    made = equation.outvars[: len(carries)]
    stacks = [v for v in stacked_of(equation) if v in equation.outvars and last_read.get(v, -1) > index]
    length = equation.params["length"]
    fixed = {v: n for v, n in live.items() if last_read[v] > index or v in constants}
    sliced = {v: n for v, n in live.items() if v in slices and v not in fixed}
    carried = sum(num_bytes(v.aval) for v in made)
    stacked = sum(num_bytes(v.aval) for v in stacks)
    return [
        CutCandidate(
            Cut(index, trip),
            sum(fixed.values()) + carried + stacked * trip // length + sum(sliced.values()) * (length - trip) // length,
            flops + scan_flops * trip / length,
        )
        for trip in range(1, length)
    ]


def _of_parameters_alone(parts: StepParts) -> set[core.Var]:
    """Returns the floats of a micro-batch that depend on parameters, and on nothing of the batch."""
    jaxpr = parts.each.program.jaxpr
    found = set(parameters_of(parts))
    for equation in jaxpr.eqns:
        operands = [v for v in equation.invars if isinstance(v, core.Var)]
        if operands and all(v in found for v in operands):
            found.update(v for v in equation.outvars if jnp.issubdtype(v.aval.dtype, jnp.inexact))  # type: ignore[attr-defined]
    return found


StepSeconds = Callable[[core.JaxprEqn], float]
"""`step_s(equation)`: about how long an operation of a forward program takes."""
OUTSIDE = -1


class Value(NamedTuple):
    """An array of a forward program, or of the trips of one of its scans.

    Attributes:
      scan: the index of the scan's equation; `OUTSIDE` for an array of the program itself.
      variable: of the program, or of the scan's body.
    """

    scan: int
    variable: core.Var


class Step(NamedTuple):
    """An equation that may run again: of a forward program, or for each trip one of the body of an opened scan.

    Attributes:
      scan: the index of the scan's equation; `OUTSIDE` for an equation of the program itself.
      equation: its index.
    """

    scan: int
    equation: int


@dataclass(frozen=True)
class OpenedScan:
    """A scan of the forward program whose trips may run again in a scan of the backward program.

    Attributes:
      reader: the index of the equation of the backward program.
      results: by the position of the reader's operand the variable of this scan's body that it reads slices of.
    """

    reader: int
    results: dict[int, core.Var]


class StageResiduals(Choices):
    """The residuals of a stage, with what keeping them or making them again takes.

    Bytes are those of whole arrays of one micro-batch.

    Args:
      stage: which one; it has a forward and a backward program.

    Attributes:
      residuals: by a variable that the backward program reads the variable of the forward program.
      read_in_trips: of these variables those that stand for values of an opened scan.
      scans: the opened scans, by their index in the forward program.
    """

    def __init__(self, staged: StagedStep, stage: int, step_s: StepSeconds):
        super().__init__()
        self.staged, self._step_s = staged, step_s
        self.forward = staged.programs[Label("forward", stage)]
        self.backward = staged.programs[Label("backward", stage)]
        self.values: list[Value] = []
        self.all_steps: list[Step] = []
        self._number: dict[Value, int] = {}
        self._has: dict[int, dict[core.Var, Sequence[int]]] = {}  # by scan, what its body reads from outside
        self.residuals = dict(self._residuals())
        self.scans = self._opened_scans()
        self._add_inputs()
        for index, equation in enumerate(self.forward.program.jaxpr.eqns):
            self._add_step(Step(OUTSIDE, index), equation, self._numbers(OUTSIDE, equation.invars), 1)
            if index in self.scans:
                self._add_trips(index, equation)
        self.read_in_trips = {
            self.backward.program.jaxpr.eqns[scan.reader].invars[operand]: Value(index, variable)
            for index, scan in self.scans.items()
            for operand, variable in scan.results.items()
        }
        for variable, source in self.residuals.items():
            self.needed.update(self.numbers_of(*self.read_in_trips.get(variable, Value(OUTSIDE, source))))

    def numbers_of(self, scan: int, variable: core.Var) -> Sequence[int]:
        """Returns the number of a value as a sequence; empty for a constant, which nothing has to make or keep."""
        if scan != OUTSIDE and variable in self._has[scan]:
            return self._has[scan][variable]
        number = self._number.get(Value(scan, variable))
        return () if number is None else (number,)

    def _residuals(self) -> Iterator[tuple[core.Var, core.Var]]:
        forward, backward = self.forward.program.jaxpr, self.backward.program.jaxpr
        made = dict(zip(self.forward.makes, forward.outvars, strict=True))
        summed = {accumulation.part for accumulation in self.backward.accumulations}
        for key, variable in zip(self.backward.reads, backward.invars, strict=True):
            source = made.get(key)
            if not isinstance(source, core.Var) or source in forward.invars:
                continue
            if variable not in backward.outvars and key not in summed:
                yield variable, source

    def _numbers(self, scan: int, atoms: Sequence[core.Var | core.Literal]) -> list[int]:
        variables = dict.fromkeys(v for v in atoms if isinstance(v, core.Var))
        return [number for v in variables for number in self.numbers_of(scan, v)]

    def _add_value(self, scan: int, variable: core.Var, count: float) -> int:
        number = self._number[Value(scan, variable)] = len(self.values)
        self.values.append(Value(scan, variable))
        self.bytes[number] = float(count * num_bytes(variable.aval))
        return number

    def _add_inputs(self) -> None:
        """Adds what the forward program reads; what the stage receives is kept for each micro-batch where needed."""
        for key, variable in zip(self.forward.reads, self.forward.program.jaxpr.invars, strict=True):
            maker = self.staged.makers.get(key)
            is_received = maker is not None and maker.kind != "begin" and key not in self.staged.inputs
            self._add_value(OUTSIDE, variable, float(is_received and key not in self.backward.reads))

    def _add_step(self, step: Step, equation: core.JaxprEqn, read: Sequence[int], times: int) -> None:
        results = [self._add_value(step.scan, v, times) for v in equation.outvars if not isinstance(v, core.DropVar)]
        key = len(self.all_steps)
        self.all_steps.append(step)
        if not equation.effects:
            self.steps[key], self.operands[key] = times * self._step_s(equation), list(read)
            self.maker.update(dict.fromkeys(results, key))

    def _add_trips(self, index: int, equation: core.JaxprEqn) -> None:
        """Adds the operations of a scan's trips; the step of the whole scan was the last one, and makes its carries."""
        body, length = equation.params["jaxpr"].jaxpr, equation.params["length"]
        inner, outer = scan_operands(equation, body.invars), scan_operands(equation, equation.invars)
        self._has[index] = has = {}
        for variables, operands in ((inner.constants, outer.constants), (inner.slices, outer.slices)):
            has.update({v: self._numbers(OUTSIDE, [o]) for v, o in zip(variables, operands, strict=True)})
        whole = len(self.all_steps) - 1
        for variable in inner.carries:
            self.maker[self._add_value(index, variable, length)] = whole
        for at, operation in enumerate(body.eqns):
            self._add_step(Step(index, at), operation, self._numbers(index, operation.invars), length)

    def _opened_scans(self) -> dict[int, OpenedScan]:
        forward, backward = self.forward.program.jaxpr, self.backward.program.jaxpr
        makers = {
            v: (index, result)
            for index, equation in enumerate(forward.eqns)
            if equation.primitive.name == "scan" and not equation.effects
            for result, v in enumerate(equation.outvars)
        }
        read_forward = {v for e in forward.eqns for v in e.invars if isinstance(v, core.Var)}
        places: dict[core.Var, list[tuple[int, int]]] = defaultdict(list)
        for index, equation in enumerate(backward.eqns):
            for operand, v in enumerate(equation.invars):
                if isinstance(v, core.Var):
                    places[v].append((index, operand))
        found: dict[tuple[int, int], dict[int, core.Var]] = defaultdict(dict)
        for variable, source in self.residuals.items():
            if source not in makers or source in read_forward or len(places[variable]) != 1:
                continue
            (index, result), (reader, operand) = makers[source], places[variable][0]
            scan, reading = forward.eqns[index], backward.eqns[reader]
            if reading.primitive.name != "scan" or reading.params["length"] != scan.params["length"]:
                continue
            num_carries = len(scan_operands(scan, scan.invars).carries)
            first_slice = len(reading.invars) - len(scan_operands(reading, reading.invars).slices)
            variable_inside = scan.params["jaxpr"].jaxpr.outvars[result]
            if result >= num_carries and operand >= first_slice and isinstance(variable_inside, core.Var):
                found[index, reader][operand] = variable_inside
        opened: dict[int, OpenedScan] = {}
        for (index, reader), results in sorted(found.items(), key=lambda item: -len(item[1])):
            opened.setdefault(index, OpenedScan(reader, results))
        return opened


def residuals_of(staged: StagedStep, stage: int) -> list[Key]:
    """Returns the keys of what the backward program of a micro-batch reads that its forward program made, in order."""
    forward, backward = (staged.programs.get(Label(kind, stage)) for kind in ("forward", "backward"))
    if forward is None or backward is None:
        return []
    made = {*forward.makes}
    return [key for key in backward.reads if key in made]


def can_be_offloaded(staged: StagedStep, key: Key) -> bool:
    """Returns whether an array may wait in memory of the host: numbers of at least one dimension, no random keys."""
    aval = staged.avals[key]
    return bool(aval.shape) and not jnp.issubdtype(aval.dtype, jax.dtypes.extended)


def with_offloaded(staged: StagedStep, keys: Iterable[Key]) -> StagedStep:
    """Returns a step whose residuals with these keys are offloaded, and no others."""
    offloaded = frozenset(keys)
    residuals = {key for stage in range(staged.num_stages) for key in residuals_of(staged, stage)}
    for key in offloaded:
        if key not in residuals:
            raise ValueError(f"`keys` has {key}, which no backward program reads from its forward program.")
        if not can_be_offloaded(staged, key):
            raise ValueError(f"`keys` has {key}, but {staged.avals[key]} cannot be offloaded: it has no dimension.")
    return replace(staged, offloaded=offloaded)

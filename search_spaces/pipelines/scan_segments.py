"""Divides a scan over layers into consecutive scans, in the whole of a training step.

With a scan are divided the scan of its backward pass, the stacked weights, their gradients and an optimiser's moments.
So each argument with a dimension over the layers becomes several arguments, one for each segment of the layers, and
each such result several results (`ArraySegments`). What needs all layers at once reads its parts put together again.

Equations of a traced program carry numbers that outlive further traces. A number is a name scope around an equation.
Whatever runs the equations again keeps their scopes, so that what a later program has in place of an equation is known
by its number. `without_numbers` takes them away in the end.
"""

import functools
import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core, source_info_util

from search_spaces.pipelines.layer_flow import COMBINATIONS, LayerFlow, layer_flow, part_parameters
from search_spaces.replay import abstract_argument, bind, context_of, evaluated, scan_operands, traced_again
from search_spaces.sharding.tracing import INLINED_BODIES

_NUMBER = re.compile(r"equation#(\d+)$")
_SEGMENT = re.compile(r"segment#(\d+)$")


class Mark(NamedTuple):
    """Where an equation comes from.

    Attributes:
      number: of the equation of the numbered program.
      segment: of the layers, 0 where the equation is not divided.
    """

    number: int
    segment: int


def numbered_program(program: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Traces a program again without calls; each of its equations gets a number, which `mark_of` reads."""
    numbers = itertools.count()

    def run(equation: core.JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        with source_info_util.extend_name_stack(f"equation#{next(numbers)}"):
            return bind(equation, operands)

    return traced_again(program, lambda *a: evaluated(program.jaxpr, program.consts, a, run, INLINED_BODIES))


def in_segment(number: int) -> Any:
    """Returns a context in which equations are of a segment of the layers."""
    return source_info_util.extend_name_stack(f"segment#{number}")


def mark_of(equation: core.JaxprEqn) -> Mark | None:
    """Returns where an equation comes from; None of one that is in no numbered program."""
    scopes = [scope.name for scope in equation.source_info.name_stack.stack]
    numbers = [int(found[1]) for scope in scopes if (found := _NUMBER.match(scope))]
    segments = [int(found[1]) for scope in scopes if (found := _SEGMENT.match(scope))]
    return Mark(numbers[0], segments[0] if segments else 0) if numbers else None


def without_numbers(program: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Returns a program whose equations have no numbers."""

    def unmarked(equation: core.JaxprEqn) -> core.JaxprEqn:
        info = equation.source_info
        scopes = (s for s in info.name_stack.stack if not (_NUMBER.match(s.name) or _SEGMENT.match(s.name)))
        stack = source_info_util.NameStack(tuple(scopes))
        return equation.replace(source_info=info.replace(name_stack=stack))

    jaxpr = program.jaxpr.replace(eqns=[unmarked(equation) for equation in program.jaxpr.eqns])
    return core.ClosedJaxpr(jaxpr, program.consts)


class ArraySegments(NamedTuple):
    """How an array is divided by layers.

    Attributes:
      dim: its dimension over the layers.
      bounds: `[N + 1]` where the segments begin, then the number of layers.
    """

    dim: int
    bounds: tuple[int, ...]

    @property
    def num_segments(self) -> int:
        """The number of segments, N."""
        return len(self.bounds) - 1

    def split(self, array: Any) -> list[Any]:
        """Returns the segments of an array."""
        index = (slice(None),) * self.dim
        return [array[(*index, slice(a, b))] for a, b in itertools.pairwise(self.bounds)]

    def split_shape(self, shape: jax.ShapeDtypeStruct) -> list[jax.ShapeDtypeStruct]:
        """Returns the shapes of the segments of an array."""
        before, after = shape.shape[: self.dim], shape.shape[self.dim + 1 :]
        return [
            jax.ShapeDtypeStruct((*before, b - a, *after), shape.dtype, weak_type=shape.weak_type)
            for a, b in itertools.pairwise(self.bounds)
        ]


@dataclass(frozen=True)
class Segments:
    """Which flat arguments and results of a step are several arrays, one for each segment of some layers.

    Attributes:
      arguments: for each flat argument of the whole step how it is divided; None if it stays one array.
      results: the same of each flat result.
    """

    arguments: tuple[ArraySegments | None, ...]
    results: tuple[ArraySegments | None, ...]

    def positions(self) -> list[int]:
        """Returns for each flat argument of the whole step the position of its first array in the divided one."""
        return list(itertools.accumulate(map(_count, self.arguments), initial=0))[:-1]

    def spread(self, of_arguments: Iterable[Any]) -> list[Any]:
        """Returns for each argument of the divided step what belongs to the flat argument that it is a part of."""
        return [x for x, s in zip(of_arguments, self.arguments, strict=True) for _ in range(_count(s))]

    def split_shapes(self, arrays: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        """Returns the shapes of the arguments of the divided step from the arguments of the whole one."""
        divided: list[jax.ShapeDtypeStruct] = []
        for array, segments in zip(arrays, self.arguments, strict=True):
            divided += (
                [abstract_argument(array)] if segments is None else segments.split_shape(abstract_argument(array))
            )
        return divided

    def grouped_results(self, arrays: Sequence[Any]) -> Iterator[tuple[ArraySegments | None, list[Any]]]:
        """Yields for each flat result of the whole step how it is divided, and its arrays."""
        rest = iter(arrays)
        for segments in self.results:
            yield segments, list(itertools.islice(rest, _count(segments)))

    def divided_feedback(self, feedback: Sequence[int | None]) -> list[int | None]:
        """Returns for each result of the divided step the argument that it replaces, from those of the whole one."""
        positions, divided = self.positions(), []
        for replaced, segments in zip(feedback, self.results, strict=True):
            divided += [None if replaced is None else positions[replaced] + i for i in range(_count(segments))]
        return divided


def _count(segments: ArraySegments | None) -> int:
    return 1 if segments is None else segments.num_segments


class SegmentedProgram(NamedTuple):
    """A program whose scans over layers are divided.

    Attributes:
      program: of the divided arguments.
      segments: which these are.
      bounds: `[N + 1]` where the segments of each divided scan begin, then its length, by the scan's number.
    """

    program: core.ClosedJaxpr
    segments: Segments
    bounds: dict[int, tuple[int, ...]]


def segmented_program(
    program: core.ClosedJaxpr,
    trips: Mapping[int, Collection[int]],
    whole_arguments: Collection[int],
    feedback: Sequence[int | None],
) -> SegmentedProgram:
    """Divides scans over layers into consecutive scans.

    Scans over the same layers, such as those of a student and its teacher, are divided at the trips of all of them.

    Args:
      program: of `numbered_program`.
      trips: by the number of each scan the trips with which a segment begins, 1 to L - 1.
      whole_arguments: positions of arguments that are not divided, such as the batch.
      feedback: for each result the argument that it replaces, and as which it is divided, or None.

    Raises:
      ValueError: an equation is no scan, or has no such trip.
    """
    num_results = len(program.jaxpr.outvars)
    divided = SegmentedProgram(program, Segments((None,) * len(program.jaxpr.invars), (None,) * num_results), {})
    for number in trips:
        if number not in divided.bounds:
            divided = _divided_again(divided, number, trips, whole_arguments, feedback)
    return divided


def scan_of(program: core.ClosedJaxpr, number: int) -> int:
    """Returns the index of a scan, given its number; raises `ValueError` if the equation is no scan."""
    for index, equation in enumerate(program.jaxpr.eqns):
        mark = mark_of(equation)
        if mark is not None and mark.number == number and equation.primitive.name == "scan":
            return index
    raise ValueError(f"Equation {number} is no scan.")


def _divided_again(
    divided: SegmentedProgram,
    number: int,
    trips: Mapping[int, Collection[int]],
    whole_arguments: Collection[int],
    feedback: Sequence[int | None],
) -> SegmentedProgram:
    """Divides one more scan; arguments and results that are divided already stay as they are."""
    program, segments, earlier = divided
    scan, jaxpr = scan_of(program, number), program.jaxpr
    free = {p: i for i, (p, s) in enumerate(zip(segments.positions(), segments.arguments, strict=True)) if s is None}
    whole = {p for p in range(len(jaxpr.invars)) if p not in free or free[p] in whole_arguments}
    flow = layer_flow(program, scan, whole)
    numbers = {mark.number for i in flow.scans if (mark := mark_of(jaxpr.eqns[i])) is not None}
    begin = sorted({trip for n in numbers for trip in trips.get(n, ())})
    if not begin or begin[0] < 1 or begin[-1] >= flow.length:
        raise ValueError(f"A scan of {flow.length} layers is divided at trips 1 to {flow.length - 1}, not at {begin}.")
    bounds = (0, *begin, flow.length)
    new = [ArraySegments(flow.arguments[p], bounds) if p in flow.arguments else None for p in range(len(jaxpr.invars))]
    pairs = zip(segments.positions(), segments.arguments, strict=True)
    arguments = [new[p] if found is None else found for p, found in pairs]
    results: list[ArraySegments | None] = []
    new_results: list[ArraySegments | None] = []
    grouped = segments.grouped_results(jaxpr.outvars)
    for replaced, (found, variables) in zip(feedback, grouped, strict=True):
        if found is not None:
            new_results += [None] * len(variables)
        else:
            dim = flow.in_parts.get(variables[0]) if isinstance(variables[0], core.Var) else None
            found = None if dim is None else ArraySegments(dim, bounds)
            found = found if replaced is None else arguments[replaced]
            new_results.append(found)
        results.append(found)
    retraced = _Divided(program, flow, bounds, new, new_results).program()
    return SegmentedProgram(
        retraced, Segments(tuple(arguments), tuple(results)), {**earlier, **dict.fromkeys(numbers, bounds)}
    )


class _Parts(NamedTuple):
    """An array in parts along a dimension."""

    arrays: list[Any]
    dim: int


class _Divided:
    """Runs a program with its layers in segments."""

    def __init__(
        self,
        program: core.ClosedJaxpr,
        flow: LayerFlow,
        bounds: Sequence[int],
        arguments: Sequence[ArraySegments | None],
        results: Sequence[ArraySegments | None],
    ):
        self.whole, self.flow, self.bounds = program, flow, tuple(bounds)
        self.arguments, self.results = arguments, results
        self.env: dict[core.Var, Any] = {}
        self.slices: dict[tuple[core.Var, int, int], Any] = {}  # parts of whole arrays
        self.joined: dict[core.Var, Any] = {}  # all layers of what is in parts

    def program(self) -> core.ClosedJaxpr:
        """Traces it."""
        shapes = []
        for aval, segments in zip(self.whole.in_avals, self.arguments, strict=True):
            shape = abstract_argument(aval)
            shapes += [shape] if segments is None else segments.split_shape(shape)
        return jax.make_jaxpr(self._run)(*shapes)

    def _run(self, *arrays: Any) -> list[Any]:
        jaxpr, rest = self.whole.jaxpr, iter(arrays)
        self.env.update(zip(jaxpr.constvars, self.whole.consts, strict=True))
        for variable, segments in zip(jaxpr.invars, self.arguments, strict=True):
            if segments is None:
                self.env[variable] = next(rest)
            else:
                self.env[variable] = _Parts(list(itertools.islice(rest, segments.num_segments)), segments.dim)
        for index, equation in enumerate(jaxpr.eqns):
            if index in self.flow.scans:
                results = self._scan(equation)
            elif index in self.flow.operations:
                results = self._operation(index, equation)
            else:
                with context_of(equation):
                    results = bind(equation, [self._all(v) for v in equation.invars])
            self.env.update(zip(equation.outvars, results, strict=True))
        flat = []
        for variable, segments in zip(jaxpr.outvars, self.results, strict=True):
            if segments is None:
                flat.append(self._all(variable))
            else:
                flat += [self._part(variable, segments.dim, i) for i in range(segments.num_segments)]
        return flat

    def _scan(self, equation: core.JaxprEqn) -> list[Any]:
        """Runs a scan segment by segment, in the order of its trips.

        What its trips only add up, such as the gradient of a constant, each segment adds up for itself.
        """
        operands = scan_operands(equation, equation.invars)
        constants, carries = ([self._all(v) for v in group] for group in operands[:2])
        sums, totals = _added_up(equation), {}
        count = len(self.bounds) - 1
        stacks: list[Sequence[Any]] = [()] * count
        for segment in reversed(range(count)) if equation.params["reverse"] else range(count):
            size = self.bounds[segment + 1] - self.bounds[segment]
            with in_segment(segment), context_of(equation):
                slices = [self._part(v, 0, segment) for v in operands.slices]
                parameters = {"length": size, "unroll": min(equation.params["unroll"], size)}
                results = bind(equation, [*constants, *carries, *slices], **parameters)
                carries, stacks[segment] = list(results[: len(carries)]), results[len(carries) :]
                for i in sums:
                    totals[i] = lax.add(totals[i], carries[i]) if i in totals else carries[i]
                    carries[i] = jnp.zeros_like(carries[i])
        carries = [totals.get(i, carry) for i, carry in enumerate(carries)]
        return [*carries, *(_Parts(list(parts), 0) for parts in zip(*stacks, strict=True))]

    def _operation(self, index: int, equation: core.JaxprEqn) -> list[Any]:
        """Runs an operation on each part of the layers."""
        operation, found = self.flow.operations[index], []
        for segment in range(len(self.bounds) - 1):
            size = self.bounds[segment + 1] - self.bounds[segment]
            with in_segment(segment), context_of(equation):
                parts = zip(equation.invars, operation.operands, strict=True)
                operands = [self._all(v) if dim is None else self._part(v, dim, segment) for v, dim in parts]
                found.append(bind(equation, operands, **part_parameters(equation, operation, size)))
        results = []
        for dim, *parts in zip(operation.results, *found, strict=True):
            if dim is not None:
                results.append(_Parts(parts, dim))
                continue
            with context_of(equation):
                results.append(functools.reduce(COMBINATIONS[equation.primitive.name], parts))
        return results

    def _all(self, variable: Any) -> Any:
        """Returns an operand with all layers."""
        if not isinstance(variable, core.Var):
            return variable.val
        array = self.env[variable]
        if not isinstance(array, _Parts):
            return array
        if variable not in self.joined:
            self.joined[variable] = lax.concatenate(array.arrays, array.dim)
        return self.joined[variable]

    def _part(self, variable: Any, dim: int, segment: int) -> Any:
        """Returns the part of an operand that belongs to a segment of the layers."""
        array = self.env[variable] if isinstance(variable, core.Var) else variable.val
        if isinstance(array, _Parts) and array.dim == dim:
            return array.arrays[segment]
        key = variable, dim, segment
        if key not in self.slices:
            self.slices[key] = lax.slice_in_dim(self._all(variable), *self.bounds[segment : segment + 2], axis=dim)
        return self.slices[key]


def _added_up(equation: core.JaxprEqn) -> list[int]:
    """Returns which carries of a scan its trips only add to."""
    body = equation.params["jaxpr"].jaxpr
    carries = scan_operands(equation, body.invars).carries
    num_reads = Counter(v for e in body.eqns for v in e.invars if isinstance(v, core.Var))
    num_reads.update(v for v in body.outvars if isinstance(v, core.Var))
    makers = {v: e for e in body.eqns for v in e.outvars}
    found = []
    for i, (carry, made) in enumerate(zip(carries, body.outvars, strict=False)):
        maker = makers.get(made) if isinstance(made, core.Var) else None
        is_sum = maker is not None and maker.primitive.name in ("add_any", "add") and carry in maker.invars
        if is_sum and num_reads[carry] == 1 and jnp.issubdtype(carry.aval.dtype, jnp.inexact):
            found.append(i)
    return found

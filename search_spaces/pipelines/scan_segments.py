"""Divides a scan over layers into consecutive scans, in the whole of a training step.

With a scan are divided the scan of its backward pass, the stacked weights, their gradients and an optimiser's moments.
So each argument with a dimension over the layers becomes several arguments, one for each segment of the layers, and
each such result several results. What needs all layers at once reads its parts put together again.
"""

import functools
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend import core

from search_spaces.pipelines.layer_flow import COMBINATIONS, LayerFlow, layer_flow, part_parameters
from search_spaces.pipelines.numbered_program import in_segment, mark_of, shape_of
from search_spaces.replay import bind, context_of, scan_operands
from search_spaces.sharding.base import Rule
from search_spaces.sharding.shardy import operation_rules


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
        counts = [1 if s is None else s.num_segments for s in self.arguments]
        return list(itertools.accumulate(counts, initial=0))[:-1]

    def split_shapes(self, arrays: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        """Returns the shapes of the arguments of the divided step from the arguments of the whole one."""
        divided: list[jax.ShapeDtypeStruct] = []
        for array, segments in zip(arrays, self.arguments, strict=True):
            divided += [shape_of(array)] if segments is None else _divided_shape(shape_of(array), segments)
        return divided

    def grouped_results(self, arrays: Sequence[Any]) -> Iterator[tuple[ArraySegments | None, list[Any]]]:
        """Yields for each flat result of the whole step how it is divided, and its arrays."""
        rest = iter(arrays)
        for segments in self.results:
            yield segments, list(itertools.islice(rest, 1 if segments is None else segments.num_segments))


class SegmentedProgram(NamedTuple):
    """A program whose scans over layers are divided.

    Attributes:
      program: of the divided arguments.
      segments: which these are.
    """

    program: core.ClosedJaxpr
    segments: Segments


def segmented_program(
    program: core.ClosedJaxpr, trips: Mapping[int, Collection[int]], whole_arguments: Collection[int]
) -> SegmentedProgram:
    """Divides scans over layers into consecutive scans.

    Args:
      program: of `numbered_program`.
      trips: by the number of each scan the trips with which a segment begins, 1 to L - 1.
      whole_arguments: positions of arguments that are not divided, such as the batch.

    Raises:
      ValueError: an equation is no scan, or has no such trip.
    """
    num_results = len(program.jaxpr.outvars)
    segments = Segments((None,) * len(program.jaxpr.invars), (None,) * num_results)
    divided = SegmentedProgram(program, segments)
    for number, begin in trips.items():
        divided = _divided_again(divided, number, sorted(set(begin)), whole_arguments)
    return divided


def rules_of_equations(program: core.ClosedJaxpr) -> list[Rule | None]:
    """Returns the sharding rule of each equation of a program without calls, or None."""
    return operation_rules(program.jaxpr.eqns)


def scan_of(program: core.ClosedJaxpr, number: int) -> int:
    """Returns the index of a scan, given its number; raises `ValueError` if there is none or it is divided."""
    marked = ((i, mark_of(e)) for i, e in enumerate(program.jaxpr.eqns) if e.primitive.name == "scan")
    found = [i for i, mark in marked if mark is not None and mark.number == number]
    if len(found) != 1:
        raise ValueError(f"Equation {number} is no scan that can be divided, or it was divided with another scan.")
    return found[0]


def _divided_again(
    divided: SegmentedProgram, number: int, begin: Sequence[int], whole_arguments: Collection[int]
) -> SegmentedProgram:
    """Divides one more scan; arguments and results that are divided already stay as they are."""
    program, segments = divided
    scan = scan_of(program, number)
    length = program.jaxpr.eqns[scan].params["length"]
    if not begin or begin[0] < 1 or begin[-1] >= length:
        raise ValueError(f"A scan of {length} layers is divided at trips from 1 to {length - 1}, not {list(begin)}.")
    free = {p: i for i, (p, s) in enumerate(zip(segments.positions(), segments.arguments, strict=True)) if s is None}
    whole = {p for p in range(len(program.jaxpr.invars)) if free.get(p, -1) in (-1, *whole_arguments)}
    flow = layer_flow(program, rules_of_equations(program), scan, whole)
    bounds = (0, *begin, length)
    new_arguments = [
        ArraySegments(flow.arguments[p], bounds) if p in flow.arguments else None
        for p in range(len(program.jaxpr.invars))
    ]
    is_free = [s is None for s in segments.results for _ in range(1 if s is None else s.num_segments)]
    new_results = [
        ArraySegments(flow.in_parts[v], bounds) if ok and isinstance(v, core.Var) and v in flow.in_parts else None
        for v, ok in zip(program.jaxpr.outvars, is_free, strict=True)
    ]
    retraced = _Divided(program, flow, bounds, new_arguments, new_results).program()
    arguments = tuple(
        s if s is not None else new_arguments[p] for p, s in zip(segments.positions(), segments.arguments, strict=True)
    )
    grouped = segments.grouped_results(new_results)
    results = tuple(s if s is not None else group[0] for s, group in grouped)
    return SegmentedProgram(retraced, Segments(arguments, results))


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
            shape = shape_of(aval)
            shapes += [shape] if segments is None else _divided_shape(shape, segments)
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
            flat += [self._all(variable)] if segments is None else self.env[variable].arrays
        return flat

    def _scan(self, equation: core.JaxprEqn) -> list[Any]:
        """Runs a scan segment by segment, in the order of its trips."""
        operands = scan_operands(equation, equation.invars)
        constants, carries = ([self._all(v) for v in group] for group in operands[:2])
        count = len(self.bounds) - 1
        stacks: list[Sequence[Any]] = [()] * count
        for segment in reversed(range(count)) if equation.params["reverse"] else range(count):
            size = self.bounds[segment + 1] - self.bounds[segment]
            with in_segment(segment), context_of(equation):
                slices = [self._part(v, 0, segment) for v in operands.slices]
                parameters = {"length": size, "unroll": min(equation.params["unroll"], size)}
                results = bind(equation, [*constants, *carries, *slices], **parameters)
            carries, stacks[segment] = results[: len(carries)], results[len(carries) :]
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


def _divided_shape(shape: jax.ShapeDtypeStruct, segments: ArraySegments) -> list[jax.ShapeDtypeStruct]:
    sizes = [b - a for a, b in itertools.pairwise(segments.bounds)]
    before, after = shape.shape[: segments.dim], shape.shape[segments.dim + 1 :]
    return [jax.ShapeDtypeStruct((*before, size, *after), shape.dtype, weak_type=shape.weak_type) for size in sizes]

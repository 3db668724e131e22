"""From one sharding of an array to another by the cheapest steps that each are one collective.

A reshard over several axes at once ends in XLA's replicate-then-slice fallback, so it is taken apart here, and the same
steps are what is priced and what runs. A spec is, for each dimension, the mesh axes (by index) that split it, major to
minor. With links as data no order of gathers, exchanges and slices is best for all of them, so the steps are a shortest
path over specs (Dijkstra), searched no further than somebody has asked; equal cases up to the order of dimensions share
one search, a few hundred for any model.

On a mesh of many axes most single steps are permutes: a spec can go to every other one with the same numbers of parts.
They are not tried from each of these. Once one spec has offered a permute to all others, none of them is further away
than the dearest of these permutes, so that a spec which is found later has little to offer.
"""

import heapq
import math
from collections.abc import Hashable, Iterator
from functools import lru_cache
from itertools import chain
from operator import itemgetter, mod
from typing import Any, Literal, NamedTuple

from cost.base import CollectiveKind
from cost.lines import FREE, Line, added_lines
from search_spaces.partition_specs import IndexedSpec
from search_spaces.sharding.base import Rates, ReshardStep
from search_spaces.sharding.spec import axes_in, parts_of, shards

REFERENCE_BYTES = 2.0**20
"""The array for which paths are shortest: larger ones weigh latency less than they could, smaller ones more."""


class Move(NamedTuple):
    """A single collective, without the spec that it leaves; the fields are those of `ReshardStep`."""

    kind: CollectiveKind | Literal["slice"]
    axis: int
    fraction: float


class Stop:
    """A spec with the steps that leave it, which are listed when they are first needed. Equal specs share a stop.

    Attributes:
      strides: for each mesh axis its dimension and the parts between two of the axis's coordinates.
      steps: single collectives other than permutes: the stop after each, its seconds for `REFERENCE_BYTES`, the move.
      permutes: the same for permutes, the fastest first.
      least_permute_s: seconds for `REFERENCE_BYTES` that no permute takes less than.
    """

    __slots__ = ("least_permute_s", "parts", "permutes", "spec", "steps", "strides")

    def __init__(self, spec: IndexedSpec, axis_sizes: tuple[int, ...]):
        self.spec, self.parts, self.strides = spec, parts_of(spec, axis_sizes), _strides(spec, axis_sizes)
        self.steps: list[_Step] | None = None
        self.permutes: list[_Step] | None = None
        self.least_permute_s: float | None = None


class Steps:
    """Every single collective on every spec of a mesh."""

    def __init__(self, axis_sizes: tuple[int, ...], rates: tuple[Rates, ...]):
        self.axis_sizes, self.rates = axis_sizes, rates
        self._axes = tuple(a for a, n in enumerate(axis_sizes) if n > 1)
        slowness = [rate.s_per_byte("collective_permute") for rate in rates]
        self._slowest_first = sorted(self._axes, key=lambda axis: (-slowness[axis], axis))
        self._stops: dict[IndexedSpec, Stop] = {}
        self._seconds: dict[Move, float] = {}

    def stop(self, spec: IndexedSpec) -> Stop:
        """Returns the stop of a spec."""
        stop = self._stops.get(spec)
        if stop is None:
            stop = self._stops[spec] = Stop(spec, self.axis_sizes)
        return stop

    def lines(self, move: Move | ReshardStep) -> tuple[Line, ...]:
        """Returns the lines of one step, over the bytes of the whole array."""
        if move.kind == "slice":
            return FREE
        return tuple([Line(a, b * move.fraction) for a, b in self.rates[move.axis].lines[move.kind]])

    def of(self, stop: Stop) -> list["_Step"]:
        """Returns all steps that are no permutes: only the minor-most axis of a dimension can leave or enter it."""
        if stop.steps is None:
            moves = chain(self._slices(stop.spec), self._gathers_and_exchanges(stop.spec))
            stop.steps = [(self.stop(after), self._seconds_of(move), move) for move, after in moves]
        return stop.steps

    def permutes(self, stop: Stop) -> list["_Step"]:
        """Returns the steps to blocks of the same shape on other devices: within a dimension, across, or by other axes.

        A permute runs along the slowest axis that changes place.
        """
        if stop.permutes is None:
            moves, before = self._permute_moves(stop), stop.strides
            permutes: list[_Step] = []
            for spec in _of_parts(stop.parts, self._axes, self.axis_sizes):
                if spec != stop.spec:
                    other = self.stop(spec)
                    after = other.strides
                    axis = next(axis for axis in self._slowest_first if before.get(axis) != after.get(axis))
                    permutes.append((other, self._seconds_of(moves[axis]), moves[axis]))
            stop.permutes = sorted(permutes, key=itemgetter(1))
        return stop.permutes

    def least_permute_s(self, stop: Stop) -> float:
        """Returns seconds for `REFERENCE_BYTES` that no permute from a stop takes less than."""
        if stop.least_permute_s is None:
            moves = self._permute_moves(stop).values()
            stop.least_permute_s = min(map(self._seconds_of, moves), default=math.inf)
        return stop.least_permute_s

    def _permute_moves(self, stop: Stop) -> dict[int, Move]:
        local = 1.0 / shards(stop.spec, self.axis_sizes)
        return {axis: Move("collective_permute", axis, local) for axis in self._axes}

    def _seconds_of(self, move: Move) -> float:
        if move not in self._seconds:
            self._seconds[move] = min([a + b * REFERENCE_BYTES for a, b in self.lines(move)])
        return self._seconds[move]

    def _slices(self, spec: IndexedSpec) -> Iterator[tuple[Move, IndexedSpec]]:
        used = axes_in(spec)
        for axis in self._axes:
            if axis not in used:
                for d, dim in enumerate(spec):
                    yield Move("slice", axis, 0.0), _with(spec, d, (*dim, axis))

    def _gathers_and_exchanges(self, spec: IndexedSpec) -> Iterator[tuple[Move, IndexedSpec]]:
        local = 1.0 / shards(spec, self.axis_sizes)
        for i, dim in enumerate(spec):
            if dim:
                axis, spec_after = dim[-1], _with(spec, i, dim[:-1])
                size = local * self.axis_sizes[axis]
                yield Move("all_gather", axis, size), spec_after
                for j in range(len(spec)):
                    if j != i:
                        yield Move("all_to_all", axis, size), _with(spec_after, j, (*spec_after[j], axis))


class Tree:
    """The cheapest paths from one spec, of specs that split no dimension into parts that do not divide its limit.

    Of equally cheap paths the one of fewer steps wins.

    Args:
      most: for each dimension the number that its parts have to divide.
    """

    def __init__(self, steps: Steps, source: IndexedSpec, most: tuple[int, ...]):
        first = steps.stop(source)
        self._steps, self._most = steps, most
        self._best: dict[Stop, tuple[float, int]] = {first: (0.0, 0)}
        self._last: dict[Stop, tuple[Stop, Move]] = {}
        self._queue: list[tuple[float, int, IndexedSpec, Stop]] = [(0.0, 0, source, first)]
        self._done: set[Stop] = set()
        self._furthest: dict[tuple[int, ...], tuple[float, int]] = {}
        self._lines: dict[Stop, tuple[Line, ...]] = {first: FREE}

    def path(self, target: IndexedSpec) -> list[tuple[Move, IndexedSpec]]:
        """Returns the steps to a spec in order, each with the spec that it leaves."""
        stop, path = self._reached(target), []
        while stop in self._last:
            before, move = self._last[stop]
            path.append((move, stop.spec))
            stop = before
        return path[::-1]

    def lines(self, target: IndexedSpec) -> tuple[Line, ...]:
        """Returns the lines of all steps to a spec one after the other, over the bytes of the whole array."""
        return self._lines_of(self._reached(target))

    def _lines_of(self, stop: Stop) -> tuple[Line, ...]:
        if stop not in self._lines:
            before, move = self._last[stop]
            self._lines[stop] = added_lines(self._lines_of(before), self._steps.lines(move))
        return self._lines[stop]

    def _reached(self, target: IndexedSpec) -> Stop:
        """Returns the stop of a spec after the search has come there."""
        stop = self._steps.stop(target)
        while stop not in self._done:
            seconds, count, _, nearest = heapq.heappop(self._queue)
            if nearest not in self._done:
                self._done.add(nearest)
                self._leave(nearest, seconds, count)
        return stop

    def _leave(self, stop: Stop, seconds: float, count: int) -> None:
        """Offers every step from a stop to the stops after it."""
        best, last = self._best, self._last
        for step in self._steps.of(stop):
            other, more_seconds, move = step
            cost = seconds + more_seconds, count + 1
            known = best.get(other)
            if known is None:
                known = best[other] = _FORBIDDEN if any(map(mod, self._most, other.parts)) else _UNKNOWN
            if cost < known:
                best[other], last[other] = cost, (stop, move)
                heapq.heappush(self._queue, (*cost, other.spec, other))
        if stop not in last or last[stop][1].kind != "collective_permute":  # two permutes in a row are one
            self._permute(stop, seconds, count)

    def _permute(self, stop: Stop, seconds: float, count: int) -> None:
        """Offers every permute from a stop that can be the cheapest way to some other one."""
        best, furthest = self._best, self._furthest.get(stop.parts, _UNKNOWN)
        if (seconds + self._steps.least_permute_s(stop), count + 1) >= furthest:
            return
        cost = furthest
        for other, more_seconds, move in self._steps.permutes(stop):
            cost = seconds + more_seconds, count + 1
            if cost >= furthest:
                break
            if cost < best.get(other, _UNKNOWN):
                best[other], self._last[other] = cost, (stop, move)
                heapq.heappush(self._queue, (*cost, other.spec, other))
        self._furthest[stop.parts] = min(cost, furthest)


_Step = tuple[Stop, float, Move]
_UNKNOWN = math.inf, 0
_FORBIDDEN = -math.inf, 0
"""The cost of a spec that the limits exclude: nothing is cheaper."""


def _with(spec: IndexedSpec, dim: int, axes: tuple[int, ...]) -> IndexedSpec:
    return (*spec[:dim], axes, *spec[dim + 1 :])


def _strides(spec: IndexedSpec, sizes: tuple[int, ...]) -> dict[int, tuple[int, int]]:
    """Returns, for each axis in a spec, its dimension and the parts between two of the axis's coordinates."""
    strides = {}
    for d, dim in enumerate(spec):
        stride = 1
        for axis in reversed(dim):
            strides[axis] = d, stride
            stride *= sizes[axis]
    return strides


@lru_cache(maxsize=10_000)
def _of_parts(parts: tuple[int, ...], axes: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[IndexedSpec, ...]:
    """Returns every spec over some of the axes that splits the dimensions into these numbers of parts."""
    if not parts:
        return ((),)
    specs = []

    def fill(dim: tuple[int, ...], unused_axes: tuple[int, ...], missing: int) -> None:
        if missing == 1:
            specs.extend((dim, *rest) for rest in _of_parts(parts[1:], unused_axes, sizes))
            return
        for axis in unused_axes:
            if missing % sizes[axis] == 0:
                fill((*dim, axis), tuple(a for a in unused_axes if a != axis), missing // sizes[axis])

    fill((), axes, parts[0])
    return tuple(specs)


class Paths:
    """The cheapest steps between any two specs of an array on one mesh.

    A dimension is on the way never split into parts that neither its first nor its last number of parts asks for, so
    what divides at both ends divides throughout.
    """

    def __init__(self, axis_sizes: tuple[int, ...], rates: tuple[Rates, ...]):
        self.axis_sizes, self.rates = axis_sizes, rates
        self.messages: dict[Hashable, Any] = {}
        self._steps = Steps(axis_sizes, rates)
        kinds = list(zip(axis_sizes, rates, strict=True))
        self._equal = {tuple(a for a, other in enumerate(kinds) if other == kind) for kind in kinds}
        self._renumberings: dict[tuple[int, ...], dict[int, int]] = {}
        self._paths: dict[tuple[IndexedSpec, IndexedSpec], tuple[ReshardStep, ...]] = {}
        self._trees: dict[tuple[IndexedSpec, tuple[int, ...]], Tree] = {}

    def __call__(self, source: IndexedSpec, target: IndexedSpec) -> tuple[ReshardStep, ...]:
        """Returns the steps from one spec to another; none where they are equal."""
        if source == target:
            return ()
        steps = self._paths.get((source, target))
        if steps is None:
            steps = self._paths[source, target] = self._path(source, target)
        return steps

    def lines(self, source: IndexedSpec, target: IndexedSpec) -> tuple[Line, ...]:
        """Returns the lines of all steps one after the other, over the bytes of the whole array."""
        if source == target:
            return FREE
        tree, last, _, _ = self._tree_of(source, target)
        return tree.lines(last)

    def slowness(self, axis: int) -> float:
        """Returns the seconds for each byte of a large reduction along a mesh axis."""
        return self._steps.rates[axis].s_per_byte("reduce_scatter")

    def step_lines(self, step: ReshardStep) -> tuple[Line, ...]:
        """Returns the lines of one step, over the bytes of the whole array."""
        return self._steps.lines(step)

    def step_s(self, step: ReshardStep, num_bytes: float, latency_share: float = 1.0) -> float:
        """Returns the seconds of one step for an array with this number of bytes as a whole, as `least_s` does."""
        return min([a * latency_share + b * num_bytes for a, b in self.step_lines(step)])

    def _path(self, source: IndexedSpec, target: IndexedSpec) -> tuple[ReshardStep, ...]:
        tree, last, order, names = self._tree_of(source, target)
        own_names = {name: axis for axis, name in names.items()}
        steps = []
        for move, spec_after in tree.path(last):
            spec = list(source)
            for d, axes in zip(order, spec_after, strict=True):
                spec[d] = tuple([own_names[a] for a in axes])
            steps.append(ReshardStep(move.kind, own_names[move.axis], move.fraction, tuple(spec)))
        return tuple(steps)

    def _tree_of(self, source: IndexedSpec, target: IndexedSpec) -> tuple[Tree, IndexedSpec, list[int], dict[int, int]]:
        """Returns the tree of a path, the path's end in it, its dimensions, and the axes' names in the tree.

        Dimensions that are never split are left out, the others put in order, and axes of equal size and rates are
        renamed in the order in which they occur: paths that differ in names only share a tree.
        """
        most = map(math.lcm, parts_of(source, self.axis_sizes), parts_of(target, self.axis_sizes))
        dims = sorted([(m, len(axes), axes, d) for d, (axes, m) in enumerate(zip(source, most, strict=True)) if m > 1])
        names = self._names(tuple([a for _, _, axes, _ in dims for a in axes]))
        order = [d for *_, d in dims]
        first = tuple([tuple([names[a] for a in axes]) for _, _, axes, _ in dims])
        limits = tuple([m for m, *_ in dims])
        tree = self._trees.get((first, limits))
        if tree is None:
            tree = self._trees[first, limits] = Tree(self._steps, first, limits)
        return tree, tuple([tuple([names[a] for a in target[d]]) for d in order]), order, names

    def _names(self, axes: tuple[int, ...]) -> dict[int, int]:
        """Renames axes within their groups of equal ones so that the given ones come first, in the given order."""
        if axes not in self._renumberings:
            names = {}
            for group in self._equal:
                names.update(zip(sorted(group, key=(*axes, *group).index), group, strict=True))
            self._renumberings[axes] = names
        return self._renumberings[axes]

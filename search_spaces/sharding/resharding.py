"""From one sharding of an array to another by the cheapest steps that each are one collective.

A reshard over several axes at once ends in XLA's replicate-then-slice fallback, so it is taken apart here, and the same
steps are what is priced and what runs. A spec is, for each dimension, the mesh axes (by index) that split it, major to
minor. With links as data no order of gathers, exchanges and slices is best for all of them, so the steps are a shortest
path over specs; equal cases up to the order of dimensions share one search, a few hundred for any model.
"""

import heapq
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import chain
from math import lcm
from operator import mod

from cost.lines import FREE, Line, added_lines
from search_spaces.partition_specs import IndexedSpec
from search_spaces.sharding.base import Rates, ReshardStep
from search_spaces.sharding.spec import axes_in, parts_of, shards

REFERENCE_BYTES = 2.0**20
"""The array for which paths are shortest: larger ones weigh latency less than they could, smaller ones more."""


class Paths:
    """The cheapest steps between any two specs of an array on one mesh.

    A dimension is on the way never split into parts that neither its first nor its last number of parts asks for, so
    what divides at both ends divides throughout.

    Args:
      axis_sizes: devices along each mesh axis.
      rates: of each mesh axis.
    """

    def __init__(self, axis_sizes: tuple[int, ...], rates: tuple[Rates, ...]):
        self.axis_sizes, self.rates = axis_sizes, rates
        self._slowness = [rate.s_per_byte("collective_permute") for rate in rates]
        self._axes = tuple(a for a, n in enumerate(axis_sizes) if n > 1)
        kinds = list(zip(axis_sizes, rates, strict=True))
        self._equal = {tuple(a for a, other in enumerate(kinds) if other == kind) for kind in kinds}
        self._renumberings: dict[tuple[int, ...], dict[int, int]] = {}
        self._paths: dict[tuple[IndexedSpec, IndexedSpec], tuple[ReshardStep, ...]] = {}
        self._trees: dict[tuple[IndexedSpec, tuple[int, ...]], _Tree] = {}
        self._steps_from: dict[IndexedSpec, tuple[list[_Step], list[_Step]]] = {}

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
        tree, first, last, _, _ = self._tree_of(source, target)
        return tree[last][2] if last != first else FREE

    def step_lines(self, step: ReshardStep) -> tuple[Line, ...]:
        """Returns the lines of one step, over the bytes of the whole array."""
        if step.kind == "slice":
            return FREE
        return tuple([Line(a, b * step.fraction) for a, b in self.rates[step.axis].lines[step.kind]])

    def step_s(self, step: ReshardStep, num_bytes: float, latency_share: float = 1.0) -> float:
        """Returns the seconds of one step for an array with this number of bytes as a whole, as `least_s` does."""
        return min([a * latency_share + b * num_bytes for a, b in self.step_lines(step)])

    def _path(self, source: IndexedSpec, target: IndexedSpec) -> tuple[ReshardStep, ...]:
        tree, first, last, order, names = self._tree_of(source, target)
        own_names = {name: axis for axis, name in names.items()}
        steps = []
        while last != first:
            last, step, *_ = tree[last]
            spec = list(source)
            for d, axes in zip(order, step.spec, strict=True):
                spec[d] = tuple([own_names[a] for a in axes])
            steps.append(step._replace(axis=own_names[step.axis], spec=tuple(spec)))
        return tuple(reversed(steps))

    def _tree_of(
        self, source: IndexedSpec, target: IndexedSpec
    ) -> tuple["_Tree", IndexedSpec, IndexedSpec, list[int], dict[int, int]]:
        """Returns the tree of a path, the path's ends in it, their dimensions, and the axes' names in the tree.

        Dimensions that are never split are left out, the others put in order, and axes of equal size and rates are
        renamed in the order in which they occur: paths that differ in names only share a tree.
        """
        most = map(lcm, parts_of(source, self.axis_sizes), parts_of(target, self.axis_sizes))
        dims = sorted([(m, len(axes), axes, d) for d, (axes, m) in enumerate(zip(source, most, strict=True)) if m > 1])
        names = self._names(tuple([a for _, _, axes, _ in dims for a in axes]))
        order = [d for *_, d in dims]
        first = tuple([tuple([names[a] for a in axes]) for _, _, axes, _ in dims])
        limits = tuple([m for m, *_ in dims])
        tree = self._trees.get((first, limits))
        if tree is None:
            tree = self._trees[first, limits] = self._tree(first, limits)
        return tree, first, tuple([tuple([names[a] for a in target[d]]) for d in order]), order, names

    def _names(self, axes: tuple[int, ...]) -> dict[int, int]:
        """Renames axes within their groups of equal ones so that the given ones come first, in the given order."""
        if axes not in self._renumberings:
            names = {}
            for group in self._equal:
                names.update(zip(sorted(group, key=(*axes, *group).index), group, strict=True))
            self._renumberings[axes] = names
        return self._renumberings[axes]

    def _tree(self, source: IndexedSpec, most: tuple[int, ...]) -> "_Tree":
        """Finds the last step of the cheapest path to every spec (Dijkstra); of equal paths the shortest wins."""
        best: dict[IndexedSpec, tuple[float, int]] = {source: (0.0, 0)}
        tree: _Tree = {}
        queue: list[tuple[float, int, IndexedSpec]] = [(0.0, 0, source)]
        while queue:
            seconds, count, spec = heapq.heappop(queue)
            if (seconds, count) > best[spec]:
                continue
            steps, permutes = self._steps(spec)
            _, last, lines = tree.get(spec, _START)
            if last is None or last.kind != "collective_permute":  # two permutes in a row are one
                steps = steps + permutes
            for step, more_seconds, parts in steps:
                cost = (seconds + more_seconds, count + 1)
                if cost < best.get(step.spec, _UNKNOWN) and not any(map(mod, most, parts)):
                    best[step.spec] = cost
                    tree[step.spec] = spec, step, added_lines(lines, self.step_lines(step))
                    heapq.heappush(queue, (*cost, step.spec))
        return tree

    def _steps(self, spec: IndexedSpec) -> tuple[list["_Step"], list["_Step"]]:
        """Returns every single collective on a spec: only the minor-most axis of a dimension can leave or enter it."""
        if spec not in self._steps_from:
            others = chain(self._slices(spec), self._gathers_and_exchanges(spec))
            self._steps_from[spec] = self._with_rates(others), self._with_rates(self._permutes(spec))
        return self._steps_from[spec]

    def _with_rates(self, steps: Iterable[ReshardStep]) -> list["_Step"]:
        return [(step, self.step_s(step, REFERENCE_BYTES), parts_of(step.spec, self.axis_sizes)) for step in steps]

    def _slices(self, spec: IndexedSpec) -> Iterator[ReshardStep]:
        for axis in self._axes:
            if axis not in axes_in(spec):
                for d, dim in enumerate(spec):
                    yield ReshardStep("slice", axis, 0.0, _with(spec, d, (*dim, axis)))

    def _gathers_and_exchanges(self, spec: IndexedSpec) -> Iterator[ReshardStep]:
        local = 1.0 / shards(spec, self.axis_sizes)
        for i, dim in enumerate(spec):
            if dim:
                axis, spec_after = dim[-1], _with(spec, i, dim[:-1])
                size = local * self.axis_sizes[axis]
                yield ReshardStep("all_gather", axis, size, spec_after)
                for j in range(len(spec)):
                    if j != i:
                        yield ReshardStep("all_to_all", axis, size, _with(spec_after, j, (*spec_after[j], axis)))

    def _permutes(self, spec: IndexedSpec) -> Iterator[ReshardStep]:
        """Yields steps to blocks of the same shape on other devices: within a dimension, across, or by other axes."""
        local = 1.0 / shards(spec, self.axis_sizes)
        before = _strides(spec, self.axis_sizes)
        for other in _of_parts(parts_of(spec, self.axis_sizes), self._axes, self.axis_sizes):
            if other != spec:
                after = _strides(other, self.axis_sizes)
                moved_axes = [a for a in self._axes if before.get(a) != after.get(a)]
                yield ReshardStep("collective_permute", max(moved_axes, key=self._slowness.__getitem__), local, other)


_Step = tuple[ReshardStep, float, tuple[int, ...]]
"""A step, its seconds for an array of `REFERENCE_BYTES`, and the parts that it leaves each dimension in."""
_Tree = dict[IndexedSpec, tuple[IndexedSpec, ReshardStep, tuple[Line, ...]]]
"""For each spec that can be reached the spec before it, the step, and the lines of the whole path."""
_START = (None, None, FREE)
_UNKNOWN = (float("inf"), 0)


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

"""From one sharding of an array to another by the cheapest steps that each are one collective.

A reshard over several axes at once ends in XLA's replicate-then-slice fallback, so it is taken apart here, and the same
steps are what is priced and what runs. A spec is, for each dimension, the mesh axes (by index) that split it, major to
minor. With links as data no order of gathers, exchanges and slices is best for all of them, so the steps are a shortest
path over specs; equal cases up to the order of dimensions share one search, a few hundred for any model.
"""

from collections.abc import Hashable
from math import lcm
from typing import Any

from cost.lines import FREE, Line
from search_spaces.partition_specs import IndexedSpec
from search_spaces.sharding.base import Rates, ReshardStep
from search_spaces.sharding.reshard_trees import Steps, Tree
from search_spaces.sharding.spec import parts_of


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
        most = map(lcm, parts_of(source, self.axis_sizes), parts_of(target, self.axis_sizes))
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

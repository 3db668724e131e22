"""From one sharding of an array to another by the cheapest steps that each are one collective.

A reshard over several axes at once ends in XLA's replicate-then-slice fallback, so it is taken apart here, and the same
steps are what is priced and what runs. A spec is, for each dimension, the mesh axes (by index) that split it, major to
minor. With links as data no order of gathers, exchanges and slices is best for all of them, so the steps are a shortest
path over specs; equal cases up to the order of dimensions share one search, a few hundred for any model.

An operand that reaches a product in fewer bits is rounded before it is moved or after, whichever takes less time.
Rounding an array and then gathering the codes gives the same numbers as gathering it and then rounding, where one
scale is that of the whole array either way. Operands with scales for rows or blocks are rounded after they are moved.
Codes have one byte for each element, a quarter of float32's; but the
largest magnitude of an array is a maximum over the mesh axes that split it, and before a gather these are more. A
maximum before a gather runs when the gather does, so that the step waits for the same share of it; one after it is
waited for.
"""

from collections.abc import Hashable
from math import lcm, prod
from typing import Any, NamedTuple

from cost.lines import FREE, Line
from search_spaces.partition_specs import IndexedSpec
from search_spaces.sharding.base import Layout, Rates, ReshardStep
from search_spaces.sharding.graph import Value, Vertex
from search_spaces.sharding.product_formats import FORMATS, ProductFormat, contracted
from search_spaces.sharding.reshard_trees import Steps, Tree
from search_spaces.sharding.spec import axes_in, divides, parts_of


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


MAXIMUM_BYTES = 4.0
"""Bytes of a largest magnitude, which is float32."""


class Message(NamedTuple):
    """An operand on its way to a reader.

    Attributes:
      is_coded: whether it is rounded before it is moved.
      num_bytes: of the whole array as it is moved.
      maxima: mesh axes over which its largest magnitudes are found.
      rounded: the spec in which it is rounded; None if it is not, or if that was done for several readers.
    """

    is_coded: bool
    num_bytes: float
    maxima: tuple[int, ...]
    maxima_bytes: float = MAXIMUM_BYTES
    rounded: IndexedSpec | None = None


def message_of(
    path: Paths,
    value: Value,
    source: IndexedSpec,
    target: IndexedSpec,
    reader: Vertex | None = None,
    position: int = 0,
    name: str = "",
    is_shared: bool = False,
) -> Message:
    """Returns how a value goes from one spec to the one in which an operation reads it.

    Args:
      path: the steps between specs, with their seconds.
      source: the spec in which it is there.
      target: the spec in which the operation reads it.
      reader: the operation, where it is a product in a format.
      name: of the format; "" for none.
      is_shared: whether it is rounded to the format for several readers where it is.
    """
    if not name:
        return Message(False, float(value.num_bytes), ())
    to = FORMATS[name]
    if to.scaled != "tensor":
        assert reader is not None
        return Message(False, float(value.num_bytes), *maxima_of(path.axis_sizes, reader, position, target, to), target)
    key = value.shape, value.dtype.itemsize, source, target, to.is_delayed
    if key not in path.messages:
        path.messages[key] = _faster_message(path, value, source, target, to.is_delayed)
    message = path.messages[key]
    has_codes = is_shared and message.rounded == source
    return message._replace(maxima=(), rounded=None) if has_codes else message


def _faster_message(path: Paths, value: Value, source: IndexedSpec, target: IndexedSpec, is_delayed: bool) -> Message:
    own = float(value.num_bytes)
    before, after = (() if is_delayed else tuple(sorted(axes_in(spec))) for spec in (source, target))
    coded = Message(True, own / value.dtype.itemsize, before, rounded=source)
    exact = Message(False, own, after, rounded=target)
    is_even = all(divides(spec, value.shape, path.axis_sizes) for spec in (source, target))  # padding has no maximum
    if source == target or not is_even:
        return exact
    steps = path(source, target)
    return min(coded, exact, key=lambda message: _seconds(path, steps, message))


def shared_message(spec: IndexedSpec, name: str) -> Message:
    """Returns how a value that has a spec is rounded there to a format for several readers."""
    return Message(True, 0.0, () if FORMATS[name].is_delayed else tuple(sorted(axes_in(spec))), rounded=spec)


def is_message_coded(path: Any, layout: Layout, vertex: Vertex, position: int) -> bool:
    """Returns whether an operand of a vertex is rounded before it is moved to it; `path` is a `Paths` if any is."""
    strategy, operand = layout.strategies[vertex.index], vertex.operands[position]
    if not strategy.format or not isinstance(operand, Value):
        return False
    specs = layout.value_specs[operand.id], strategy.operands[position]
    return message_of(path, operand, *specs, vertex, position, strategy.format).is_coded


def maxima_of(
    axis_sizes: tuple[int, ...], reader: Vertex, position: int, spec: IndexedSpec, to: ProductFormat
) -> tuple[tuple[int, ...], float]:
    """Returns the mesh axes over which an operand's largest magnitudes are found, and their bytes on one device."""
    value, axes = reader.operands[position], to.maxima(reader, position, spec)
    assert isinstance(value, Value)
    if to.scaled == "tensor" or not axes:
        return axes, MAXIMUM_BYTES
    free = [d for d in range(len(value.shape)) if d not in contracted(reader, position)]
    parts = prod(axis_sizes[axis] for d in free for axis in spec[d])
    return axes, MAXIMUM_BYTES * prod(value.shape[d] for d in free) / parts


def maximum_step(axis: int) -> ReshardStep:
    """Returns the collective that finds largest magnitudes along a mesh axis; `MAXIMUM_BYTES` for each of them."""
    return ReshardStep("all_reduce", axis, 1.0, ())


def _seconds(path: Paths, steps: tuple[ReshardStep, ...], message: Message) -> float:
    moved_s = sum(path.step_s(step, message.num_bytes) for step in steps if step.kind != "slice")
    return moved_s + sum(path.step_s(maximum_step(axis), MAXIMUM_BYTES) for axis in message.maxima)

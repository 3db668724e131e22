"""How an operand reaches a product in fewer bits: rounded before it is moved or after, whichever takes less time.

Rounding an array and then gathering the codes gives the same numbers as gathering it and then rounding, where one
scale is that of the whole array either way. Operands with scales for rows or blocks are rounded after they are moved.
Codes have one byte for each element, a quarter of float32's; but the
largest magnitude of an array is a maximum over the mesh axes that split it, and before a gather these are more. A
maximum before a gather runs when the gather does, so that the step waits for the same share of it; one after it is
waited for.
"""

from math import prod
from typing import Any, NamedTuple

from search_spaces.partition_specs import IndexedSpec
from search_spaces.sharding.base import Layout, ReshardStep
from search_spaces.sharding.graph import Value, Vertex
from search_spaces.sharding.product_formats import FORMATS, ProductFormat, contracted
from search_spaces.sharding.resharding import Paths
from search_spaces.sharding.spec import axes_in, divides

MAXIMUM_BYTES = 4.0
"""Bytes of a largest magnitude, which is float32."""


class Message(NamedTuple):
    """An operand on its way to a reader.

    Attributes:
      is_coded: whether it is rounded before it is moved.
      num_bytes: of the whole array as it is moved.
      maxima: mesh axes over which its largest magnitudes are found.
      maxima_bytes: of these magnitudes on one device.
    """

    is_coded: bool
    num_bytes: float
    maxima: tuple[int, ...]
    maxima_bytes: float = MAXIMUM_BYTES


def message_of(
    path: Paths,
    value: Value,
    source: IndexedSpec,
    target: IndexedSpec,
    reader: Vertex | None = None,
    position: int = 0,
    name: str = "",
) -> Message:
    """Returns how a value goes from one spec to the one in which an operation reads it.

    Args:
      path: the steps between specs, with their seconds.
      value: the array.
      source: the spec in which it is there.
      target: the spec in which the operation reads it.
      reader: the operation, where it is a product in a format.
      position: of the value among its operands.
      name: of the format; "" for none.
    """
    if not name:
        return Message(False, float(value.num_bytes), ())
    to = FORMATS[name]
    if to.scaled != "tensor":
        assert reader is not None
        return Message(False, float(value.num_bytes), *maxima_of(path.axis_sizes, reader, position, target, to))
    key = value.shape, value.dtype.itemsize, source, target
    if key not in path.messages:
        path.messages[key] = _faster_message(path, value, source, target)
    return path.messages[key]


def _faster_message(path: Paths, value: Value, source: IndexedSpec, target: IndexedSpec) -> Message:
    own = float(value.num_bytes)
    coded = Message(True, own / value.dtype.itemsize, tuple(sorted(axes_in(source))))
    exact = Message(False, own, tuple(sorted(axes_in(target))))
    is_even = all(divides(spec, value.shape, path.axis_sizes) for spec in (source, target))  # padding has no maximum
    if source == target or not is_even:
        return exact
    steps = path(source, target)
    return min(coded, exact, key=lambda message: _seconds(path, steps, message))


def is_message_coded(path: Any, layout: Layout, vertex: Vertex, position: int) -> bool:
    """Tells whether an operand of a vertex is rounded before it is moved to it; `path` is a `Paths` if any is."""
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

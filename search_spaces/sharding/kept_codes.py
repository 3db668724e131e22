"""Arrays that the backward pass reads, kept as codes until then: a third way beside keeping them and computing again.

What a forward pass leaves to the backward pass is most of a training step's memory. As codes of 8 bits it takes half or
a quarter. The forward pass reads the array itself, which is free after its last forward reader. What reads it later
decodes it. What a loop stacks for another one is encoded and decoded trip by trip. A value that is computed inside its
readers (`fusion.py`) is in memory only through its operands, so that later readers compute it again of decoded ones.
"""

from collections.abc import Collection, Mapping
from functools import cached_property
from typing import NamedTuple

from search_spaces.sharding.codes import is_narrower
from search_spaces.sharding.graph import Graph, Value, Vertex
from search_spaces.sharding.memory import Lifetimes, Residual


class LateReads(NamedTuple):
    """The reads of a program from its forward pass when that is over.

    Attributes:
      kept: ids of values that they read as codes, with the format.
      again: ids of values that they compute again, because they depend on those.
    """

    vertices: frozenset[int] = frozenset()
    kept: Mapping[int, str] = {}
    again: frozenset[int] = frozenset()


class Residuals:
    """The arrays of a step that can be kept as codes."""

    def __init__(self, graph: Graph, lifetimes: Lifetimes, shared: Collection[int]):
        self.graph, self.lifetimes, self.shared = graph, lifetimes, shared

    @cached_property
    def end(self) -> int:
        """The position of the first operation that JAX made for the backward pass."""
        positions = (v.position for v in self.graph.operations() if _is_late(v))
        return min(positions, default=self.graph.length)

    @cached_property
    def late(self) -> frozenset[int]:
        """The indices of the operations after the forward pass."""
        return frozenset(vertex.index for vertex in self.graph.operations() if vertex.position >= self.end)

    @cached_property
    def of_value(self) -> dict[int, Residual]:
        """The arrays by the id of their value, in program order."""
        found = {}
        for vertex in self.graph.vertices:
            residual = None
            if vertex.kind == "operation" and vertex.position < self.end and len(vertex.results) == 1:
                residual = self._residual(vertex.results[0])
            elif vertex.kind == "stack":
                residual = self._stacked(vertex.results[0])
            if residual is not None:
                found[residual.value.id] = residual
        return found

    def _stacked(self, value: Value) -> Residual | None:
        """Returns the stack that a loop of the forward pass leaves for one of the backward pass, a part for each trip.

        Both loops have the numbers of one trip at a time, so that only codes are in memory between them.
        """
        readers = self.graph.consumers()[value.id]
        is_left = value.made_at < self.end and value.last_read_at < self.graph.length and len(value.shape) > 1
        if not is_left or not self.lifetimes.is_written[value.id] or value.is_on_host:
            return None
        if len(readers) != 1 or readers[0][0].kind != "slice" or not is_narrower("int8", value.dtype):
            return None
        first = readers[0][0].position
        return Residual(value, value.made_at, first) if first >= self.end else None

    def _residual(self, value: Value) -> Residual | None:
        if not self.lifetimes.is_written[value.id] or value.id not in self.shared or value.is_on_host:
            return None
        if not is_narrower("int8", value.dtype):
            return None
        positions = self._positions(value)
        if positions is None or max(positions, default=-1) < self.end:
            return None
        forward = [position for position in positions if position < self.end]
        return Residual(value, max(forward, default=value.made_at), min(p for p in positions if p >= self.end))

    def _positions(self, value: Value) -> list[int] | None:
        """Returns where a value is read, by itself or through what is computed inside its readers.

        None if anything but an operation reads it, as a loop does, or if it is a result of the function.
        """
        positions, values = [], [value]
        while values:
            value = values.pop()
            if value.last_read_at >= self.graph.length:
                return None
            for reader, _ in self.graph.consumers()[value.id]:
                if reader.kind != "operation":
                    return None
                if reader.position < self.end and self._is_again(reader):
                    values.append(reader.results[0])
                positions.append(reader.position)
        return positions

    def _is_again(self, vertex: Vertex) -> bool:
        """Returns whether an operation of the forward pass is computed inside its readers."""
        return len(vertex.results) == 1 and not self.lifetimes.is_written[vertex.results[0].id]

    def late_reads(self, kept: Mapping[int, str]) -> LateReads:
        """Returns the late reads if some of the values, by their ids, are kept as codes in formats."""
        if not kept:
            return LateReads()
        changed = set(kept)
        for vertex in self.graph.operations():
            if vertex.position < self.end and self._is_again(vertex) and _reads(vertex, changed):
                changed.add(vertex.results[0].id)
        return LateReads(self.late, dict(kept), frozenset(changed - set(kept)))


def _reads(vertex: Vertex, ids: set[int]) -> bool:
    return any(isinstance(operand, Value) and operand.id in ids for operand in vertex.operands)


def _is_late(vertex: Vertex) -> bool:
    return "transpose(" in vertex.scope or "rematted_computation" in vertex.scope

"""A function as a graph: the equations of its jaxpr, flat for the search and nested as they run for the execution.

Loops, branches and rematerialised regions stay regions when the function runs, while their equations are vertices like
any other for the search. `tracing.py` makes one.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from jax.extend import core, source_info_util

REMAT = ("remat2", "checkpoint", "remat")
Kind = Literal["input", "constant", "operation", "carry", "slice", "stack", "join"]


@dataclass(eq=False)
class Value:
    """An array that flows between vertices: result `result` of vertex `vertex`.

    Attributes:
      born: position of the operation that makes it, -1 for inputs.
      dies: position of the last operation that reads it; the length of the program for outputs.
    """

    id: int
    shape: tuple[int, ...]
    dtype: Any
    vertex: int
    result: int
    born: int
    dies: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole array."""
        size = 1
        for n in self.shape:
            size *= n
        return size * (self.dtype.itemsize if hasattr(self.dtype, "itemsize") else 4)


Operand = Value | core.Literal


@dataclass(eq=False)
class Vertex:
    """A place where a strategy is chosen.

    Attributes:
      kind: "operation" for an equation; "input" and "constant" for arrays that come in; "carry", "slice", "stack"
        for what a loop carries, reads and writes at each trip; "join" for the result of a branch.
      equation: the jaxpr's equation of an operation, else the region's equation or None.
      operands: values and literals read; `operand_weight` is how often a step moves each one.
      results: values made.
      weight: executions in one call of the function (the product of the trip counts around it).
      position: place in program order.
    """

    index: int
    kind: Kind
    equation: core.JaxprEqn | None
    operands: list[Operand]
    operand_weight: list[float]
    results: list[Value]
    weight: float
    position: int
    name: str = ""

    @property
    def primitive(self) -> str:
        """The name of an operation's primitive; empty for every other vertex."""
        return self.equation.primitive.name if self.kind == "operation" and self.equation is not None else ""

    @property
    def source(self) -> str:
        """File and line of the user's code that the operation comes from."""
        return "" if self.equation is None else source_info_util.summarize(self.equation.source_info)

    @property
    def scope(self) -> str:
        """The name stack of the operation: modules and transformations."""
        return "" if self.equation is None else str(self.equation.source_info.name_stack)


@dataclass(eq=False)
class Region:
    """An equation that runs blocks: a scan, a while loop, a branch, a rematerialised region.

    Attributes:
      equation: the equation as traced.
      operands: what it reads, in the equation's order.
      blocks: scan and remat (body,), while (condition, body), cond one for each branch.
      results: the values outside that its outvars are.
      carries: for loops, the carry vertices in order.
      slices: for scans, the vertices of what each trip reads of the stacked operands.
    """

    equation: core.JaxprEqn
    operands: list[Operand]
    blocks: list["Block"]
    results: list[Value]
    carries: list[Vertex] = field(default_factory=list)
    slices: list[Vertex] = field(default_factory=list)


@dataclass(eq=False)
class Block:
    """Steps that run in order: `inputs` are bound when it is entered, other values come from the blocks around it."""

    inputs: list[Value]
    steps: list[Vertex | Region]
    outputs: list[Operand]


@dataclass(eq=False)
class Graph:
    """A traced function.

    Attributes:
      vertices: all places of choice, in program order of their creation.
      values: all arrays.
      inputs: one vertex for each flat argument.
      constants: vertices of captured arrays, with their arrays in `constant_arrays`.
      block: the program as it runs.
      outputs: the flat results.
      feedback: for each flat result the index of the flat argument that it replaces in the next call, or None.
      length: number of positions in program order.
      notes: what a user should know about the trace (loops of unknown length, say).
    """

    vertices: list[Vertex]
    values: list[Value]
    inputs: list[Vertex]
    constants: list[Vertex]
    constant_arrays: list[Any]
    block: Block
    outputs: list[Operand]
    feedback: list[int | None]
    length: int
    notes: list[str]

    def operations(self) -> Iterator[Vertex]:
        """Vertices that are equations."""
        return (v for v in self.vertices if v.kind == "operation")

    def consumers(self) -> list[list[tuple[Vertex, int]]]:
        """For each value, by id, the (vertex, operand index) pairs that read it."""
        found: list[list[tuple[Vertex, int]]] = [[] for _ in self.values]
        for vertex in self.vertices:
            for i, operand in enumerate(vertex.operands):
                if isinstance(operand, Value):
                    found[operand.id].append((vertex, i))
        return found

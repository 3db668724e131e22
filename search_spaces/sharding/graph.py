"""The traced function as a graph: the vocabulary that `tracing.py` makes and everything else reads.

The equations of a jaxpr are flat for the search and nested as they run for the execution. When the function runs,
loops, branches and rematerialised regions stay regions; for the search their equations are vertices.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
from jax.extend import core, source_info_util

from cost.compute import CONTRACTIONS
from search_spaces.replay import user_source

Kind = Literal["input", "constant", "operation", "carry", "slice", "stack", "join"]


@dataclass(eq=False)
class Value:
    """An array that flows between vertices: result `result` of vertex `vertex`.

    Attributes:
      id: its index in `Graph.values`.
      shape, dtype: of the whole array; tokens have the dtype None.
      vertex: the index of the vertex that makes it.
      result: its index among the results of that vertex.
      made_at: position of the operation that makes it, -1 for inputs.
      last_read_at: position of the last operation that reads it; the length of the program for outputs.
      is_on_host: whether it is in the host's memory; it then takes none of the device's.
    """

    id: int
    shape: tuple[int, ...]
    dtype: Any
    vertex: int
    result: int
    made_at: int
    last_read_at: int
    is_on_host: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole array."""
        size = 1
        for n in self.shape:
            size *= n
        return size * (4 if self.dtype is None else self.dtype.itemsize)


Operand = Value | core.Literal


def rank_of(operand: Operand) -> int:
    """Returns the number of dimensions of a value or literal."""
    return len(operand.shape) if isinstance(operand, Value) else np.ndim(operand.val)


def values_of(operands: Iterable[Operand]) -> list[Value]:
    """Returns those of some operands that are values; the others are literals."""
    return [operand for operand in operands if isinstance(operand, Value)]


@dataclass(eq=False)
class Vertex:
    """An equation, an argument or an array at the border of a loop: what a strategy is chosen for.

    Attributes:
      index: its index in `Graph.vertices`.
      kind: "operation" for an equation; "input" and "constant" for arrays that come in; "carry", "slice", "stack"
        for what a loop carries, reads and writes at each trip; "join" for the result of a branch.
      equation: the jaxpr's equation of an operation, else the region's equation or None.
      operand_weight: for each operand, how often a step moves it.
      weight: executions in one call of the function (the product of the trip counts around it).
      position: its index in program order.
      name: the path of an argument, the number of a constant; empty for all others.
      scope: its name stack of modules and transformations, with those of the equations whose bodies it is in before it.
      callers: the equations whose bodies it is in, the outermost first.
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
    scope: str = ""
    callers: tuple[core.JaxprEqn, ...] = ()

    @property
    def primitive(self) -> str:
        """The name of an operation's primitive; empty for every other vertex."""
        return self.equation.primitive.name if self.kind == "operation" and self.equation is not None else ""

    @property
    def params(self) -> Mapping[str, Any]:
        """The parameters of its equation; empty for arguments and constants."""
        return {} if self.equation is None else self.equation.params

    @property
    def reduction_weight(self) -> float:
        """How often a step runs the collectives of the strategy: those of a loop's carry run in every trip."""
        return self.operand_weight[-1] if self.kind == "carry" else self.weight

    @property
    def source(self) -> str:
        """File and line of the user's code that the operation comes from."""
        return "" if self.equation is None else source_info_util.summarize(self.equation.source_info)

    @property
    def user_source(self) -> str:
        """File, line and function of the user's code that the operation comes from, as `replay.user_source` says."""
        return "" if self.equation is None else user_source(self.equation, self.callers)


def trips_of(vertex: Vertex) -> tuple[int, ...]:
    """Returns the lengths of the loops around an operation, the outermost first."""
    return tuple(caller.params["length"] for caller in vertex.callers if caller.primitive.name == "scan")


@dataclass(eq=False)
class Region:
    """An equation that runs blocks: a scan, a while loop, a branch, a rematerialised region.

    Attributes:
      operands: what it reads, in the equation's order.
      blocks: scan and remat (body,), while (condition, body), cond one for each branch.
      results: the values outside that its outvars are.
      carries: for loops, the carry vertices in order.
      slices: for scans, the vertices of what each trip reads of the stacked operands.
      ends_by_example: for while loops, whether they were traced under `vmap` with a condition for each example: those
        whose own condition does not hold stay as they are, however long the loop goes on for the others.
    """

    equation: core.JaxprEqn
    operands: list[Operand]
    blocks: list["Block"]
    results: list[Value]
    carries: list[Vertex] = field(default_factory=list)
    slices: list[Vertex] = field(default_factory=list)
    ends_by_example: bool = False


@dataclass(eq=False)
class Block:
    """Steps that run in order: `inputs` are bound when it is entered, other values come from the blocks around it."""

    inputs: list[Value]
    steps: list[Vertex | Region]
    outputs: list[Operand]


Step = Vertex | Region


def operations_in(steps: Sequence[Step]) -> Iterator[Vertex]:
    """Yields the operations among some steps and in the blocks of regions among them, in program order."""
    for step in steps:
        if isinstance(step, Region):
            for block in step.blocks:
                yield from operations_in(block.steps)
        else:
            yield step


@dataclass(eq=False)
class Graph:
    """A traced function.

    Attributes:
      vertices: all that strategies are chosen for, in the order in which tracing meets them.
      constants: vertices of captured arrays, with their arrays in `constant_arrays`.
      feedback: for each flat result the index of the flat argument that it replaces in the next call, or None.
      notes: what a user should know about the trace (loops of unknown length, say).
      stored_until: values, by id, that go from one program to another, and so are in memory whoever reads them, with
        the position of the operation up to which they are.
      reduced_until: products, by the id of their value, whose reduction waits for others, with the position of the
        operation up to which it does.
      stored_parts: arguments, by the id of their value, that somebody else stores, with the number of equal parts on
        different devices, whatever layout is chosen for those who read them.
      copied_until: arguments, by the id of their value, whose gathered copies are made before the program, with the
        position of the operation up to which these are in memory.
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
    stored_until: dict[int, int] = field(default_factory=dict)
    reduced_until: dict[int, int] = field(default_factory=dict)
    stored_parts: dict[int, int] = field(default_factory=dict)
    copied_until: dict[int, int] = field(default_factory=dict)

    def operations(self) -> Iterator[Vertex]:
        """Returns the vertices that are equations."""
        return (v for v in self.vertices if v.kind == "operation")

    def consumers(self) -> list[list[tuple[Vertex, int]]]:
        """Returns for each value, by id, the (vertex, operand index) pairs that read it; not to be changed."""
        return self._consumers

    @cached_property
    def _following(self) -> dict[frozenset[int], np.ndarray]:
        return {}  # what `follows_contraction` found, by its carries

    @cached_property
    def _consumers(self) -> list[list[tuple[Vertex, int]]]:
        readers: list[list[tuple[Vertex, int]]] = [[] for _ in self.values]
        for vertex in self.vertices:
            for i, operand in enumerate(vertex.operands):
                if isinstance(operand, Value):
                    readers[operand.id].append((vertex, i))
        return readers


def copies_over_host_link(vertex: Vertex) -> bool:
    """Returns whether an operation copies an array from the device's memory to the host's, or back."""
    if vertex.primitive != "device_put":
        return False
    pairs = zip(vertex.operands, vertex.results, strict=True)
    return any(isinstance(o, Value) and o.is_on_host != result.is_on_host for o, result in pairs)


def is_contraction(vertex: Vertex) -> bool:
    """Returns whether a vertex is a product of matrices or a convolution."""
    return vertex.primitive in CONTRACTIONS


def follows_contraction(graph: Graph, carried: Collection[int] = ()) -> np.ndarray:
    """Returns for each vertex whether it is a contraction or depends on one, `[vertices]`, not to be changed.

    Args:
      carried: indices of carries that also depend on what the trip before has made.
    """
    known = graph._following  # it is asked for several times
    if (key := frozenset(carried)) in known:
        return known[key]
    follows, count = np.zeros(len(graph.vertices), bool), -1
    while count < (count := int(follows.sum())):  # what a carry depends on comes after it
        for vertex in graph.vertices:
            is_closed = vertex.kind == "carry" and vertex.index not in carried
            operands = vertex.operands[:1] if is_closed else vertex.operands
            follows[vertex.index] |= is_contraction(vertex) or any(follows[v.vertex] for v in values_of(operands))
    return known.setdefault(key, follows)


def leads_to_contraction(graph: Graph, carried: Collection[int] = ()) -> np.ndarray:
    """Returns for each vertex whether a contraction depends on it, `[vertices]`.

    Args:
      carried: indices of carries on which a contraction of the next trip depends.
    """
    consumers = graph.consumers()
    leads = np.zeros(len(graph.vertices), bool)
    leads[list(carried)] = True
    for vertex in reversed(graph.vertices):
        for value in vertex.results:
            for reader, _ in consumers[value.id]:
                leads[vertex.index] |= is_contraction(reader) or leads[reader.index]
    return leads


MOST_BYTES = 2**63
"""An array has less bytes than this: as many as 64-bit addresses reach."""
MOST_RUNS = 1e18
"""An operation runs less often than this in one call: more take 30 years at a nanosecond each, whatever they do."""


def check_sizes(graph: Graph) -> None:
    """Checks that a traced function could run at all."""
    for value in graph.values:
        if value.num_bytes >= MOST_BYTES:
            raise ValueError(
                f"{_named(graph.vertices[value.vertex])} has the shape {value.shape} and so at least 2^63 bytes, which "
                "no memory holds. Check the shapes of the arguments."
            )
    vertex = max(graph.vertices, key=lambda vertex: vertex.weight, default=None)
    if vertex is not None and vertex.weight >= MOST_RUNS:
        raise ValueError(
            f"{_named(vertex)} runs {vertex.weight:.0e} times in one call, because of the loops that it is in. "
            "Check their lengths."
        )


def _named(vertex: Vertex) -> str:
    """Returns the name of an array or an operation for a user."""
    return f"`{vertex.name}`" if vertex.name else f"{vertex.primitive or vertex.kind} ({vertex.user_source})"

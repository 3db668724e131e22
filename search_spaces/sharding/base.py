"""The vocabulary of the sharding space: specs, the traced function as a graph, strategies, layouts.

Everything here is data. `tracing.py` makes a `Graph`, `shardy.py` makes `Rule`s, `candidates.py` makes `Node`s, and
`space.py` turns a choice into a `Layout`.

Letters for sizes: A mesh axes, F factors of a rule, V nodes (the vertices of the graph, then the hubs), S_v strategies
of node v.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from jax.extend import core, source_info_util

from cost.base import CollectiveKind

# Specs: how an array is split over the mesh.

Spec = tuple[tuple[int, ...], ...]
"""For each dimension of an array the mesh axes, by index, that split it, major to minor."""
Given = Sequence[tuple[int, ...] | None]
"""A spec that must be kept: for each dimension the axes that split it, or None where it is free."""


class Axes(NamedTuple):
    """What strategies need to know of a mesh's axes, which are numbered as in the mesh.

    Attributes:
      sizes: `[A]` devices along each.
      fast_first: `[A]` all axes, the one with the fastest link first.
      alike: groups of axes that take kinds of dimensions in order (see `dimensions.axes_of`), so that of the copies of
        a plan with such axes swapped only one is in the space.
    """

    sizes: tuple[int, ...]
    fast_first: tuple[int, ...]
    alike: tuple[tuple[int, ...], ...] = ()


class ReshardStep(NamedTuple):
    """A single collective on the way from one spec of an array to another.

    Attributes:
      kind: "slice" (free), "all_to_all", "all_gather", "collective_permute", "all_reduce" or "reduce_scatter".
      axis: the mesh axis; for a permute the slowest of those that change places.
      fraction: the size of the collective along its axis in one group of devices (see `cost.collectives`), as a
        fraction of the whole array's bytes.
      spec: the sharding after the step.
    """

    kind: CollectiveKind | Literal["slice"]
    axis: int
    fraction: float
    spec: Spec


class Rates(NamedTuple):
    """What a collective costs on one mesh axis, by kind: seconds of one, and seconds for each byte of its size."""

    latency_s: Mapping[str, float]
    s_per_byte: Mapping[str, float]


# The graph: the equations of a jaxpr, flat for the search and nested as they run for the execution. When the function
# runs, loops, branches and rematerialised regions stay regions; for the search their equations are vertices.

CONTRACTIONS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})
"""Products of matrices and convolutions: the operations that a step spends its arithmetic on."""
Kind = Literal["input", "constant", "operation", "carry", "slice", "stack", "join"]


@dataclass(eq=False)
class Value:
    """An array that flows between vertices: result `result` of vertex `vertex`.

    Attributes:
      id: its index in `Graph.values`.
      shape, dtype: of the whole array; tokens have the dtype None.
      vertex: the index of the vertex that makes it.
      result: its place among the results of that vertex.
      made_at: position of the operation that makes it, -1 for inputs.
      last_read_at: position of the last operation that reads it; the length of the program for outputs.
    """

    id: int
    shape: tuple[int, ...]
    dtype: Any
    vertex: int
    result: int
    made_at: int
    last_read_at: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole array."""
        size = 1
        for n in self.shape:
            size *= n
        return size * (4 if self.dtype is None else self.dtype.itemsize)


Operand = Value | core.Literal


@dataclass(eq=False)
class Vertex:
    """A place where a strategy is chosen.

    Attributes:
      index: its index in `Graph.vertices`.
      kind: "operation" for an equation; "input" and "constant" for arrays that come in; "carry", "slice", "stack"
        for what a loop carries, reads and writes at each trip; "join" for the result of a branch.
      equation: the jaxpr's equation of an operation, else the region's equation or None.
      operands: values and literals that it reads.
      operand_weight: for each operand, how often a step moves it.
      results: values that it makes.
      weight: executions in one call of the function (the product of the trip counts around it).
      position: its place in program order.
      name: the path of an argument, the number of a constant; empty for all others.
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
    def reduction_weight(self) -> float:
        """How often a step runs the collectives of the strategy: those of a loop's carry run in every trip."""
        return self.operand_weight[-1] if self.kind == "carry" else self.weight

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
        """Returns for each value, by id, the (vertex, operand index) pairs that read it."""
        readers: list[list[tuple[Vertex, int]]] = [[] for _ in self.values]
        for vertex in self.vertices:
            for i, operand in enumerate(vertex.operands):
                if isinstance(operand, Value):
                    readers[operand.id].append((vertex, i))
        return readers


# Strategies: how an operation may be split.

Dimensions = tuple[tuple[int, ...], ...]
"""For each dimension of an array its factors, major to minor."""


@dataclass(frozen=True)
class Rule:
    """How an operation's dimensions relate (Shardy's OpShardingRule).

    A dimension lists its factors, major to minor. Dimensions that share a factor are sharded alike. In a dimension of
    several factors (reshape) a minor factor may be sharded only where every factor before it is fully sharded. The size
    of a dimension is the product of its factors' sizes, except where an operation slices, pads or concatenates: its one
    factor then has the largest size, and divisibility is to be judged by each dimension's own size.

    Attributes:
      operands: for each operand (literals and scalars included), for each dimension, its factors.
      results: the same for each result.
      sizes: `[F]`, the size of each factor.
      reduction: factors whose sharding leaves partial results (on all results that lack the factor).
      need_replication: factors that must not be sharded.
      permutation: factors whose sharding moves data between neighbours (slice, pad, spatial convolution).
      blocked_propagation: factors along which Shardy does not propagate shardings.
      reduction_is_sum: whether the reduction adds, so that partial results may be reduce-scattered.
    """

    operands: tuple[Dimensions, ...]
    results: tuple[Dimensions, ...]
    sizes: tuple[int, ...]
    reduction: frozenset[int] = frozenset()
    need_replication: frozenset[int] = frozenset()
    permutation: frozenset[int] = frozenset()
    blocked_propagation: frozenset[int] = frozenset()
    reduction_is_sum: bool = False


class ShardingStrategy(NamedTuple):
    """One way to run an operation.

    Attributes:
      operands: the spec that each operand must have.
      results: the spec of each result after its reduction.
      parts: how many devices share the arithmetic.
      reductions: for each result the collectives that finish its partial sums; of an array that is stored one way and
        gathered for its readers, the gathers.
      unreduced: the specs of the results before those collectives.
    """

    operands: tuple[Spec, ...]
    results: tuple[Spec, ...]
    parts: int
    reductions: tuple[tuple[ReshardStep, ...], ...]
    unreduced: tuple[Spec, ...]


class Node(NamedTuple):
    """A node of the problem: a vertex of the graph, or the hub of a value that several operations read.

    Attributes:
      vertex: the vertex; for a hub the one that makes the value.
      hub: the value, or None.
      strategies: `[S_v]` what can be chosen.
    """

    vertex: Vertex
    hub: Value | None
    strategies: tuple[ShardingStrategy, ...]


class Edge(NamedTuple):
    """A value on its way from the node that makes it to one that reads it.

    The reader of a value with a hub is the hub (operand 0), from which its own readers follow.

    Attributes:
      node, result: the producing node and which of its results the value is.
      reader, operand: the reading node and which of its operands the value is.
      value: the array.
      weight: how often a step moves it.
    """

    node: int
    result: int
    reader: int
    operand: int
    value: Value
    weight: float


class Layout(NamedTuple):
    """A decoded choice: how every value is laid out over the mesh.

    Attributes:
      strategies: for each vertex the strategy that it runs.
      value_specs: for each value, by id, the spec in which its readers receive it; `()` for values without dimensions.
      input_specs: for each flat argument, how it comes in.
      output_specs: for each flat result, how it goes out: as the argument that it replaces, else as it is made.
    """

    strategies: tuple[ShardingStrategy, ...]
    value_specs: tuple[Spec, ...]
    input_specs: tuple[Spec, ...]
    output_specs: tuple[Spec, ...]

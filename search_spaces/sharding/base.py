"""The vocabulary of the sharding space: given specs, reshards, rules, strategies, layouts.

Everything here is data. `graph.py` has the vocabulary of a traced function, and `tracing.py` makes its `Graph`;
`shardy.py` makes `Rule`s, `nodes.py` makes `Node`s, and `space.py` turns a choice into a `Layout`.

Letters for sizes: A mesh axes, F factors of a rule, V nodes (the vertices of the graph, then the shared reshards), S_v
strategies of node v.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from cost.base import CollectiveKind
from cost.lines import Line
from search_spaces.partition_specs import IndexedSpec
from search_spaces.sharding.graph import Value, Vertex

GivenSpec = Sequence[tuple[int, ...] | None]
"""A spec that must be kept: for each dimension the axes that split it, or None where it is free."""


class Axes(NamedTuple):
    """The axes of a mesh, numbered as in the mesh, as strategies need to know them.

    Attributes:
      sizes: `[A]` devices along each.
      fast_first: `[A]` all axes, the one with the fastest link first.
      interchangeable: groups of axes that take kinds of dimensions in order (see `strategies.interchangeable_axes`), so
        that of the copies of a plan with such axes swapped only one is in the space.
    """

    sizes: tuple[int, ...]
    fast_first: tuple[int, ...]
    interchangeable: tuple[tuple[int, ...], ...] = ()


class ReshardStep(NamedTuple):
    """A single collective on the way from one spec of an array to another.

    Attributes:
      kind: "slice" (free), "all_to_all", "all_gather", "collective_permute", "all_reduce" or "reduce_scatter".
      axis: the mesh axis; for a permute the slowest of those that change places.
      fraction: the size of the collective along its axis in one group of devices (see `cost.collectives`), as a
        fraction of the whole array's bytes.
    """

    kind: CollectiveKind | Literal["slice"]
    axis: int
    fraction: float
    spec: IndexedSpec


class Rates(NamedTuple):
    """The seconds of collectives on one mesh axis: by kind, lines over the bytes of its size.

    Attributes:
      lines: of each kind, those that are the fastest at some size, from the smallest to the largest.
    """

    lines: Mapping[CollectiveKind, tuple[Line, ...]]

    def latency_s(self, kind: CollectiveKind) -> float:
        """Returns the seconds of the smallest collective of a kind."""
        return self.lines[kind][0].latency_s

    def s_per_byte(self, kind: CollectiveKind) -> float:
        """Returns the seconds for each byte of the size of a large collective."""
        return self.lines[kind][-1].s_per_byte


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
      sizes: `[F]`, the size of each factor.
      reduction: factors whose sharding leaves partial results (on all results that lack the factor).
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
      format: the name of the format to which the operands of a product are rounded before they are multiplied; "" for
        a product that runs as it was traced, and for every other operation. Of a shared reshard that to which its value
        is rounded once, for all products that read it so where it is.
      sent_in: the format of the codes in which partial sums are sent, a key of `codes.CODES`; "" for no codes.
      kept_in: the format of the codes as which the result is kept for the backward pass; "" for no codes. In the
        problem it is chosen by the shared reshard of the value.
      exchanged_in: the format of the codes as which the result is exchanged between devices; "" for no codes. In the
        problem it is chosen by the shared reshard of the value, if there is one.
      on_host: whether an array of the state is in the host's memory between its updates (`host_state.py`).
    """

    operands: tuple[IndexedSpec, ...]
    results: tuple[IndexedSpec, ...]
    parts: int
    reductions: tuple[tuple[ReshardStep, ...], ...]
    unreduced: tuple[IndexedSpec, ...]
    format: str = ""
    sent_in: str = ""
    kept_in: str = ""
    exchanged_in: str = ""
    on_host: bool = False


class Coded(NamedTuple):
    """An array in fewer bits that is not the operand of a product.

    Attributes:
      vertex: the index of the operation.
      format: a key of `codes.CODES`.
      kind: "sum" for its partial sums, which are sent as codes; "kept" for its result, which is kept as codes for the
        backward pass; "exchange" for its result, which is exchanged between devices as codes.
    """

    vertex: int
    format: str
    kind: Literal["sum", "kept", "exchange"] = "sum"


_FIELDS: dict[Literal["sum", "kept", "exchange"], str] = {
    "sum": "sent_in", "kept": "kept_in", "exchange": "exchanged_in"
}  # fmt: skip
"""The fields of strategies that name formats of codes, by the kind of what is coded."""


FormatKey = tuple[int, str] | Coded
"""What can be in fewer bits: a product, by its vertex and a format of its operands; or something else."""


def in_format(strategy: ShardingStrategy, key: FormatKey, name: str | None = None) -> ShardingStrategy:
    """Returns a strategy with something in its format, or in one of another name; "" for none."""
    field = _FIELDS[key.kind] if isinstance(key, Coded) else "format"
    return strategy._replace(**{field: key[1] if name is None else name})


def without_formats(strategy: ShardingStrategy) -> ShardingStrategy:
    """Returns a strategy with everything as it was traced."""
    return strategy._replace(format="", **dict.fromkeys(_FIELDS.values(), ""))


def coded_by(strategy: ShardingStrategy, vertex: int) -> list[Coded]:
    """Returns the arrays that a strategy of a vertex sends or keeps as codes."""
    return [Coded(vertex, name, kind) for kind, field in _FIELDS.items() if (name := getattr(strategy, field))]


class Node(NamedTuple):
    """A node of the problem: a vertex of the graph, or the shared reshard of a value that several operations read.

    Attributes:
      vertex: the vertex; for a shared reshard the one that makes the value.
      shared_value: the value whose reshard is shared, or None.
      strategies: `[S_v]` what can be chosen.
    """

    vertex: Vertex
    shared_value: Value | None
    strategies: tuple[ShardingStrategy, ...]


class Edge(NamedTuple):
    """A value on its way from the node that makes it to one that reads it.

    The reader of a value with a shared reshard is this reshard (operand 0), from which its own readers follow.

    Attributes:
      node, result: the producing node and which of its results the value is.
      reader, operand: the reading node and which of its operands the value is.
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
    value_specs: tuple[IndexedSpec, ...]
    input_specs: tuple[IndexedSpec, ...]
    output_specs: tuple[IndexedSpec, ...]

    @property
    def rounded(self) -> frozenset[tuple[int, str]]:
        """The products whose operands are rounded: indices of vertices, with names of formats."""
        return frozenset((i, strategy.format) for i, strategy in enumerate(self.strategies) if strategy.format)

    @property
    def coded(self) -> frozenset[Coded]:
        """The arrays in fewer bits that are not operands of products."""
        return frozenset(coded for i, strategy in enumerate(self.strategies) for coded in coded_by(strategy, i))

    @property
    def in_fewer_bits(self) -> frozenset[FormatKey]:
        """All of both."""
        return self.rounded | self.coded

    def with_formats(self, keys: Iterable[FormatKey]) -> "Layout":
        """Returns the layout with these in fewer bits, of each kind at most one for each vertex, and nothing else."""
        strategies = list(map(without_formats, self.strategies))
        for key in keys:
            strategies[key[0]] = in_format(strategies[key[0]], key)
        return self._replace(strategies=tuple(strategies))

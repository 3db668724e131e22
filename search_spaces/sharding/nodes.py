"""Which strategies a vertex of a graph may choose from: by its rule, by its kind, or by what the function fixes."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from search_spaces.partition_specs import IndexedSpec
from search_spaces.sharding.base import Axes, Coded, GivenSpec, Node, Rule, ShardingStrategy
from search_spaces.sharding.coded_sums import can_be_coded
from search_spaces.sharding.custom_calls.operations import custom_call_of, runs_on_parts
from search_spaces.sharding.edge_costs import readers_of
from search_spaces.sharding.given import axes_with_meaning, constraint_of, fits, shard_map_strategy
from search_spaces.sharding.graph import Graph, Value, Vertex
from search_spaces.sharding.replicated_operations import is_partitioned_wrongly, is_replicated
from search_spaces.sharding.reshard_costs import ReshardCosts
from search_spaces.sharding.resharding import Paths
from search_spaces.sharding.spec import axes_in, divides, shards, specs_of_shape
from search_spaces.sharding.strategies import (
    collective_bytes,
    in_order,
    interchangeable_axes,
    kinds_of_dimensions,
    strategies_of_rule,
    strategy_of_spec,
    whole_strategy,
)

MOST_STRATEGIES = 500
"""The most strategies of one vertex. Two mesh axes never come near it; operations of many dimensions on three do."""


def nodes_of(
    graph: Graph,
    rules: Sequence[Rule | None],
    forms: Sequence[int],
    given: Mapping[int, GivenSpec],
    reshard_costs: ReshardCosts,
    as_program: bool,
    axes_to_split: Mapping[int, frozenset[int]],
) -> list[Node]:
    """Returns one node for each vertex, in order, then the shared reshards; equal ones share their strategies.

    A value that several operations read gets a node of its own, their shared reshard. Arrays that are stored beside a
    gathered copy (arguments, what a loop's body reads) need none.

    Args:
      rules: for each vertex its rule or None.
      given: specs that inputs must keep, by flat argument.
      as_program: whether operations are split only in ways that have a form on one device's part; without it, only in
        ways that XLA's partitioner computes rightly.
      axes_to_split: mesh axes over which inputs have to be split, by flat argument; those that no spec splits over all
        of them are free.
    """
    axis_names, axis_sizes = reshard_costs.axis_names, reshard_costs.axis_sizes
    is_shared = [len(readers) > 1 for readers in readers_of(graph)]
    fixed_axes = axes_with_meaning(graph, given, axis_names, axis_sizes)
    axes = interchangeable_axes(axis_sizes, reshard_costs.rates, fixed_axes)
    kinds = kinds_of_dimensions(graph, rules) if axes.interchangeable else [()] * len(graph.values)
    strategies = _StrategiesOnMesh(axis_names, axes, reshard_costs.path, kinds, _new_results(graph), as_program)
    nodes = []
    strategies_of_key: dict[Hashable, tuple[ShardingStrategy, ...]] = {}
    for vertex in graph.vertices:
        kept_spec = given.get(vertex.index) if vertex.kind == "input" else None
        is_copied = bool(vertex.results) and is_shared[vertex.results[0].id]
        are_new = tuple(value.id in strategies.new_results for value in vertex.results)
        spec = None if kept_spec is None else tuple(kept_spec)
        split_axes = axes_to_split.get(vertex.index, frozenset()) if vertex.kind == "input" else frozenset()
        key = forms[vertex.index], spec, is_copied, are_new, strategies.kinds_of(vertex), split_axes
        if key not in strategies_of_key:
            strategies_of_key[key] = strategies.of(vertex, rules[vertex.index], kept_spec, is_copied, split_axes)
        nodes.append(Node(vertex, None, strategies_of_key[key]))
    for value in graph.values:
        vertex = graph.vertices[value.vertex]
        has_own_copy = vertex.kind in ("input", "constant", "slice") or (vertex.kind == "carry" and value.result == 0)
        if value.shape and is_shared[value.id] and not has_own_copy:
            key = value.shape, value.id in strategies.new_results, kinds[value.id]
            if key not in strategies_of_key:
                strategies_of_key[key] = strategies.of_shared_reshard(value)
            nodes.append(Node(vertex, value, strategies_of_key[key]))
    return nodes


def with_formats(
    nodes: Sequence[Node],
    formats_of: Mapping[int, Sequence[str]],
    shared_of: Mapping[int, Sequence[str]],
    codes: Iterable[Coded],
    shared_reshard_of: Mapping[int, int],
    axis_sizes: tuple[int, ...],
    made: dict[Hashable, tuple[ShardingStrategy, ...]],
) -> list[Node]:
    """Returns nodes with more strategies: those of products again for each format, then those that have codes.

    Args:
      nodes: of a space in which nothing is in fewer bits.
      formats_of: formats of products, by vertex.
      shared_of: formats to which shared reshards round their values for several products; those without padding.
      codes: what else may be in fewer bits.
      shared_reshard_of: the nodes that decide how results are kept or exchanged, by the vertices that make them.
      made: strategies that other formats of the same nodes led to; those that are made here are added.
    """
    sent_of: dict[int, list[str]] = {}
    kept_of: dict[int, list[str]] = {}
    exchanged_of: dict[int, list[str]] = {}
    of_kind = {"sum": sent_of, "kept": kept_of, "exchange": exchanged_of}
    for vertex, name, kind in codes:
        node = vertex if kind == "sum" else shared_reshard_of[vertex]
        of_kind[kind].setdefault(node, []).append(name)
    formatted = list(nodes)
    rounded_of = {**formats_of, **shared_of}
    for i in {**rounded_of, **sent_of, **kept_of, **exchanged_of}:
        node = nodes[i]
        names = tuple(tuple(of.get(i, ())) for of in (rounded_of, sent_of, kept_of, exchanged_of))
        value = node.shared_value or (node.vertex.results[0] if node.vertex.kind == "stack" else None)
        shape = () if value is None else value.shape
        if (id(node.strategies), names, shape) not in made:
            whole = [
                s for s in node.strategies if node.shared_value is None or divides(s.results[0], shape, axis_sizes)
            ]
            products = (*node.strategies, *(s._replace(format=name) for name in names[0] for s in whole))
            kept = [s for s in products if names[2] and divides(s.results[0], shape, axis_sizes)]
            coded = (
                *products,
                *(
                    s._replace(sent_in=name)
                    for name in names[1]
                    for s in products
                    if can_be_coded(node.vertex, s, name, axis_sizes)
                ),
                *(s._replace(kept_in=name) for name in names[2] for s in kept),
            )
            exchanged = (s._replace(exchanged_in=name) for name in names[3] for s in coded)
            made[id(node.strategies), names, shape] = (*coded, *exchanged)
        formatted[i] = node._replace(strategies=made[id(node.strategies), names, shape])
    return formatted


def _new_results(graph: Graph) -> frozenset[int]:
    """Returns the results of the function that replace no argument, by id."""
    pairs = zip(graph.outputs, graph.feedback, strict=True)
    return frozenset(o.id for o, argument in pairs if isinstance(o, Value) and argument is None)


@dataclass(frozen=True)
class _StrategiesOnMesh:
    """The strategies of vertices on a mesh.

    Attributes:
      kinds: for each value, by id, the kind of each dimension (see `strategies.kinds_of_dimensions`); empty where no
        axes are interchangeable.
      new_results: values, by id, that are results of the function and replace no argument; JAX refuses uneven ones.
    """

    axis_names: tuple[str, ...]
    axes: Axes
    path: Paths
    kinds: Sequence[tuple[int, ...]]
    new_results: frozenset[int]
    as_program: bool

    def of(
        self,
        vertex: Vertex,
        rule: Rule | None,
        given: GivenSpec | None,
        is_copied: bool,
        split_axes: frozenset[int],
    ) -> tuple[ShardingStrategy, ...]:
        """Returns the strategies of a vertex.

        Args:
          rule: of its operation; None replicates.
          given: what the user fixed of an input.
          is_copied: whether the array that the vertex holds has several readers, so that a gathered copy may be kept.
          split_axes: mesh axes over which an input has to be split, if a spec splits it so.
        """
        if vertex.kind == "operation":
            strategies = self._of_operation(vertex, rule)
            for i, value in enumerate(vertex.results):
                if value.id in self.new_results:
                    strategies = [s for s in strategies if divides(s.results[i], value.shape, self.axes.sizes)]
            return _most_useful(strategies)
        value, num_operands = vertex.results[0], len(vertex.operands)
        stored_specs = self._specs(value, given)
        stored_specs = [s for s in stored_specs if split_axes <= {*axes_in(s)}] or stored_specs
        if vertex.kind == "stack":
            return tuple(self._join((s[1:],), s) for s in stored_specs if not s[0])
        if vertex.kind == "join":
            return tuple(self._join((s,) * num_operands, s) for s in stored_specs)
        return _most_useful(
            [
                self._storage(vertex, s, read_spec)
                for s in stored_specs
                for read_spec in (_coarser(s) if is_copied else (s,))
            ]
        )

    def of_shared_reshard(self, value: Value) -> tuple[ShardingStrategy, ...]:
        """Returns the strategies of the shared reshard of a value."""
        specs = self._specs(value, None, with_padding=value.id not in self.new_results)
        return tuple(strategy_of_spec(spec, self.axes.sizes) for spec in specs)

    def _of_operation(self, vertex: Vertex, rule: Rule | None) -> Sequence[ShardingStrategy]:
        constraint = constraint_of(vertex, self.axis_names, self.axes.sizes)
        if constraint is not None:
            return [strategy_of_spec(s, self.axes.sizes) for s in self._specs(vertex.results[0], constraint)]
        only_strategy = shard_map_strategy(vertex, self.axis_names, self.axes.sizes)
        if only_strategy is not None:
            return [only_strategy]
        if rule is None:
            return [whole_strategy(vertex)]
        kinds, custom_call = self.kinds_of(vertex), custom_call_of(vertex)
        strategies = strategies_of_rule(rule, self.axes, kinds)
        if custom_call is not None and vertex.equation is not None:
            for other in custom_call.more_rules(vertex.equation):
                strategies = tuple(dict.fromkeys((*strategies, *strategies_of_rule(other, self.axes, kinds))))
        if not self.as_program and not runs_on_parts(vertex):
            return [s for s in strategies if not is_partitioned_wrongly(vertex, s)]
        return [s for s in strategies if not is_replicated(vertex, s, self.axes.sizes)]

    def kinds_of(self, vertex: Vertex) -> tuple[tuple[int, ...], ...]:
        """Ranks the kinds of a vertex's arrays among each other, so that equal layers ask for the same strategies."""
        if not self.axes.interchangeable:
            return ()
        kinds_of_arrays = [
            self.kinds[x.id] if isinstance(x, Value) else () for x in (*vertex.operands, *vertex.results)
        ]
        number = {kind: i for i, kind in enumerate(sorted({kind for kinds in kinds_of_arrays for kind in kinds}))}
        return tuple(tuple(number[kind] for kind in kinds) for kinds in kinds_of_arrays)

    def _specs(self, value: Value, given: GivenSpec | None, with_padding: bool = False) -> list[IndexedSpec]:
        """Returns the specs of a value. A given spec may order axes in a way that the space itself does not offer."""
        specs = [
            spec
            for spec in specs_of_shape(value.shape, self.axes.sizes, with_padding)
            if (given is None or fits(spec, given)) and in_order(spec, self.kinds[value.id], self.axes.interchangeable)
        ]
        return specs or [tuple(axes or () for axes in given or ())]

    def _storage(self, vertex: Vertex, stored_spec: IndexedSpec, read_spec: IndexedSpec) -> ShardingStrategy:
        """Stores an array one way and gathers it for its readers: a parameter, a carry, a slice of a stack."""
        count = len(vertex.results)
        operand = ((), *stored_spec) if vertex.kind == "slice" else stored_spec
        return ShardingStrategy(
            (operand,) * len(vertex.operands),
            (read_spec, stored_spec)[:count],
            shards(stored_spec, self.axes.sizes),
            (self.path(stored_spec, read_spec), ())[:count],
            (stored_spec, stored_spec)[:count],
        )

    def _join(self, operands: tuple[IndexedSpec, ...], result: IndexedSpec) -> ShardingStrategy:
        return ShardingStrategy(operands, (result,), shards(result, self.axes.sizes), ((),), (result,))


def _most_useful(strategies: Sequence[ShardingStrategy]) -> tuple[ShardingStrategy, ...]:
    """Returns at most `MOST_STRATEGIES`: the first one, which replicates, and those that split the fewest dimensions.

    A plan that gives each axis a dimension of its own is rare; one that uses all devices for two or three is not.
    """
    if len(strategies) <= MOST_STRATEGIES:
        return tuple(strategies)

    def rank(strategy: ShardingStrategy) -> tuple[int, int, float]:
        specs = (*strategy.operands, *strategy.unreduced)
        dims = max((sum(map(bool, spec)) for spec in specs), default=0)
        return dims, -strategy.parts, collective_bytes(strategy)

    return (strategies[0], *sorted(strategies[1:], key=rank)[: MOST_STRATEGIES - 1])


def _coarser(spec: IndexedSpec) -> list[IndexedSpec]:
    """Returns the specs that gathering along some of its axes makes of a spec, the spec itself first."""
    axes = sorted(axes_in(spec))
    specs = []
    for bits in range(2 ** len(axes) - 1, -1, -1):
        remaining = {a for i, a in enumerate(axes) if bits >> i & 1}
        specs.append(tuple(tuple(a for a in dim if a in remaining) for dim in spec))
    return specs

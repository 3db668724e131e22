"""Arithmetic that several devices do alike because it cannot be split among them, with what it costs and why.

What the search leaves whole because splitting it would cost more is not counted: only operations without a sharding
rule, and dimensions of a size that mesh axes do not divide. Of an operation with a dimension of examples, such as the
batch or a sequence, that dimension decides: no parameter has it, so that splitting it is cheap, and where it cannot be
split other dimensions seldom pay. Of others some dimension must divide.

What is lost is the operation's predicted time less the time that it would take if the dimension were padded and split,
so that operations too small to gain from more devices lose nothing.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from math import ceil, lcm, prod
from typing import NamedTuple

from search_spaces.partition_specs import IndexedSpec
from search_spaces.sharding.base import Axes, Dimensions, Node, Rule, ShardingStrategy
from search_spaces.sharding.custom_calls.operations import UNEVEN, custom_call_of, name_of, refusal
from search_spaces.sharding.explaining import sources_of
from search_spaces.sharding.given import is_constrained
from search_spaces.sharding.graph import Graph, Value, Vertex, values_of
from search_spaces.sharding.node_costs import NodeCosts
from search_spaces.sharding.own_collectives import stated_seconds
from search_spaces.sharding.replicated_operations import is_replicated
from search_spaces.sharding.spec import axes_in
from search_spaces.sharding.strategies import kinds_of_dimensions, strategies_of_rule

_LEAST_SHARE = 0.01
"""Of the step's computing: what takes less is not worth a line of a plan."""


class UnevenDimension(NamedTuple):
    """A dimension that mesh axes do not divide.

    Attributes:
      parts: the number of devices that should divide it.
      axes: the mesh axes along which these are.
      inputs: the flat arguments that have it, each with the dimension's position; empty where none has it.
    """

    size: int
    parts: int
    axes: tuple[int, ...]
    inputs: tuple[tuple[int, int], ...]


class WholeWork(NamedTuple):
    """Operations that several devices run alike for one reason.

    Attributes:
      seconds: of one step's predicted computing that splitting them would save.
      uneven: the dimension; None where the operations have no sharding rule, or one that splits nothing.
    """

    vertices: tuple[int, ...]
    seconds: float
    uneven: UnevenDimension | None


class _Factor(NamedTuple):
    """A factor of an operation's rule that may be split, at the largest dimension that begins with it.

    Attributes:
      array: which of the operation's operands and results has the dimension.
    """

    number: int
    array: int
    dim: int
    size: int
    kind: int


class _Loss(NamedTuple):
    """The loss of an operation in seconds, and its uneven factor with axes and parts, None where nothing splits it."""

    seconds: float
    factor: _Factor | None = None
    axes: frozenset[int] = frozenset()
    parts: int = 1


def whole_work(
    graph: Graph,
    rules: Sequence[Rule | None],
    nodes: Sequence[Node],
    strategies: Sequence[ShardingStrategy],
    node_costs: NodeCosts,
    loaded: Iterable[int],
) -> list[WholeWork]:
    """Returns the work that a choice leaves whole because it cannot be split, the most expensive first.

    What takes less than a hundredth of the step's computing is left out.

    Args:
      rules: for each vertex its rule or None.
      nodes: for each vertex what it can choose from.
      loaded: flat arguments with examples, which come with each call.
    """
    choice = _Choice(graph, rules, nodes, strategies, node_costs, frozenset(loaded))
    groups: dict[tuple[int, int] | str, list[tuple[int, _Loss]]] = {}
    for vertex in choice.candidates():
        loss = choice.loss(vertex)
        if loss is not None and loss.seconds > 0:
            key = name_of(vertex) if loss.factor is None else (loss.factor.size, loss.factor.kind)
            groups.setdefault(key, []).append((vertex.index, loss))
    found, least_s = [], _LEAST_SHARE * choice.compute_s
    for members in groups.values():
        vertices, losses = zip(*members, strict=True)
        if sum(loss.seconds for loss in losses) < least_s:
            continue
        uneven, factor = None, losses[0].factor
        if factor is not None:
            axes = frozenset[int]().union(*(loss.axes for loss in losses))
            parts = lcm(*(loss.parts for loss in losses))
            uneven = UnevenDimension(factor.size, parts, tuple(sorted(axes)), choice.inputs_of(factor.kind))
        found.append(WholeWork(vertices, sum(loss.seconds for loss in losses), uneven))
    return sorted(found, key=lambda work: -work.seconds)


@dataclass(frozen=True)
class _Choice:
    """A choice, whose parts are those of `whole_work`."""

    graph: Graph
    rules: Sequence[Rule | None]
    nodes: Sequence[Node]
    strategies: Sequence[ShardingStrategy]
    node_costs: NodeCosts
    loaded: frozenset[int]

    @cached_property
    def compute_s(self) -> float:
        """Seconds of all computing."""
        vertices = self.graph.vertices
        return sum(self.node_costs.chosen_compute_s(v, self.strategies[v.index]) for v in vertices)

    def candidates(self) -> list[Vertex]:
        """Returns the operations that leave mesh axes unused; none if they take next to no time together."""
        whole = [
            vertex
            for vertex in self.graph.operations()
            if vertex.equation is not None
            and not is_constrained(vertex)
            and stated_seconds(vertex.equation) is None
            and self._divisible_s(vertex) > 0
            and self._unused_axes(vertex)
        ]
        return whole if sum(map(self._divisible_s, whole)) >= _LEAST_SHARE * self.compute_s else []

    def loss(self, vertex: Vertex) -> _Loss | None:
        """Returns the loss of an operation because it cannot be split over the mesh axes that it leaves unused."""
        factors = self._factors(vertex)
        of_examples = [factor for factor in factors if factor.kind in self._kinds_of_examples]
        deciding = of_examples or factors
        parts = prod(self.node_costs.axis_sizes[a] for a in self._unused_axes(vertex))
        wanted = {factor: self._parts(factor, self.strategies[vertex.index]) * parts for factor in deciding}
        strategies = self.nodes[vertex.index].strategies
        possible = {factor: max(self._parts(factor, strategy) for strategy in strategies) for factor in deciding}
        if any(possible[factor] >= wanted[factor] for factor in deciding):
            return None  # the search could have split it
        uneven = [factor for factor in deciding if factor.size % wanted[factor]]
        if uneven:
            return max((self._loss_of(vertex, f, wanted[f], possible[f]) for f in uneven), key=lambda x: x.seconds)
        is_never_split = all(strategy.parts == 1 for strategy in strategies)
        return _Loss(self._divisible_s(vertex) * (1 - 1 / parts)) if is_never_split else None

    def inputs_of(self, kind: int) -> tuple[tuple[int, int], ...]:
        """Returns the flat arguments that have a kind of dimension, each with the position of the dimension."""
        values = [vertex.results[0] for vertex in self.graph.inputs]
        return tuple((i, self._kinds[v.id].index(kind)) for i, v in enumerate(values) if kind in self._kinds[v.id])

    @cached_property
    def _kinds(self) -> list[tuple[int, ...]]:
        return kinds_of_dimensions(self.graph, self.rules)

    @cached_property
    def _kinds_of_examples(self) -> frozenset[int]:
        """The kinds of dimensions that arguments with examples have, and no others."""
        of_loaded, of_others = set[int](), set[int]()
        for i, vertex in enumerate(self.graph.inputs):
            (of_loaded if i in self.loaded else of_others).update(self._kinds[vertex.results[0].id])
        return frozenset(of_loaded - of_others)

    def _unused_axes(self, vertex: Vertex) -> frozenset[int]:
        strategy = self.strategies[vertex.index]
        used = frozenset[int]().union(*(axes_in(spec) for spec in (*strategy.operands, *strategy.unreduced)))
        return frozenset(a for a, size in enumerate(self.node_costs.axis_sizes) if size > 1) - used

    def _factors(self, vertex: Vertex) -> list[_Factor]:
        """Returns the factors that an operation's rule may split; none without a rule."""
        rule, found = self.rules[vertex.index], dict[int, _Factor]()
        if rule is None:
            return []
        closed = rule.need_replication | rule.permutation | rule.blocked_propagation
        arrays = zip((*vertex.operands, *vertex.results), (*rule.operands, *rule.results), strict=True)
        for i, (array, dims) in enumerate(arrays):
            for d, factors in enumerate(dims):
                if not isinstance(array, Value) or not factors or factors[0] in closed or rule.sizes[factors[0]] < 2:
                    continue
                factor = _Factor(factors[0], i, d, array.shape[d], self._kinds[array.id][d])
                if factor.number not in found or found[factor.number].size < factor.size:
                    found[factor.number] = factor
        return list(found.values())

    def _parts(self, factor: _Factor, strategy: ShardingStrategy) -> int:
        """Returns into how many parts a strategy splits a factor's dimension."""
        spec = (*strategy.operands, *strategy.unreduced)[factor.array]
        return prod(self.node_costs.axis_sizes[a] for a in spec[factor.dim])

    def _loss_of(self, vertex: Vertex, factor: _Factor, wanted: int, possible: int) -> _Loss:
        """Returns the loss because a factor is split into fewer parts than wanted, beyond what is possible."""
        sizes, unused = self.node_costs.axis_sizes, sorted(self._unused_axes(vertex))
        strategy = self.strategies[vertex.index]
        own = self._parts(factor, strategy)
        subsets = [axes for n in range(len(unused) + 1) for axes in combinations(unused, n)]
        allowed = [axes for axes in subsets if own * prod(sizes[a] for a in axes) <= max(own, possible)]
        best = max(allowed, key=lambda axes: prod(sizes[a] for a in axes))
        padding = ceil(factor.size / wanted) * wanted / factor.size
        seconds = self._split_s(vertex, factor, best) - padding * self._split_s(vertex, factor, unused)
        axes = frozenset((*strategy.operands, *strategy.unreduced)[factor.array][factor.dim])
        return _Loss(seconds, factor, axes.union(unused), wanted)

    def _split_s(self, vertex: Vertex, factor: _Factor, axes: Sequence[int]) -> float:
        """Returns the seconds of an operation if further axes split a factor, evenly or not, without its launches."""
        rule, strategy, costs = self.rules[vertex.index], self.strategies[vertex.index], self.node_costs
        parts = prod(costs.axis_sizes[a] for a in axes)
        if rule is None or custom_call_of(vertex) is not None:
            return self._divisible_s(vertex) / parts

        def split(specs: Sequence[IndexedSpec], arrays: Sequence[Dimensions]) -> tuple[IndexedSpec, ...]:
            return tuple(
                tuple(
                    (*own, *axes) if factors[:1] == (factor.number,) else own
                    for own, factors in zip(spec, dims, strict=True)
                )
                for spec, dims in zip(specs, arrays, strict=True)
            )

        operands, unreduced = split(strategy.operands, rule.operands), split(strategy.unreduced, rule.results)
        wanted = strategy._replace(operands=operands, unreduced=unreduced, parts=strategy.parts * parts)
        return max(float(costs.compute_s(vertex, (wanted,))[0]) - self._launch_s(vertex), 0.0)

    def _divisible_s(self, vertex: Vertex) -> float:
        """Returns the seconds of an operation without those of launching it, which each device needs anyway."""
        own_s = self.node_costs.chosen_compute_s(vertex, self.strategies[vertex.index])
        return max(own_s - self._launch_s(vertex), 0.0)

    def _launch_s(self, vertex: Vertex) -> float:
        launches = 1.0 if custom_call_of(vertex) is not None else float(self.node_costs.kernels.launches[vertex.index])
        return vertex.weight * launches * self.node_costs.hardware.kernel_launch_s


LEAST_NOTED_ELEMENTS = 1024
"""An operation that runs whole is noted from this size of its largest array on; below, it costs less than a launch."""
LEAST_WHOLE_ELEMENTS = 1 << 16
"""An operation of which nothing can be split is noted from this size on."""


def notes_of(
    graph: Graph,
    rules: Sequence[Rule | None],
    axis_names: tuple[str, ...],
    axis_sizes: tuple[int, ...],
    as_program: bool = False,
) -> tuple[str, ...]:
    """Returns the notes of a trace, then one for each kind of operation that runs whole or refuses some parts.

    Args:
      rules: for each vertex its rule or None.
      as_program: whether operations are split only in ways that have a form on one device's part.
    """
    without_rule, ruled, custom_calls = list[Vertex](), list[tuple[Vertex, Rule]](), list[tuple[Vertex, Rule]]()
    for vertex in graph.operations():
        rule = rules[vertex.index]
        if rule is not None and custom_call_of(vertex) is not None:
            custom_calls.append((vertex, rule))
        elif not is_constrained(vertex) and rule is not None:
            ruled.append((vertex, rule))
        elif not is_constrained(vertex) and any(v.shape for v in (*values_of(vertex.operands), *vertex.results)):
            without_rule.append(vertex)
    axes = Axes(axis_sizes, tuple(range(len(axis_sizes))))
    notes = [
        f"{name} has no sharding rule and runs whole on every device ({sources}). It is priced by the bytes of its "
        "operands and results, and by its arithmetic as far as that is known; `diffshard.kernel` can say more."
        for name, sources in sources_of(without_rule)
    ]
    if as_program:
        without_form = [v for v, r in ruled if _num_elements(v) >= LEAST_NOTED_ELEMENTS and _has_no_form(v, r, axes)]
        notes += [
            f"{name} runs whole on every device ({sources}), and is priced so: what its rule splits has no form on one "
            'device\'s part. `executor="constraints"` can split it.'
            for name, sources in sources_of(without_form)
        ]
    never_split = [v for v, r in ruled if _num_elements(v) >= LEAST_WHOLE_ELEMENTS and not _splits(r, axes)]
    notes += [
        f"{name} runs whole on every device ({sources}): its sharding rule splits no dimension of these arrays."
        for name, sources in sources_of(never_split)
    ]
    refused: dict[str, list[str]] = {}
    for vertex, reason in _refused_splits(custom_calls, axis_names, axes):
        text = f"{name_of(vertex)} does not run on {reason}"
        refused.setdefault(text, []).append(vertex.user_source)
    notes += [f"{text} ({len(sources)}x, {min(sources)})." for text, sources in refused.items()]
    return (*graph.notes, *notes)


def _splits(rule: Rule, axes: Axes) -> list[ShardingStrategy]:
    return [strategy for strategy in strategies_of_rule(rule, axes) if strategy.parts > 1]


def _has_no_form(vertex: Vertex, rule: Rule, axes: Axes) -> bool:
    """Returns whether a rule splits an operation, but only in ways that have no form on one device's part."""
    splits = _splits(rule, axes)
    return bool(splits) and all(is_replicated(vertex, strategy, axes.sizes) for strategy in splits)


def _num_elements(vertex: Vertex) -> float:
    """Returns the size of the largest array that an operation reads or writes, in all trips."""
    return vertex.weight * max((prod(v.shape) for v in (*values_of(vertex.operands), *vertex.results)), default=0)


def _refused_splits(
    custom_calls: Sequence[tuple[Vertex, Rule]], axis_names: tuple[str, ...], axes: Axes
) -> list[tuple[Vertex, str]]:
    """Returns the custom calls that do not run on parts of some mesh axis although their rule allows it, and why.

    Each mesh axis is tried by itself.
    """
    refused: list[tuple[Vertex, str]] = []
    for vertex, rule in custom_calls:
        for strategy in strategies_of_rule(rule, axes):
            split = {a for spec in (*strategy.operands, *strategy.unreduced) for a in axes_in(spec)}
            reason = refusal(vertex, strategy, axes.sizes) if len(split) == 1 else None
            if reason not in (None, UNEVEN):
                refused.append((vertex, f"some parts over mesh axis {axis_names[min(split)]!r}: {reason}"))
                break
    return refused

"""The parallel strategies of a vertex: which mesh axis splits which factor of its operation.

On meshes of many axes most plans are copies of others with axes swapped. Dimensions of all arrays that are the same, as
the rules have it, are of one kind, and interchangeable axes take kinds in order, so that one copy is in the space.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise, product
from math import prod
from typing import TypeVar

from search_spaces.partition_specs import IndexedSpec
from search_spaces.sharding.base import Axes, Dimensions, Rates, ReshardStep, Rule, ShardingStrategy
from search_spaces.sharding.graph import Graph, Operand, Value, Vertex, rank_of
from search_spaces.sharding.spec import axes_in, divides, may_split, replicated_spec, shards

_T = TypeVar("_T")

AxesOfFactor = Mapping[int, tuple[int, ...]]
"""The mesh axes that split each factor."""


def replicated_strategy(operand_ranks: Sequence[int], result_ranks: Sequence[int]) -> ShardingStrategy:
    """Returns the strategy in which every device does everything."""
    results = tuple(replicated_spec(r) for r in result_ranks)
    return ShardingStrategy(tuple(replicated_spec(r) for r in operand_ranks), results, 1, ((),) * len(results), results)


def whole_strategy(vertex: Vertex) -> ShardingStrategy:
    """Returns the strategy in which every device, or every micro-batch, does all of an operation."""
    return replicated_strategy([rank_of(o) for o in vertex.operands], [len(r.shape) for r in vertex.results])


def strategy_of_spec(spec: IndexedSpec, axis_sizes: tuple[int, ...]) -> ShardingStrategy:
    """Returns the strategy of a vertex that reads and returns an array with one spec."""
    return ShardingStrategy((spec,), (spec,), shards(spec, axis_sizes), ((),), (spec,))


def collective_bytes(strategy: ShardingStrategy) -> float:
    """Returns the sizes of a strategy's own collectives, as fractions of the results."""
    return sum(step.fraction for steps in strategy.reductions for step in steps)


@lru_cache(maxsize=10_000)
def strategies_of_rule(rule: Rule, axes: Axes, kinds: tuple[tuple[int, ...], ...] = ()) -> tuple[ShardingStrategy, ...]:
    """Lists every strategy that a rule allows; the first one replicates.

    A mesh axis goes to one factor or to none. A factor that is reduced leaves partial results, which are all-reduced
    or, where the reduction is a sum, scattered into a dimension of the result.

    Args:
      kinds: of the dimensions of each operand and result, where axes are interchangeable.
    """
    closed_factors = rule.need_replication | rule.permutation | rule.blocked_propagation
    open_factors = [f for f, n in enumerate(rule.sizes) if n > 1 and f not in closed_factors]
    choices = [[-1, *open_factors] if n > 1 else [-1] for n in axes.sizes]
    cheapest: dict[tuple[tuple[IndexedSpec, ...], tuple[IndexedSpec, ...]], ShardingStrategy] = {}
    for factors in product(*choices):
        for strategy in _of_factors(rule, factors, axes, kinds):
            key = strategy.operands, strategy.results
            if key not in cheapest or collective_bytes(strategy) < collective_bytes(cheapest[key]):
                cheapest[key] = strategy
    return tuple(cheapest.values())


def _of_factors(
    rule: Rule, factors: Sequence[int], axes: Axes, kinds: tuple[tuple[int, ...], ...]
) -> Iterator[ShardingStrategy]:
    """Yields the strategies that split factor `factors[a]` along mesh axis a (-1: none), one for each way to reduce."""
    axes_of_factor = {f: tuple(a for a, g in enumerate(factors) if g == f) for f in dict.fromkeys(factors) if f >= 0}
    if not all(_may_split(rule, f, split_axes, axes.sizes) for f, split_axes in axes_of_factor.items()):
        return
    specs = _specs((*rule.operands, *rule.results), axes_of_factor, rule, axes.sizes)
    if specs is None or not _all_in_order(specs, kinds, axes):
        return
    operands, results = specs[: len(rule.operands)], specs[len(rule.operands) :]
    parts = prod(axes.sizes[a] for split_axes in axes_of_factor.values() for a in split_axes)
    partial = {a for f, split_axes in axes_of_factor.items() if f in rule.reduction for a in split_axes}
    axis_order = [[a for a in axes.fast_first if a in partial - axes_in(spec)] for spec in results]
    reductions = tuple(
        _all_reduce(spec, order, 1.0 / shards(spec, axes.sizes), axes.sizes)
        for spec, order in zip(results, axis_order, strict=True)
    )
    yield ShardingStrategy(operands, results, parts, reductions, results)
    partial_results = [i for i, order in enumerate(axis_order) if order]
    # Several partial results are scattered alike, as the gradients of keys and values are.
    if rule.reduction_is_sum and len({(rule.results[i], tuple(axis_order[i])) for i in partial_results}) == 1:
        i = partial_results[0]
        for steps in _scatters(results[i], _scattered_shape(rule, rule.results[i]), axis_order[i], axes):
            scattered = _replaced(results, partial_results, steps[-1].spec)
            if _all_in_order(scattered, kinds[len(operands) :], axes):
                yield ShardingStrategy(
                    operands, scattered, parts, _replaced(reductions, partial_results, steps), results
                )


def _replaced(entries: tuple[_T, ...], indices: Sequence[int], entry: _T) -> tuple[_T, ...]:
    return tuple(entry if i in indices else before for i, before in enumerate(entries))


def _may_split(rule: Rule, factor: int, axes: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    """Returns whether axes divide a factor, or may pad the dimensions that consist of it alone."""
    if rule.sizes[factor] % prod(sizes[a] for a in axes) == 0:
        return True
    dims = [factors for array in (*rule.operands, *rule.results) for factors in array if factor in factors]
    alone = all(prod(rule.sizes[f] for f in factors) == rule.sizes[factor] for factors in dims)
    return alone and may_split(rule.sizes[factor], axes, sizes)


def _all_in_order(specs: Sequence[IndexedSpec], kinds: Sequence[tuple[int, ...]], axes: Axes) -> bool:
    return all(in_order(spec, of_array, axes.interchangeable) for spec, of_array in zip(specs, kinds, strict=False))


def _specs(
    arrays: Sequence[Dimensions], axes_of_factor: AxesOfFactor, rule: Rule, sizes: tuple[int, ...]
) -> tuple[IndexedSpec, ...] | None:
    """Returns the spec of each array; None where a dimension's minor factor is split but its major one not in full."""
    specs = []
    for dims in arrays:
        spec = []
        for factors in dims:
            axes_of_dimension = [axes_of_factor.get(f, ()) for f in factors]
            last = max((i for i, axes in enumerate(axes_of_dimension) if axes), default=0)
            if any(
                prod(sizes[a] for a in axes) != rule.sizes[f]
                for f, axes in zip(factors[:last], axes_of_dimension, strict=False)
            ):
                return None
            spec.append(tuple(a for axes in axes_of_dimension for a in axes))
        specs.append(tuple(spec))
    return tuple(specs)


def _scattered_shape(rule: Rule, dims: Dimensions) -> tuple[int, ...]:
    """Returns the shape of a result, where dimensions that a rule has as a window or a slice of others count as 1.

    Their factor has the size of the largest of these dimensions, so nothing can be scattered into them.
    """
    return tuple(1 if rule.permutation & set(factors) else prod(rule.sizes[f] for f in factors) for factors in dims)


def _all_reduce(
    spec: IndexedSpec, partial: Sequence[int], fraction: float, sizes: tuple[int, ...]
) -> tuple[ReshardStep, ...]:
    """Returns an all-reduce over several axes, each on the part of the array that the axes before it leave a device.

    That is how it is run in steps, scattered over the fast links first, and adds up to what one ring over all the
    devices sends: 2·bytes·(n−1)/n.
    """
    steps = []
    for axis in partial:
        steps.append(ReshardStep("all_reduce", axis, fraction, spec))
        fraction /= sizes[axis]
    return tuple(steps)


def _scatters(
    spec: IndexedSpec, shape: tuple[int, ...], partial: Sequence[int], axes: Axes
) -> Iterator[tuple[ReshardStep, ...]]:
    """Yields the ways to scatter partial sums over some axes into a dimension and to all-reduce over the others.

    An axis goes below those that split its dimension already; scattered axes take the mesh's order. All go to one
    dimension: into several XLA for GPU reduces in full and slices, which is the all-reduce.
    """
    for places in product(range(-1, len(shape)), repeat=len(partial)):
        into = {a: d for a, d in zip(partial, places, strict=True) if d >= 0}
        below = all(not spec[d] or a > max(spec[d]) for a, d in into.items())
        if not below or len(set(into.values())) != 1:
            continue
        scattered_spec = [
            tuple(sorted((*dimension, *(a for a in into if into[a] == d)))) for d, dimension in enumerate(spec)
        ]
        if not divides(tuple(scattered_spec), shape, axes.sizes):
            continue
        steps, fraction = [], 1.0 / shards(spec, axes.sizes)
        axes_done: list[int] = []
        for axis in into:
            axes_done.append(axis)
            spec_after = tuple(
                tuple(a for a in dimension if a in axes_done or a not in into) for dimension in scattered_spec
            )
            steps.append(ReshardStep("reduce_scatter", axis, fraction, spec_after))
            fraction /= axes.sizes[axis]
        rest = [a for a in partial if a not in into]
        yield (*steps, *_all_reduce(steps[-1].spec, rest, fraction, axes.sizes))


Dimension = tuple[int, int]
"""A value's id and the position of a dimension."""


def kinds_of_dimensions(graph: Graph, rules: Sequence[Rule | None]) -> list[tuple[int, ...]]:
    """Returns, for each value by id, the kind of each dimension: small numbers, equal where dimensions are the same.

    Kinds of the data that come in with each call are numbered first, then those that most arrays have: batch and
    sequence before width, width before heads. So data is split over the first axes and parameters, where they are
    gathered for each use, over the same ones.

    Args:
      rules: for each vertex its rule or None.
    """
    parent: dict[Dimension, Dimension] = {(v.id, d): (v.id, d) for v in graph.values for d in range(len(v.shape))}

    def root(dimension: Dimension) -> Dimension:
        while parent[dimension] != dimension:
            parent[dimension] = parent[parent[dimension]]
            dimension = parent[dimension]
        return dimension

    for group in _same(graph, rules):
        for dimension in group[1:]:
            parent[root(dimension)] = root(group[0])
    count = Counter(root(dimension) for dimension in parent)
    fed_back = {argument for argument in graph.feedback if argument is not None}
    data = {
        root((vertex.results[0].id, d))
        for i, vertex in enumerate(graph.inputs)
        if fed_back and i not in fed_back
        for d in range(len(vertex.results[0].shape))
    }
    order = sorted(count, key=lambda r: (r not in data, -count[r], r))
    number = {r: i for i, r in enumerate(order)}
    return [tuple(number[root((v.id, d))] for d in range(len(v.shape))) for v in graph.values]


def _same(graph: Graph, rules: Sequence[Rule | None]) -> Iterator[list[Dimension]]:
    """Groups of dimensions that are the same."""
    for vertex, rule in zip(graph.vertices, rules, strict=True):
        if vertex.kind == "operation":
            yield from _of_rule(vertex, rule)
        else:
            yield from _aligned_dimensions([*vertex.operands, *vertex.results])
    for output, argument in zip(graph.outputs, graph.feedback, strict=True):
        if argument is not None:
            yield from _aligned_dimensions([output, graph.inputs[argument].results[0]])


def _of_rule(vertex: Vertex, rule: Rule | None) -> Iterator[list[Dimension]]:
    if rule is None:
        return
    groups: dict[tuple[int, int], list[Dimension]] = {}
    arrays = [*vertex.operands, *vertex.results]
    for array, dims in zip(arrays, (*rule.operands, *rule.results), strict=True):
        if isinstance(array, Value):
            for d, factors in enumerate(dims):
                long = [f for f in factors if rule.sizes[f] > 1]
                if len(long) == 1:
                    groups.setdefault((long[0], array.shape[d]), []).append((array.id, d))
    yield from groups.values()


def _aligned_dimensions(arrays: Sequence[Operand]) -> Iterator[list[Dimension]]:
    """Pairs dimensions from the last: what a loop reads of a stack, or leaves in it, lacks the stack's first one."""
    values = [array for array in arrays if isinstance(array, Value)]
    for back in range(1, min((len(value.shape) for value in values), default=0) + 1):
        yield [(value.id, len(value.shape) - back) for value in values]


@lru_cache(maxsize=500_000)
def in_order(spec: IndexedSpec, kinds: tuple[int, ...], interchangeable: tuple[tuple[int, ...], ...]) -> bool:
    """Returns whether a spec is the one that stands for all its copies with interchangeable axes swapped.

    Of axes that are interchangeable, each dimension takes neighbouring ones, and the first kind of dimension the first
    ones.

    The dimensions of vectors and matrices may come in any order: one layer's weights have the kinds of the next layer's
    in the other order, and specs of matrices are few.
    """
    for axes in interchangeable:
        places = [[i for i, axis in enumerate(axes) if axis in dimension] for dimension in spec]
        if any(indices and indices[-1] - indices[0] >= len(indices) for indices in places):
            return False
        if len(spec) > 2:
            order = sorted((i, kind) for kind, indices in zip(kinds, places, strict=True) for i in indices)
            if any(before > after for (_, before), (_, after) in pairwise(order)):
                return False
    return True


def interchangeable_axes(sizes: tuple[int, ...], rates: Sequence[Rates], fixed_axes: frozenset[int]) -> Axes:
    """Returns the axes of a mesh, and which of them are taken to be interchangeable.

    On two axes every plan is offered. On three the axes of equal size and link are interchangeable, which loses no plan
    whose arrays agree on what an axis is for. On more all of them are, from the slowest link to the fastest: data and
    the shards of parameters that are gathered go to slower links than what is exchanged within a layer.

    Measured: optima on (2, 2, 2) of MLPs stay, that of a one-layer GPT rises by 0.03% with 2.2 instead of 10.7 million
    edge entries; on (2, 2, 2, 2) with one slow axis those of MLPs stay with 1.7 instead of 5.6 million.

    Args:
      fixed_axes: axes that the user or the function has given a meaning; they are like no other.
    """
    slowness = [rate.s_per_byte("all_gather") for rate in rates]
    fast_first = tuple(sorted(range(len(sizes)), key=lambda a: (slowness[a], -a)))
    free = [a for a in reversed(fast_first) if sizes[a] > 1 and a not in fixed_axes]
    num_axes = sum(n > 1 for n in sizes)
    if num_axes <= 2:
        groups = []
    elif num_axes == 3:
        groups = [[b for b in free if (sizes[b], rates[b]) == (sizes[a], rates[a])] for a in free]
    else:
        groups = [free]
    return Axes(sizes, fast_first, tuple(dict.fromkeys(tuple(group) for group in groups if len(group) > 1)))

"""From dimensions that belong together to a `Rule`.

Dimensions of several arrays that must be sharded alike share a factor. The factors are the elements of a union-find
whose elements can also be split into a major and a minor part, as reshapes need.
"""

import dataclasses
import enum
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise

from jax.extend.core import JaxprEqn

from search_spaces.partition_specs import IndexedSpec
from search_spaces.sharding.base import Axes, Rates, Rule
from search_spaces.sharding.graph import Graph, Operand, Value, Vertex


class Mark(enum.IntFlag):
    """What sharding a factor means; marks of merged factors add up, parts of a split factor inherit them."""

    NONE = 0
    REDUCTION = enum.auto()
    NEED_REPLICATION = enum.auto()
    PERMUTATION = enum.auto()
    BLOCKED_PROPAGATION = enum.auto()


class Factors:
    """Sets of factors that must be sharded alike.

    A dimension is a sequence of factors, major to minor. Equating two dimensions that are written with different
    factors ([64] with [4, 16]) splits the larger factor wherever it occurs. Where no common refinement exists ([6, 4]
    with [4, 6]) the factors left over are marked `NEED_REPLICATION`.
    """

    def __init__(self) -> None:
        self._parent: list[int] = []
        self._parts: list[tuple[int, int] | None] = []
        self._size: list[int] = []
        self._mark: list[Mark] = []

    def new(self, size: int, mark: Mark = Mark.NONE) -> int:
        """Returns a factor that is equal to no other yet."""
        self._parent.append(len(self._parent))
        self._parts.append(None)
        self._size.append(size)
        self._mark.append(mark)
        return len(self._parent) - 1

    def size(self, leaf: int) -> int:
        """Returns the size of a factor given by `leaves`."""
        return self._size[leaf]

    def mark_of(self, leaf: int) -> Mark:
        """Returns the marks of a factor given by `leaves`."""
        return self._mark[leaf]

    def leaves(self, factors: Iterable[int]) -> list[int]:
        """Returns the unsplit representatives of a sequence of factors, major to minor."""
        unsplit: list[int] = []
        for factor in factors:
            root = self._find(factor)
            parts = self._parts[root]
            if parts is None:
                unsplit.append(root)
            else:
                unsplit.extend(self.leaves(parts))
        return unsplit

    def mark(self, factors: Iterable[int], mark: Mark) -> None:
        """Adds marks to all factors of a sequence."""
        for leaf in self.leaves(factors):
            self._mark[leaf] |= mark

    def equate(self, one: Sequence[int], other: Sequence[int]) -> None:
        """Makes two sequences of factors describe the same dimension.

        Single factors of different sizes are equated too: an operation that slices, pads or concatenates has one factor
        for dimensions of several sizes. The larger size is kept.
        """
        a, b = self.leaves(one), self.leaves(other)
        if len(a) == len(b) == 1:
            self._union(a[0], b[0])
            return
        a = [leaf for leaf in a if self._size[leaf] != 1]
        b = [leaf for leaf in b if self._size[leaf] != 1]
        if math.prod(self._size[leaf] for leaf in a) != math.prod(self._size[leaf] for leaf in b):
            self.mark([*a, *b], Mark.NEED_REPLICATION)
            return
        while a and b:
            x, y = self._pop_minor(a), self._pop_minor(b)
            size_x, size_y = self._size[x], self._size[y]
            if size_x == size_y:
                self._union(x, y)
            elif size_x % size_y == 0:
                major, minor = self._split_leaf(x, size_y)
                self._union(minor, y)
                a.append(major)
            elif size_y % size_x == 0:
                major, minor = self._split_leaf(y, size_x)
                self._union(x, minor)
                b.append(major)
            else:
                self.mark([*a, *b, x, y], Mark.NEED_REPLICATION)
                return

    def _find(self, factor: int) -> int:
        while self._parent[factor] != factor:
            self._parent[factor] = self._parent[self._parent[factor]]
            factor = self._parent[factor]
        return factor

    def _pop_minor(self, factors: list[int]) -> int:
        # Equating an earlier part may have split this factor in the meantime.
        *rest, minor = self.leaves([factors.pop()])
        factors.extend(rest)
        return minor

    def _union(self, x: int, y: int) -> None:
        if x == y:
            return
        self._parent[y] = x
        self._size[x] = max(self._size[x], self._size[y])
        self._mark[x] |= self._mark[y]

    def _split_leaf(self, leaf: int, minor_size: int) -> tuple[int, int]:
        major = self.new(self._size[leaf] // minor_size, self._mark[leaf])
        minor = self.new(minor_size, self._mark[leaf])
        self._parts[leaf] = (major, minor)
        return major, minor


def rule_from_factors(
    factors: Factors,
    operands: Sequence[Sequence[Sequence[int]]],
    results: Sequence[Sequence[Sequence[int]]],
    *,
    reduction_is_sum: bool = False,
) -> Rule:
    """Numbers the factors that operands and results mention, in order of appearance, and collects their marks.

    A factor that occurs twice in one array cannot be sharded, nor can one that operands have and no result, unless it
    is reduced: a reshape whose sizes have no common parts has such factors, and their data goes to other devices.
    """
    leaves = [[factors.leaves(dimension) for dimension in array] for array in [*operands, *results]]
    remaining = {leaf for array in leaves[len(operands) :] for dim in array for leaf in dim}
    for array in leaves[: len(operands)]:
        missing = [leaf for dim in array for leaf in dim if leaf not in remaining]
        factors.mark([leaf for leaf in missing if Mark.REDUCTION not in factors.mark_of(leaf)], Mark.NEED_REPLICATION)
    for array in leaves:
        twice = [leaf for leaf, count in Counter(leaf for dim in array for leaf in dim).items() if count > 1]
        factors.mark(twice, Mark.NEED_REPLICATION)
    index: dict[int, int] = {}
    for array in leaves:
        for dimension in array:
            for leaf in dimension:
                index.setdefault(leaf, len(index))
    arrays = [tuple(tuple(index[leaf] for leaf in dim) for dim in array) for array in leaves]

    def factors_marked(mark: Mark) -> frozenset[int]:
        return frozenset(number for leaf, number in index.items() if mark in factors.mark_of(leaf))

    need_replication = factors_marked(Mark.NEED_REPLICATION)
    return Rule(
        operands=tuple(arrays[: len(operands)]),
        results=tuple(arrays[len(operands) :]),
        sizes=tuple(factors.size(leaf) for leaf in index),
        reduction=factors_marked(Mark.REDUCTION) - need_replication,
        need_replication=need_replication,
        permutation=factors_marked(Mark.PERMUTATION) - need_replication,
        blocked_propagation=factors_marked(Mark.BLOCKED_PROPAGATION),
        reduction_is_sum=reduction_is_sum,
    )


def with_window_halos(equation: JaxprEqn, rule: Rule) -> Rule:
    """Returns the rule of a convolution with its window's dimensions marked as moving data between neighbours.

    Shardy calls the window of a kernel's gradient a plain reduction, but neighbours' borders enter it (measured: XLA
    exchanges them by permutes). Dimensions without overlap stay as they are.
    """
    if equation.primitive.name != "conv_general_dilated":
        return rule
    p = equation.params
    numbers = p["dimension_numbers"]
    permutation = set(rule.permutation)
    for d, (i, k, o) in enumerate(zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True)):
        window, image = (math.prod(rule.sizes[f] for f in dims) for dims in (rule.operands[1][k], rule.operands[0][i]))
        is_dense = p["window_strides"][d] == p["lhs_dilation"][d] == p["rhs_dilation"][d] == 1 and not any(
            p["padding"][d]
        )
        if not (is_dense and window in (1, image)):
            permutation.update(
                f for dims in (rule.operands[0][i], rule.operands[1][k], rule.results[0][o]) for f in dims
            )
    return dataclasses.replace(rule, permutation=frozenset(permutation), reduction=rule.reduction - permutation)


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
def in_order(spec: IndexedSpec, kinds: tuple[int, ...], alike: tuple[tuple[int, ...], ...]) -> bool:
    """Returns whether a spec is the one that stands for all its copies with alike axes swapped.

    Of axes that are alike, each dimension takes neighbouring ones, and the first kind of dimension the first ones.

    The dimensions of vectors and matrices may come in any order: one layer's weights have the kinds of the next layer's
    in the other order, and specs of matrices are few.
    """
    for axes in alike:
        places = [[i for i, axis in enumerate(axes) if axis in dimension] for dimension in spec]
        if any(indices and indices[-1] - indices[0] >= len(indices) for indices in places):
            return False
        if len(spec) > 2:
            order = sorted((i, kind) for kind, indices in zip(kinds, places, strict=True) for i in indices)
            if any(before > after for (_, before), (_, after) in pairwise(order)):
                return False
    return True


def interchangeable_axes(sizes: tuple[int, ...], rates: Sequence[Rates], fixed_axes: frozenset[int]) -> Axes:
    """Returns the axes of a mesh, and which of them are taken to be alike.

    On two axes every plan is offered. On three the axes of equal size and link are alike, which loses no plan whose
    arrays agree on what an axis is for. On more all of them are, from the slowest link to the fastest: data and the
    shards of parameters that are gathered go to slower links than what is exchanged within a layer.

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

"""How an operation's dimensions relate: Shardy's OpShardingRule as plain data."""

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from jax.extend.core import JaxprEqn

from search_spaces.sharding.factors import Factors, Mark

Dimensions = tuple[tuple[int, ...], ...]


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
        gone = [leaf for dim in array for leaf in dim if leaf not in remaining]
        factors.mark([leaf for leaf in gone if Mark.REDUCTION not in factors.mark_of(leaf)], Mark.NEED_REPLICATION)
    for array in leaves:
        twice = [leaf for leaf, count in Counter(leaf for dim in array for leaf in dim).items() if count > 1]
        factors.mark(twice, Mark.NEED_REPLICATION)
    index: dict[int, int] = {}
    for array in leaves:
        for dimension in array:
            for leaf in dimension:
                index.setdefault(leaf, len(index))
    arrays = [tuple(tuple(index[leaf] for leaf in dim) for dim in array) for array in leaves]

    def marked(mark: Mark) -> frozenset[int]:
        return frozenset(number for leaf, number in index.items() if mark in factors.mark_of(leaf))

    need_replication = marked(Mark.NEED_REPLICATION)
    return Rule(
        operands=tuple(arrays[: len(operands)]),
        results=tuple(arrays[len(operands) :]),
        sizes=tuple(factors.size(leaf) for leaf in index),
        reduction=marked(Mark.REDUCTION) - need_replication,
        need_replication=need_replication,
        permutation=marked(Mark.PERMUTATION) - need_replication,
        blocked_propagation=marked(Mark.BLOCKED_PROPAGATION),
        reduction_is_sum=reduction_is_sum,
    )


def with_windows_whole(equation: JaxprEqn, rule: Rule) -> Rule:
    """The rule of a convolution with its window's dimensions marked as moving data between neighbours.

    Shardy calls the window of a kernel's gradient a plain reduction, but neighbours' borders enter it (measured: XLA
    exchanges them by permutes). Dimensions without overlap stay as they are.
    """
    if equation.primitive.name != "conv_general_dilated":
        return rule
    p = equation.params
    numbers = p["dimension_numbers"]
    moved = set(rule.permutation)
    for d, (i, k, o) in enumerate(zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True)):
        window, image = (math.prod(rule.sizes[f] for f in dims) for dims in (rule.operands[1][k], rule.operands[0][i]))
        plain = p["window_strides"][d] == p["lhs_dilation"][d] == p["rhs_dilation"][d] == 1 and not any(p["padding"][d])
        if not (plain and window in (1, image)):
            moved.update(f for dims in (rule.operands[0][i], rule.operands[1][k], rule.results[0][o]) for f in dims)
    return dataclasses.replace(rule, permutation=frozenset(moved), reduction=rule.reduction - moved)

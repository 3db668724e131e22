"""The parallel strategies of a vertex: which mesh axis splits which factor of its operation."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from search_spaces.sharding.resharding import Move
from search_spaces.sharding.rule import Rule
from search_spaces.sharding.spec import Spec, divides, replicated, shards, specs_of_shape


class Strategy(NamedTuple):
    """One way to run an operation.

    Attributes:
      operands: the spec that each operand must have.
      results: the spec that each result is left with, after its reduction.
      parts: how many devices share the arithmetic.
      reductions: for each result the collectives that finish its partial sums.
      unreduced: the specs of the results before those collectives.
    """

    operands: tuple[Spec, ...]
    results: tuple[Spec, ...]
    parts: int
    reductions: tuple[tuple[Move, ...], ...]
    unreduced: tuple[Spec, ...]


def whole(operand_ranks: Sequence[int], result_ranks: Sequence[int]) -> Strategy:
    """Every device does everything."""
    results = tuple(replicated(r) for r in result_ranks)
    return Strategy(tuple(replicated(r) for r in operand_ranks), results, 1, ((),) * len(results), results)


@lru_cache(maxsize=10_000)
def strategies_of_rule(rule: Rule, axis_sizes: tuple[int, ...], limit: int) -> tuple[Strategy, ...]:
    """Every strategy that a rule allows; the first one replicates.

    A mesh axis goes to one factor or to none. A factor that is reduced leaves partial results, which are all-reduced
    or, where the reduction is a sum, scattered into a dimension of the result.

    Args:
      rule: the operation's rule.
      axis_sizes: devices along each mesh axis.
      limit: keep at most about so many, those with the most parallelism first (only meshes of 3 axes and more reach it).
    """
    closed = rule.need_replication | rule.permutation | rule.blocked_propagation
    open_factors = [f for f, n in enumerate(rule.sizes) if n > 1 and f not in closed]
    choices = [[-1, *open_factors] if n > 1 else [-1] for n in axis_sizes]
    found: dict[tuple[tuple[Spec, ...], tuple[Spec, ...]], Strategy] = {}
    for factors in product(*choices):
        for strategy in _with_reductions(rule, factors, axis_sizes):
            key = strategy.operands, strategy.results
            if key not in found or _bytes(strategy) < _bytes(found[key]):
                found[key] = strategy
    strategies = list(found.values())
    if len(strategies) > limit:
        strategies = [strategies[0], *sorted(strategies[1:], key=lambda s: (-s.parts, _bytes(s)))[: limit - 1]]
    return tuple(strategies)


def strategies_of_specs(shape: tuple[int, ...], axis_sizes: tuple[int, ...]) -> tuple[Strategy, ...]:
    """Strategies of a vertex that only holds an array: every spec of its shape."""
    return tuple(holding(spec, axis_sizes) for spec in specs_of_shape(shape, axis_sizes))


def holding(spec: Spec, axis_sizes: tuple[int, ...]) -> Strategy:
    """The strategy of a vertex that takes and leaves an array with one spec."""
    return Strategy((spec,), (spec,), shards(spec, axis_sizes), ((),), (spec,))


def _bytes(strategy: Strategy) -> float:
    return sum(m.fraction for moves in strategy.reductions for m in moves)


def _spec(dims: Sequence[Sequence[int]], axes_of: dict[int, tuple[int, ...]], rule: Rule, sizes: Sequence[int]):
    """The spec of a tensor whose dimensions are made of factors; None where a minor factor is split before its major."""
    spec = []
    for factors in dims:
        axes: tuple[int, ...] = ()
        whole_before = True
        for f in factors:
            mine = axes_of.get(f, ())
            if mine and not whole_before:
                return None
            parts = 1
            for a in mine:
                parts *= sizes[a]
            whole_before = whole_before and parts == rule.sizes[f]
            axes += mine
        spec.append(axes)
    return tuple(spec)


def _with_reductions(rule: Rule, factors: Sequence[int], sizes: tuple[int, ...]) -> list[Strategy]:
    axes_of: dict[int, tuple[int, ...]] = {}
    parts = 1
    for axis, f in enumerate(factors):
        if f >= 0:
            axes_of[f] = (*axes_of.get(f, ()), axis)
            parts *= sizes[axis]
    for f, axes in axes_of.items():
        n = 1
        for a in axes:
            n *= sizes[a]
        if rule.sizes[f] % n:
            return []
    specs = [_spec(dims, axes_of, rule, sizes) for dims in (*rule.operands, *rule.results)]
    operands, results = specs[: len(rule.operands)], specs[len(rule.operands) :]
    if any(s is None for s in specs):
        return []
    shapes = [tuple(_dimension(rule, fs) for fs in dims) for dims in rule.results]
    partial = [a for f, axes in sorted(axes_of.items()) if f in rule.reduction for a in axes]
    if not partial:
        return [Strategy(tuple(operands), tuple(results), parts, ((),) * len(results), tuple(results))]
    plain = [_all_reduce(spec, partial, sizes) for spec in results]
    found = [Strategy(tuple(operands), tuple(results), parts, tuple(plain), tuple(results))]
    if rule.reduction_is_sum and len(results) == 1:
        for places in product(range(-1, len(shapes[0])), repeat=len(partial)):
            scattered = _scatter(results[0], shapes[0], partial, places, sizes)
            if scattered is not None:
                found.append(Strategy(tuple(operands), (scattered[-1].spec,), parts, (scattered,), tuple(results)))
    return found


def _dimension(rule: Rule, factors: Sequence[int]) -> int:
    n = 1
    for f in factors:
        n *= rule.sizes[f]
    return n


def _all_reduce(spec: Spec, partial: Sequence[int], sizes: Sequence[int]) -> tuple[Move, ...]:
    return tuple(Move("all_reduce", a, 1.0 / shards(spec, sizes), spec) for a in partial)


def _scatter(spec: Spec, shape: Sequence[int], partial: Sequence[int], places: Sequence[int], sizes: Sequence[int]):
    """Scatter each partial axis with a place into that dimension, then all-reduce the others; None where impossible."""
    if all(place < 0 for place in places):
        return None
    moves: list[Move] = []
    for axis, place in zip(partial, places, strict=True):
        if place < 0:
            continue
        if spec[place] and axis < max(spec[place]):
            return None
        before = 1.0 / shards(spec, sizes)
        spec = tuple((*axes, axis) if d == place else axes for d, axes in enumerate(spec))
        if not divides(spec, shape, sizes):
            return None
        moves.append(Move("reduce_scatter", axis, before, spec))
    rest = [a for a, place in zip(partial, places, strict=True) if place < 0]
    return (*moves, *_all_reduce(spec, rest, sizes))

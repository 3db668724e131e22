"""A lower bound on a step's time, in some milliseconds.

Two facts together. (1) The largest load is at least any weighted mean of the loads, so that with weights u, v of
devices and prices p of memory

    J >= g(u, v, p) = sum_t min_s (u F_ts + v R_ts + p M_ts) - p limit.

Where devices are alike, equal weights are the best ones by symmetry, and only prices of memory are to be found. (2) A
placement of J seconds has no strategy that alone takes more than J. So if g over the strategies of at most J seconds is
more than J, no placement takes J: bisection over J finds where that ends. Of a few large tables (2) matters more.

Where one table decides, equal weights of all devices say too little. Of each kind of the largest table's strategies the
devices are known, up to their names: some have a piece of it, the others have none. The bound then has a weight for
each of these two classes. The devices with pieces of the table weigh more where lookups are levelled, others where
exchanges are. Each other table takes the cheapest of its kinds, with its pieces on the cheapest devices. The bound is
the least one over the kinds of the largest table.

Of few tables all placements are enumerated; those fit whose arrays do, as long as on the fullest device.

Letters for sizes: T tables, N strategies of all tables together, D devices, K memories (of the devices, and of their
hosts where rows may be there), P kinds of all tables.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from cost.base import Problem, num_strategies
from diffshard.base import Proposal
from diffshard.solving.solvers.exhaustive import price
from search_spaces.embedding_tables.device_arrays import DeviceArrays
from search_spaces.embedding_tables.space import EmbeddingTableSpace


class StrategyArrays(NamedTuple):
    """The costs of each strategy on each device.

    Attributes:
      forward_s: seconds of forward lookups, `[D, N]`.
      rest_s: seconds of exchanges and backward pass, `[D, N]`.
      num_bytes: in each memory, `[K, N]`.
      limit_bytes: of each memory, `[K]`.
      alone_fits: whether the memory holds the strategy alone, `[N]`.
      sizes: strategies of each table, `[T]`.
      start: the first strategy of each table, `[T]`.
      first_of_kind: the first strategy of each kind; others of the kind differ from it in devices only.
    """

    forward_s: np.ndarray
    rest_s: np.ndarray
    num_bytes: np.ndarray
    limit_bytes: np.ndarray
    alone_fits: np.ndarray
    sizes: np.ndarray
    start: np.ndarray
    first_of_kind: np.ndarray

    @property
    def alone_s(self) -> np.ndarray:
        """Seconds of a step with this one piece of work only, `[N]`; inf where it does not fit the memory."""
        return np.where(self.alone_fits, self.forward_s.max(0) + self.rest_s.max(0), np.inf)


def strategy_arrays(space: EmbeddingTableSpace) -> StrategyArrays:
    """Lays out the strategies of a space."""
    sizes = np.array([len(strategies) for strategies in space.strategies])
    groups = np.array([len(kind.groups) for strategies in space.strategies for kind in strategies.kinds])
    return StrategyArrays(
        forward_s=_side_by_side([price.forward_s for price in space.prices]),
        rest_s=_side_by_side([price.rest_s for price in space.prices]),
        num_bytes=_side_by_side([np.asarray(usage, float) for usage in space.problem.usage]),
        limit_bytes=np.asarray(space.problem.memory_limit, float),
        alone_fits=np.concatenate(list(map(space.arrays.fits_alone, space.arrays.tables))),
        sizes=sizes,
        start=np.cumsum(sizes) - sizes,
        first_of_kind=np.cumsum(groups) - groups,
    )


def _side_by_side(tables: list[np.ndarray]) -> np.ndarray:
    return np.ascontiguousarray(np.concatenate(tables).T)


_STEPS = 300
"""Steps along the supergradient where memory is scarce or devices differ, about 10 ms; chosen by hand."""
_STEP_SIZE = 0.3  # of the first step, in logarithms of weights; chosen by hand


def lower_bound_s(arrays: StrategyArrays, *, devices_are_alike: bool) -> float:
    """Returns seconds that every placement takes at least; inf where a table has no strategy that fits the memory."""
    alone_s = arrays.alone_s
    if np.isinf(np.minimum.reduceat(alone_s, arrays.start)).any():
        return np.inf
    if not devices_are_alike:
        weighted_s, _, constant_s = _weighted(arrays, alone_s)
        return max(bisected(weighted_s, constant_s, alone_s, arrays.start), 0.0)
    first, num_devices = arrays.first_of_kind, len(arrays.forward_s)
    alone_s, start = alone_s[first], np.searchsorted(first, arrays.start)
    reduced = arrays._replace(
        forward_s=arrays.forward_s[:, first].mean(0, keepdims=True),
        rest_s=arrays.rest_s[:, first].mean(0, keepdims=True),
        num_bytes=arrays.num_bytes[:, first].reshape(-1, num_devices, len(first)).mean(1),
        limit_bytes=arrays.limit_bytes.reshape(-1, num_devices).mean(1),
        sizes=np.diff(start, append=len(first)),
        start=start,
    )
    weighted_s, priced_s, constant_s = _weighted(reduced, alone_s)
    bound_s = max(bisected(weighted_s, constant_s, alone_s, start), 0.0)
    kinds = Kinds(arrays.forward_s[:, first], arrays.rest_s[:, first], priced_s, constant_s, alone_s, start)
    return largest_table_bound_s(kinds, bound_s)


def _weighted(arrays: StrategyArrays, alone_s: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Returns the best weighted sums that are found and memory's part of them, `[N]`, and the price of all memory.

    The sum of tables' minima is to be lowered by the last.
    """
    forward, rest, num_bytes, limit = arrays.forward_s, arrays.rest_s, arrays.num_bytes, arrays.limit_bytes
    num_bytes, limit = num_bytes[np.isfinite(limit)], limit[np.isfinite(limit)]
    table = np.repeat(np.arange(len(arrays.sizes)), arrays.sizes)
    forward_weight, rest_weight = (np.full(len(loads), 1 / len(loads)) for loads in (forward, rest))
    price, scale_s = np.zeros(len(limit)), 0.0
    best = (-np.inf, np.zeros(0), np.zeros(0), 0.0)
    for i in range(_STEPS):
        weighted_s = np.where(
            np.isfinite(alone_s), forward_weight @ forward + rest_weight @ rest + price @ num_bytes, np.inf
        )
        least_s = np.minimum.reduceat(weighted_s, arrays.start)
        value = float(least_s.sum() - price @ limit)
        if value > best[0]:
            best = value, weighted_s, price @ num_bytes, float(price @ limit)
        scale_s = scale_s or max(value, np.finfo(float).tiny)
        at = np.flatnonzero(weighted_s == least_s[table])
        chosen = at[np.unique(table[at], return_index=True)[1]]
        excess = num_bytes[:, chosen].sum(1) / limit - 1
        if len(forward) == 1 and (excess <= 0).all() and not price.any():
            break  # memory is not scarce, and there is nothing else to weigh
        step = _STEP_SIZE / np.sqrt(i + 1)
        forward_weight = _reweighted(forward_weight, forward[:, chosen].sum(1), step)
        rest_weight = _reweighted(rest_weight, rest[:, chosen].sum(1), step)
        price = np.maximum(price + step * scale_s * excess / limit, 0)
    return best[1:]


def _reweighted(weight: np.ndarray, load: np.ndarray, step: float) -> np.ndarray:
    weight = weight * np.exp(step * (load / max(load.max(), np.finfo(float).tiny) - 1))
    return weight / weight.sum()


_TINY = np.finfo(float).tiny
_LARGEST_STEPS, _LARGEST_STEP_SIZE = 32, 1.0
"""Steps along the supergradient, for each of two limits on what a kind takes alone, and the size of the first one.
Chosen by hand."""


class Kinds(NamedTuple):
    """The costs that the kinds of all tables add to equal devices; devices of each in any order.

    Attributes:
      forward_s: seconds of forward lookups, `[D, P]`.
      rest_s: seconds of exchanges and backward pass, `[D, P]`.
      priced_s: what the memory of all devices costs, at prices that are given, `[P]`.
      constant_s: what the sum of all tables' minima is to be lowered by, for these prices.
      alone_s: seconds of a step with this kind only, `[P]`; inf where it does not fit the memory.
      start: the first kind of each table, `[T]`.
    """

    forward_s: np.ndarray
    rest_s: np.ndarray
    priced_s: np.ndarray
    constant_s: float
    alone_s: np.ndarray
    start: np.ndarray


def largest_table_bound_s(kinds: Kinds, bound_s: float) -> float:
    """Returns seconds that every placement takes at least, on alike devices; not less than `bound_s`.

    Args:
      bound_s: any lower bound, which tells which kinds can be in a placement near it.
    """
    mean_s = kinds.priced_s + (kinds.forward_s + kinds.rest_s).mean(0)
    least_s = np.minimum.reduceat(np.where(np.isfinite(kinds.alone_s), mean_s, np.inf), kinds.start)
    largest = int(least_s.argmax())
    ends = np.append(kinds.start[1:], len(mean_s))
    bounds = {}
    for kind in range(kinds.start[largest], ends[largest]):
        if np.isfinite(kinds.alone_s[kind]):
            only = _with_only(kinds, kind, largest, int(ends[largest]))
            bounds[kind] = bisected(mean_s, kinds.constant_s, only.alone_s, kinds.start), only
    done = set()
    while True:
        kind = min(bounds, key=lambda k: bounds[k][0])
        kind_bound_s, only = bounds[kind]
        if kind in done:
            return max(bound_s, kind_bound_s)
        done.add(kind)
        bounds[kind] = max(kind_bound_s, _weighed_bound_s(only, kind, max(kind_bound_s, bound_s))), only


def bisected(weighted_s: np.ndarray, constant_s: float, alone_s: np.ndarray, start: np.ndarray) -> float:
    """Returns the least J at which the weighted minima over strategies of at most J seconds alone are at most J.

    Args:
      weighted_s: what each strategy adds to the weighted mean of loads and memory, `[N]`.
      constant_s: what the sum of the minima is to be lowered by.
      alone_s: seconds of a step with this strategy only, `[N]`.
      start: the first strategy of each table, `[T]`.
    """
    limits = np.unique(alone_s[np.isfinite(alone_s)])

    def least_s(index: int) -> float:
        allowed = np.where(alone_s <= limits[index], weighted_s, np.inf)
        return float(np.minimum.reduceat(allowed, start).sum()) - constant_s

    low, high = 0, len(limits) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if least_s(middle) <= limits[middle] else (middle + 1, high)
    # Below limits[low] no placement is possible, or it takes what the strategies below need.
    below_s = least_s(low - 1) if low else np.inf
    return max(least_s(low), min(float(limits[low]), below_s))


def _with_only(kinds: Kinds, kind: int, table: int, end: int) -> Kinds:
    """Returns kinds of which one table has a single one."""
    alone_s = kinds.alone_s.copy()
    alone_s[kinds.start[table] : end] = np.inf
    alone_s[kind] = kinds.alone_s[kind]
    return kinds._replace(alone_s=alone_s)


def _weighed_bound_s(kinds: Kinds, kind: int, bound_s: float) -> float:
    """Returns a bound with weights for devices that have more work of a kind than others, and for the others."""
    work = kinds.forward_s[:, kind] + kinds.rest_s[:, kind]
    has_piece = work > work.min()
    sizes = np.array([has_piece.sum(), len(work) - has_piece.sum()])
    if not sizes[0]:
        return bound_s
    least_s = np.minimum.reduceat(kinds.alone_s, kinds.start)
    table = np.searchsorted(kinds.start, np.arange(len(kinds.alone_s)), side="right") - 1
    shares = np.tile(sizes / len(work), (2, 1))  # of lookups and of the rest, by class
    for _ in range(2):
        allowed = kinds.alone_s <= np.maximum(bound_s, least_s)[table]
        best = -np.inf, kinds.priced_s
        for i in range(_LARGEST_STEPS):
            loads = _loads_by_class(kinds, kind, has_piece, shares / sizes)
            all_s = kinds.priced_s + np.tensordot(shares / sizes, loads, 2)
            weighted_s = np.where(allowed, all_s, np.inf)
            minima_s = np.minimum.reduceat(weighted_s, kinds.start)
            if minima_s.sum() > best[0]:
                best = minima_s.sum(), all_s
            chosen = np.flatnonzero(weighted_s == minima_s[table])
            chosen = chosen[np.unique(table[chosen], return_index=True)[1]]
            means = loads[:, :, chosen].sum(2) / sizes
            step = _LARGEST_STEP_SIZE / np.sqrt(i + 1)
            shares = shares * np.exp(step * (means / np.maximum(means.max(1, keepdims=True), _TINY) - 1))
            shares /= shares.sum(1, keepdims=True)
        bound_s = max(bound_s, bisected(best[1], kinds.constant_s, kinds.alone_s, kinds.start))
    return bound_s


def _loads_by_class(kinds: Kinds, kind: int, has_piece: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Returns the lookups and the rest of all kinds on both classes of devices, `[2, 2, P]`, where that is cheapest.

    Args:
      kinds: whose pieces may be on any devices.
      has_piece: whether a device is of the first class, in the order of `kind`, `[D]`.
      weights: of lookups and of the rest, by class, `[2, 2]`.
    """
    first_less_second = weights[:, 0] - weights[:, 1]
    order = np.argsort(first_less_second[0] * kinds.forward_s + first_less_second[1] * kinds.rest_s, axis=0)
    order[:, kind] = np.argsort(~has_piece, kind="stable")
    classes = np.split(order, [int(has_piece.sum())])
    both = kinds.forward_s, kinds.rest_s
    return np.array([[np.take_along_axis(load, devices, 0).sum(0) for devices in classes] for load in both])


_PLACEMENTS_PER_BLOCK = 1 << 12  # some milliseconds; chosen by hand


def enumerated(problem: Problem, arrays: DeviceArrays) -> Iterator[Proposal]:
    """Yields better and better placements, and in the end the optimum as the bound; inf where none fits."""
    sizes = num_strategies(problem).tolist()
    count, least_excess, least_s = math.prod(sizes), math.inf, math.inf
    best: np.ndarray | None = None
    for start in range(0, count, _PLACEMENTS_PER_BLOCK):
        block = np.arange(start, min(start + _PLACEMENTS_PER_BLOCK, count))
        choices = np.stack(np.unravel_index(block, sizes), axis=1)
        excess = np.maximum(arrays.padded(arrays.needed(choices)) - arrays.limit_bytes[:, None], 0).max(0)
        step_s = price(problem, choices)[0]
        first = int(np.lexsort((step_s, excess))[0])
        if (excess[first], step_s[first]) < (least_excess, least_s):
            best, least_excess, least_s = choices[first], float(excess[first]), float(step_s[first])
        yield Proposal(None if least_excess else best)
    yield Proposal(best, math.inf if least_excess else least_s)

"""From one sharding of an array to another in steps that each move along a single mesh axis.

A reshard over several axes at once ends in XLA's replicate-then-slice fallback, so it is taken apart here, and the same
steps are what is priced and what runs. Letters: a spec is, for each dimension, the mesh axes (by index) that split it,
major to minor; axes are tried in the order of `slow_first`.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

Spec = tuple[tuple[int, ...], ...]


class Move(NamedTuple):
    """One step of a reshard.

    Attributes:
      kind: "slice" (free), "all_to_all", "all_gather", "collective_permute", "all_reduce" or "reduce_scatter".
      axis: the mesh axis; for a permute the largest of those that change places.
      fraction: of the whole array's bytes, the size of the collective along its axis in one group (see
        `cost.collectives`).
      spec: the sharding after the step.
    """

    kind: str
    axis: int
    fraction: float
    spec: Spec


def replicated(rank: int) -> Spec:
    """The spec of an array that every device holds whole."""
    return ((),) * rank


def shards(spec: Spec, axis_sizes: Sequence[int]) -> int:
    """Into how many parts a spec splits an array."""
    parts = 1
    for axes in spec:
        for a in axes:
            parts *= axis_sizes[a]
    return parts


def divides(spec: Spec, shape: Sequence[int], axis_sizes: Sequence[int]) -> bool:
    """Whether every dimension is a multiple of the number of its parts."""
    for n, axes in zip(shape, spec, strict=True):
        parts = 1
        for a in axes:
            parts *= axis_sizes[a]
        if n % parts:
            return False
    return True


@lru_cache(maxsize=100_000)
def specs_of_shape(shape: tuple[int, ...], axis_sizes: tuple[int, ...]) -> tuple[Spec, ...]:
    """Every spec that divides a shape, each mesh axis on one dimension or on none; replicated first."""
    found = []
    for places in product(range(-1, len(shape)), repeat=len(axis_sizes)):
        spec = tuple(tuple(a for a, place in enumerate(places) if place == d) for d in range(len(shape)))
        if all(axis_sizes[a] > 1 or place < 0 for a, place in enumerate(places)) and divides(spec, shape, axis_sizes):
            found.append(spec)
    return tuple(found)


@lru_cache(maxsize=500_000)
def moves(source: Spec, target: Spec, axis_sizes: tuple[int, ...], slow_first: tuple[int, ...]) -> tuple[Move, ...]:
    """The steps from one spec to another: slices early, gathers late and over slow links before fast ones.

    Args:
      source, target: specs of one array.
      axis_sizes: devices along each mesh axis.
      slow_first: the mesh axes from the slowest link to the fastest.
    """
    if source == target:
        return ()
    now = [list(axes) for axes in source]
    goal = {a: d for d, axes in enumerate(target) for a in axes}
    steps: list[Move] = []

    def place(axis: int) -> int | None:
        return next((d for d, axes in enumerate(now) if axis in axes), None)

    def leaving(dim: int) -> bool:
        return any(goal.get(a) != dim for a in now[dim])

    def local() -> float:
        return 1.0 / shards(tuple(tuple(x) for x in now), axis_sizes)

    def add(kind: str, axis: int, fraction: float) -> None:
        steps.append(Move(kind, axis, fraction, tuple(tuple(x) for x in now)))

    def step() -> bool:
        order = [a for a in slow_first if place(a) != goal.get(a)]
        for a in sorted(order):
            d = goal.get(a)
            if place(a) is None and d is not None and not leaving(d):
                now[d].append(a)
                add("slice", a, 0.0)
                return True
        for strict in (True, False):
            for a in order:
                i, j = place(a), goal.get(a)
                if i is not None and j is not None and now[i][-1] == a and not (strict and leaving(j)):
                    before = local()
                    now[i].pop()
                    now[j].append(a)
                    add("all_to_all", a, before * axis_sizes[a])
                    return True
        for a in order:
            i = place(a)
            if i is not None and goal.get(a) is None and now[i][-1] == a:
                now[i].pop()
                add("all_gather", a, local())
                return True
        return False

    def reorder() -> None:
        for d, axes in enumerate(now):
            stays = [a for a in target[d] if a in axes]
            goes = sorted((a for a in axes if goal.get(a) != d), key=slow_first.index, reverse=True)
            now[d] = stays + goes
        changed = [a for d in range(len(now)) for a in now[d]]
        add("collective_permute", max(changed, key=lambda a: -slow_first.index(a)), local())

    while any(place(a) != goal.get(a) for a in range(len(axis_sizes))):
        if not step():
            reorder()
    if tuple(tuple(x) for x in now) != target:
        reorder()
    return tuple(steps)

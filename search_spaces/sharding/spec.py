"""Specs: how a sharding splits an array, as plain tuples.

A spec is, for each dimension, the mesh axes (by index) that split it, major to minor.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

Spec = tuple[tuple[int, ...], ...]


def replicated(rank: int) -> Spec:
    """The spec of an array that every device holds whole."""
    return ((),) * rank


def placed(spec: Spec) -> frozenset[int]:
    """The mesh axes that split something."""
    return frozenset(a for axes in spec for a in axes)


@lru_cache(maxsize=500_000)
def parts_of(spec: Spec, axis_sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Into how many parts a spec splits each dimension."""
    return tuple(prod(axis_sizes[a] for a in axes) for axes in spec)


@lru_cache(maxsize=500_000)
def shards(spec: Spec, axis_sizes: tuple[int, ...]) -> int:
    """Into how many parts a spec splits an array."""
    return prod(axis_sizes[a] for axes in spec for a in axes)


def divides(spec: Spec, shape: Sequence[int], axis_sizes: tuple[int, ...]) -> bool:
    """Whether every dimension is a multiple of the number of its parts."""
    return all(n % parts == 0 for n, parts in zip(shape, parts_of(spec, axis_sizes), strict=True))


@lru_cache(maxsize=100_000)
def specs_of_shape(shape: tuple[int, ...], axis_sizes: tuple[int, ...]) -> tuple[Spec, ...]:
    """Every spec that divides a shape, each mesh axis on one dimension or on none; replicated first."""
    found = []
    for places in product(range(-1, len(shape)), repeat=len(axis_sizes)):
        spec = tuple(tuple(a for a, place in enumerate(places) if place == d) for d in range(len(shape)))
        if all(axis_sizes[a] > 1 or place < 0 for a, place in enumerate(places)) and divides(spec, shape, axis_sizes):
            found.append(spec)
    return tuple(found)


class Axes(NamedTuple):
    """What strategies need to know of a mesh's axes, which are numbered as in the mesh.

    Attributes:
      sizes: devices along each.
      fast_first: all axes, the fastest link first.
      alike: groups of axes that take kinds of dimensions in order (see `dimensions.axes_of`), so that of the copies of
        a plan with such axes swapped only one is in the space.
    """

    sizes: tuple[int, ...]
    fast_first: tuple[int, ...]
    alike: tuple[tuple[int, ...], ...] = ()

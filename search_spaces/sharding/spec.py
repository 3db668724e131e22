"""Functions of specs and shapes: the parts into which a spec splits a shape, and the specs that fit a shape."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from math import prod

from search_spaces.partition_specs import IndexedSpec
from search_spaces.sharding.graph import Value


def replicated_spec(rank: int) -> IndexedSpec:
    """Returns the spec of an array that every device holds whole."""
    return ((),) * rank


def axes_in(spec: IndexedSpec) -> frozenset[int]:
    """Returns the mesh axes that split something."""
    return frozenset(a for axes in spec for a in axes)


@lru_cache(maxsize=500_000)
def parts_of(spec: IndexedSpec, axis_sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Counts the parts into which a spec splits each dimension."""
    return tuple(prod(axis_sizes[a] for a in axes) for axes in spec)


@lru_cache(maxsize=500_000)
def shards(spec: IndexedSpec, axis_sizes: tuple[int, ...]) -> int:
    """Counts the parts into which a spec splits an array."""
    return prod(axis_sizes[a] for axes in spec for a in axes)


def local_bytes(value: Value, spec: IndexedSpec, axis_sizes: tuple[int, ...]) -> float:
    """Returns the bytes of one device's part of a value."""
    return value.num_bytes / shards(spec, axis_sizes)


def divides(spec: IndexedSpec, shape: Sequence[int], axis_sizes: tuple[int, ...]) -> bool:
    """Returns whether every dimension is a multiple of the number of its parts; an empty one has a single part."""
    return all(
        n % parts == 0 and (n > 0 or parts == 1) for n, parts in zip(shape, parts_of(spec, axis_sizes), strict=True)
    )


MOST_PADDING = 0.02
"""The largest padding of an uneven split, as a share of the dimension; 50,257 words on 8 devices need 0.02%."""


def may_split(size: int, axes: Sequence[int], axis_sizes: Sequence[int]) -> bool:
    """Returns whether axes may split a dimension within a function: evenly, or by a longest axis with little padding.

    JAX refuses arguments and results whose dimensions do not divide (`IndivisibleError`), but takes constraints on what
    lies between, which XLA pads: a vocabulary of 50,257 over 8 devices becomes 8 parts of 6,283. Measured on 0.10.2 and
    0.11.2: cross entropy over it does an eighth of the arithmetic in an eighth of the memory, as that of 50,264 does;
    results are equal, and its reshards are one collective each. Left out, the best plan of a small GPT with that
    vocabulary is 1.2 to 1.4 times as slow. Heads and other short dimensions would mostly pad; they are split evenly.

    Padded parts of 4 do not start where those of 8 do, so that XLA would replicate the array to get from one to the
    other; an uneven dimension is only ever whole or in as many parts as the longest axis has devices.
    """
    parts = prod(axis_sizes[a] for a in axes)
    if size == 0 or size % parts == 0:
        return size > 0 or parts == 1
    return len(axes) == 1 and parts == max(axis_sizes) and -size % parts <= MOST_PADDING * size


def divides_or_pads(spec: IndexedSpec, shape: Sequence[int], axis_sizes: tuple[int, ...]) -> bool:
    """Returns whether axes may split every dimension as they do (see `may_split`)."""
    return all(may_split(n, axes, axis_sizes) for n, axes in zip(shape, spec, strict=True))


@lru_cache(maxsize=100_000)
def specs_of_shape(
    shape: tuple[int, ...], axis_sizes: tuple[int, ...], with_padding: bool = False
) -> tuple[IndexedSpec, ...]:
    """Lists every spec that divides a shape, with each mesh axis on one dimension or none; replicated comes first."""
    fits = divides_or_pads if with_padding else divides
    specs = []
    for places in product(range(-1, len(shape)), repeat=len(axis_sizes)):
        spec = tuple(tuple(a for a, place in enumerate(places) if place == d) for d in range(len(shape)))
        if all(axis_sizes[a] > 1 or place < 0 for a, place in enumerate(places)) and fits(spec, shape, axis_sizes):
            specs.append(spec)
    return tuple(specs)

"""Scales of earlier steps: operands are rounded by the largest magnitudes that they had before.

The largest magnitude of an array that is split is a maximum over the mesh, for which a product in float8 waits. With a
delayed scale it does not: it takes the largest of the last steps, and this step's is found beside the arithmetic. One
all-reduce at the end of the step brings all of them together. They are one small array, which the step carries to the
next one. What is larger than `MARGIN` allows is cut off at the largest number of the format, and counted.

An operand without a history, as in the first step, has the scale 1, as in Transformer Engine.

Source: Micikevicius et al., "FP8 Formats for Deep Learning" (2022), https://arxiv.org/abs/2209.05433, section 3; the
recipe `DelayedScaling` of NVIDIA's Transformer Engine.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from search_spaces.sharding.graph import Graph, Value, Vertex, trips_of
from search_spaces.sharding.product_formats import FORMATS, takes

NAME = "float8_delayed"
"""The format that has such scales."""
HISTORY = 16
"""Steps whose largest magnitudes count; as many as in the examples of Transformer Engine."""
MARGIN = 2.0
"""How much larger than before a magnitude may be without being cut off. Numbers with an exponent lose nothing by it but
the range of the smallest ones, while the maxima of neighbouring steps hardly ever differ by so much."""


class Scales(NamedTuple):
    """All delayed scales that a function can have: one for what the products of one loop's body read of a value.

    Attributes:
      number: of the scale of an operand, by the product's vertex and the operand's position.
      trips: of each scale, the lengths of the loops around its products.
      largest: the largest number of each scale's format.
      read_by: of each scale the first product that has it, and the operand's position there.
    """

    number: dict[tuple[int, int], int]
    trips: list[tuple[int, ...]]
    largest: list[float]
    read_by: list[tuple[Vertex, int]]

    @staticmethod
    def of(graph: Graph) -> "Scales":
        """Returns those of all products that can be in the format, so that all plans of a function have the same."""
        numbers: dict[Any, int] = {}
        scales = Scales({}, [], [], [])
        for vertex in graph.operations():
            for position, operand in enumerate(vertex.operands if takes(vertex, NAME) else ()):
                assert isinstance(operand, Value)
                dtype = FORMATS[NAME].dtypes(vertex)[position]
                key = operand.id, jnp.dtype(dtype), tuple(map(id, vertex.callers))
                if key not in numbers:
                    numbers[key] = len(numbers)
                    scales.trips.append(trips_of(vertex))
                    scales.read_by.append((vertex, position))
                    scales.largest.append(float(jnp.finfo(dtype).max))
                scales.number[vertex.index, position] = numbers[key]
        return scales

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the maxima: a row for each trip of each scale; in the last column how often it was too small."""
        return sum(map(prod, self.trips)), HISTORY + 1

    def of_products(self, vertices: Collection[int]) -> list[int]:
        """Returns the numbers of the scales of some products."""
        return sorted({number for (vertex, _), number in self.number.items() if vertex in vertices})


class DelayedScales:
    """The delayed scales of one step while it is traced, and the largest magnitudes that it finds.

    Args:
      products: the vertices that are in the format.
      maxima: `[scales and trips, HISTORY + 1]` float32, of the steps before.
    """

    def __init__(self, scales: Scales, products: Collection[int], maxima: jax.Array):
        self.scales, self.products, self.maxima = scales, frozenset(products), maxima
        counts = [prod(trips) for trips in scales.trips]
        self._largest = np.repeat(np.array(scales.largest, np.float32), counts)
        most = jnp.max(maxima[:, :HISTORY], axis=1)
        self._most = jnp.where(most > 0, MARGIN * most, self._largest)  # what fits without being cut off
        least = float(jnp.finfo(jnp.float32).smallest_normal)
        parts = jnp.split(jnp.maximum(self._most / self._largest, least), np.cumsum(counts)[:-1])
        self._now = {i: part.reshape(trips) for i, (part, trips) in enumerate(zip(parts, scales.trips, strict=True))}
        self._found: dict[int, Any] = {}

    def rounded(self, array: Any, vertex: Vertex, position: int) -> tuple[jax.Array, jax.Array]:
        """Returns an operand's codes and their scale, and takes note of its largest magnitude.

        What is not finite is not a number in the codes.
        """
        number, dtype = self.scales.number[vertex.index, position], FORMATS[NAME].dtypes(vertex)[position]
        scale, largest = self._now[number], self.scales.largest[number]
        self._found[number] = lax.stop_gradient(jnp.max(jnp.abs(array), initial=0).astype(jnp.float32))
        numbers = jnp.where(jnp.isfinite(array), array.astype(jnp.float32) / scale, jnp.nan)
        return jnp.clip(numbers, -largest, largest).astype(dtype), scale

    def found(self, vertex: Vertex, position: int) -> jax.Array:
        """Returns the largest magnitude of an operand that was rounded in this step."""
        return self._found[self.scales.number[vertex.index, position]]

    def of_loop(self, vertices: Collection[int]) -> list[int]:
        """Returns the numbers of the scales that a loop's body reads: one for each trip."""
        return self.scales.of_products(self.products & set(vertices))

    def now(self, numbers: Sequence[int]) -> list[jax.Array]:
        """Returns some scales; within a loop those of the trip."""
        return [self._now[number] for number in numbers]

    @contextmanager
    def trip(self, numbers: Sequence[int], scales: Sequence[jax.Array]) -> Iterator[list[jax.Array]]:
        """Takes other scales for a trip of a loop; what it yields has the trip's largest magnitudes when it is over."""
        outside, self._now = self._now, self._now | dict(zip(numbers, scales, strict=True))
        found: list[jax.Array] = []
        try:
            yield found
            found += [self._found[number] for number in numbers]
        finally:
            self._now = outside

    def found_in_loop(self, numbers: Sequence[int], largest: Sequence[jax.Array]) -> None:
        """Takes note of the largest magnitudes of all trips."""
        self._found.update(zip(numbers, largest, strict=True))

    def after(self, axes: Sequence[str] = ()) -> jax.Array:
        """Returns the maxima for the next step; `axes` are the mesh axes over which operands are split.

        What is not finite has no part in them, but counts as cut off.
        """
        own = set(self.scales.of_products(self.products))
        counts = [prod(trips) for trips in self.scales.trips]
        found = [self._found[i].ravel() if i in own else jnp.zeros(n) for i, n in enumerate(counts)]
        largest = lax.stop_gradient(jnp.concatenate(found))
        largest = lax.pmax(largest, tuple(axes)) if axes else largest
        kept = jnp.where(jnp.isfinite(largest), largest, 0)[:, None]
        times = self.maxima[:, HISTORY:] + ~(largest <= self._most)[:, None]
        rows = jnp.concatenate([kept, self.maxima[:, : HISTORY - 1], times], axis=1)
        is_own = np.repeat([i in own for i in range(len(counts))], counts)[:, None]
        return jnp.where(is_own, rows, self.maxima)

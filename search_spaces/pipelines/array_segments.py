"""Which arguments and results of a step are several arrays, one for each segment of the layers."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from search_spaces.pipelines.numbered_program import shape_of


class ArraySegments(NamedTuple):
    """How an array is divided by layers.

    Attributes:
      dim: its dimension over the layers.
      bounds: `[N + 1]` where the segments begin, then the number of layers.
    """

    dim: int
    bounds: tuple[int, ...]

    @property
    def num_segments(self) -> int:
        """The number of segments, N."""
        return len(self.bounds) - 1

    def split(self, array: Any) -> list[Any]:
        """Returns the segments of an array."""
        index = (slice(None),) * self.dim
        return [array[(*index, slice(a, b))] for a, b in itertools.pairwise(self.bounds)]

    def split_shape(self, shape: jax.ShapeDtypeStruct) -> list[jax.ShapeDtypeStruct]:
        """Returns the shapes of the segments of an array."""
        before, after = shape.shape[: self.dim], shape.shape[self.dim + 1 :]
        return [
            jax.ShapeDtypeStruct((*before, b - a, *after), shape.dtype, weak_type=shape.weak_type)
            for a, b in itertools.pairwise(self.bounds)
        ]


@dataclass(frozen=True)
class Segments:
    """Which flat arguments and results of a step are several arrays, one for each segment of some layers.

    Attributes:
      arguments: for each flat argument of the whole step how it is divided; None if it stays one array.
      results: the same of each flat result.
    """

    arguments: tuple[ArraySegments | None, ...]
    results: tuple[ArraySegments | None, ...]

    def positions(self) -> list[int]:
        """Returns for each flat argument of the whole step the position of its first array in the divided one."""
        counts = [1 if s is None else s.num_segments for s in self.arguments]
        return list(itertools.accumulate(counts, initial=0))[:-1]

    def split_shapes(self, arrays: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        """Returns the shapes of the arguments of the divided step from the arguments of the whole one."""
        divided: list[jax.ShapeDtypeStruct] = []
        for array, segments in zip(arrays, self.arguments, strict=True):
            divided += [shape_of(array)] if segments is None else segments.split_shape(shape_of(array))
        return divided

    def grouped_results(self, arrays: Sequence[Any]) -> Iterator[tuple[ArraySegments | None, list[Any]]]:
        """Yields for each flat result of the whole step how it is divided, and its arrays."""
        rest = iter(arrays)
        for segments in self.results:
            yield segments, list(itertools.islice(rest, 1 if segments is None else segments.num_segments))

    def divided_feedback(self, feedback: Sequence[int | None]) -> list[int | None]:
        """Returns for each result of the divided step the argument that it replaces, from those of the whole one."""
        positions, divided = self.positions(), []
        for replaced, segments in zip(feedback, self.results, strict=True):
            count = 1 if segments is None else segments.num_segments
            divided += [None if replaced is None else positions[replaced] + i for i in range(count)]
        return divided

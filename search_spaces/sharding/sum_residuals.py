"""Residuals of sums that are sent as codes with error feedback: what rounding loses of them, for the next step.

Every device has a residual of its own, float32, of what it adds to a sum. Their total is what the sum still lacks. So
the residuals of one sum are an array of as many whole values as devices share it; each device holds its part of one.
Added over its first dimension and divided again, that array fits any other mesh.
"""

from collections.abc import Iterable
from math import prod
from typing import Any, NamedTuple

import jax.numpy as jnp

from search_spaces.partition_specs import IndexedSpec
from search_spaces.sharding.base import Layout, Node, ShardingStrategy
from search_spaces.sharding.coded_sums import coded_sum
from search_spaces.sharding.codes import has_feedback
from search_spaces.sharding.delayed_scales import NAME, Scales
from search_spaces.sharding.graph import Graph, Vertex, trips_of
from search_spaces.sharding.resharding import Paths
from search_spaces.sharding.spec import shards

BYTES = 4
"""Bytes of one number of a residual: float32."""
MAXIMA = -1
"""In the place of an operation: the largest magnitudes of earlier steps, which a step carries as it does residuals."""


class SumResidual(NamedTuple):
    """The residuals of one operation's partial sums.

    Attributes:
      vertex: the index of the operation; or `MAXIMA`, for those of all operands with delayed scales.
      shape: `[devices that share the sum, trips of each loop around the operation, value]`, float32. A dimension of the
        value is one for each mesh axis that splits its sums, and one for what is left of it.
      rows: dimensions of the value in this array along which each device's part is cut, to be sent to others.
    """

    vertex: int
    shape: tuple[int, ...]
    spec: IndexedSpec
    rows: tuple[int, ...]

    def local_elements(self, axis_sizes: tuple[int, ...]) -> int:
        """Returns how many numbers a device holds."""
        return prod(self.shape) // shards(self.spec, axis_sizes)

    def rows_first(self, array: Any) -> Any:
        """Returns a device's part in one trip, `[value]`, with `rows` as the first dimensions."""
        return jnp.moveaxis(array, self.rows, range(len(self.rows)))

    def rows_back(self, array: Any) -> Any:
        """Undoes `rows_first`."""
        return jnp.moveaxis(array, range(len(self.rows)), self.rows)


def residual_of(path: Paths, vertex: Vertex, strategy: ShardingStrategy) -> SumResidual | None:
    """Returns the residuals that a strategy of an operation keeps; None if it keeps none."""
    if not has_feedback(strategy.sent_in):
        return None
    (value,), sizes = vertex.results, path.axis_sizes
    steps = [step for step in strategy.reductions[0] if sizes[step.axis] > 1]
    holders = sorted(step.axis for step in steps[coded_sum(path, value, steps, strategy.sent_in).num_exact :])
    dims: list[tuple[int, tuple[int, ...]]] = []
    rows = []
    for size, axes in zip(value.shape, strategy.results[0], strict=True):
        for axis in axes:
            rows += [len(dims)] if axis in holders else []
            dims.append((sizes[axis], () if axis in holders else (axis,)))
        dims.append((size // prod(sizes[axis] for axis in axes), ()))
    before = [(prod(sizes[axis] for axis in holders), tuple(holders)), *((n, ()) for n in trips_of(vertex))]
    shape, spec = zip(*before, *dims, strict=True)
    return SumResidual(vertex.index, shape, spec, tuple(rows))


def residuals_of(path: Paths, graph: Graph, layout: Layout) -> tuple[SumResidual, ...]:
    """Returns the residuals that a layout's program takes and returns, in the order of operations, and then maxima."""
    residuals = (residual_of(path, vertex, layout.strategies[vertex.index]) for vertex in graph.operations())
    found = tuple(residual for residual in residuals if residual is not None)
    if all(name != NAME for _, name in layout.rounded):
        return found
    return (*found, SumResidual(MAXIMA, (1, *Scales.of(graph).shape), ((), (), ()), ()))


def bytes_of_strategies(path: Paths, nodes: Iterable[Node], is_donated: bool) -> dict[int, list[float]]:
    """Returns the bytes of residuals on a device with each strategy of some nodes, by vertex: both steps', or one's."""
    num_bytes = {}
    for vertex, _, strategies in nodes:
        residuals = (residual_of(path, vertex, strategy) for strategy in strategies)
        elements = [0 if r is None else r.local_elements(path.axis_sizes) for r in residuals]
        num_bytes[vertex.index] = [float(BYTES * n * (1 if is_donated else 2)) for n in elements]
    return num_bytes


def refitted(array: Any, shape: tuple[int, ...]) -> Any:
    """Returns residuals of a sum for as many devices as a shape has, which lack as much of it together."""
    whole = jnp.reshape(jnp.sum(array, axis=0), shape[1:])
    return jnp.broadcast_to(whole / shape[0], shape)

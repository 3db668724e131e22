"""What a layout is predicted to cost, place by place."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from search_spaces.sharding.resharding import Move
from search_spaces.sharding.space import Layout, ShardingSpace


class Transfer(NamedTuple):
    """A predicted collective.

    Attributes:
      kind, axis: what moves along which mesh axis.
      num_bytes: the full size along the axis in one group of devices (see `cost.collectives`).
      count: how often in one step.
      seconds: in one step.
      vertex: the index of the vertex that it belongs to.
    """

    kind: str
    axis: str
    num_bytes: float
    count: float  # pyright: ignore[reportIncompatibleMethodOverride]
    seconds: float
    vertex: int


def transfers(space: ShardingSpace, choice: Sequence[int], layout: Layout) -> list[Transfer]:
    """Every collective of a layout: those that finish reductions or gather copies, then the reshards."""
    found: list[Transfer] = []

    def add(move: Move, num_bytes: float, share: float, weight: float, vertex: int) -> None:
        if move.kind != "slice" and space.axis_sizes[move.axis] > 1:
            seconds = weight * space.prices.move_s(move, num_bytes, share)
            axis = space.axis_names[move.axis]
            found.append(Transfer(move.kind, axis, move.fraction * num_bytes, weight, seconds, vertex))

    for vertex, strategy in zip(space.graph.vertices, layout.strategy, strict=True):
        for value, steps in zip(vertex.results, strategy.reductions, strict=True):
            for move in steps:
                add(move, value.num_bytes, space.latency_share(value), vertex.weight, vertex.index)
    for node, result, reader, operand, value, weight in space.links():
        if node == reader:
            continue
        source = space.nodes[node].strategies[choice[node]].results[result]
        target = space.target(reader, operand, choice[reader])
        vertex = space.nodes[reader].vertex.index
        for move in space.prices.path(source, target):
            add(move, value.num_bytes, space.latency_share(value), weight, vertex)
    return found


def compute_seconds(space: ShardingSpace, layout: Layout) -> np.ndarray:
    """Seconds of arithmetic and memory traffic of each vertex in one step, `[vertices]`."""
    return np.array(
        [
            float(space.compute_s(vertex, (strategy,))[0])
            for vertex, strategy in zip(space.graph.vertices, layout.strategy, strict=True)
        ]
    )

"""What XLA's partitioner is known to compute wrongly although it is told every sharding.

All strategies of the common operations were run one by one, told by sharding constraints, on meshes of up to 16
devices (JAX 0.10.2, Shardy and GSPMD, whose last stage is the same). All were right but one kind of product:
`bk,bk->b` with b split over the axis x and k over y and z leaves partial results, which are to be added over y and z.
If the result's b is then split over x and y, XLA adds parts that do not belong together. An explicit program for each
device has the plan's own collectives, and is right.
"""

from collections.abc import Sequence

from search_spaces.sharding.base import ShardingStrategy
from search_spaces.sharding.graph import Graph, Vertex
from search_spaces.sharding.spec import axes_in


def is_partitioned_wrongly(vertex: Vertex, strategy: ShardingStrategy) -> bool:
    """Tells whether XLA's partitioner computes an operation wrongly with a strategy that it is told by constraints.

    Such a product contracts over several mesh axes. Some of them split a batch dimension of the result, which others
    split already, and some split nothing of the result.
    """
    if vertex.primitive != "dot_general":
        return False
    assert vertex.equation is not None
    (contracted, _), (batch, _) = vertex.equation.params["dimension_numbers"]
    (operand, *_), (before,), (after,) = strategy.operands, strategy.unreduced, strategy.results
    summed = axes_in(tuple(operand[d] for d in contracted))
    is_scattered = any(before[d] and summed & set(after[d]) for d in range(len(batch)))  # they come first in a result
    return is_scattered and not summed <= axes_in(after)


def wrongly_partitioned(graph: Graph, strategies: Sequence[ShardingStrategy]) -> list[Vertex]:
    """Returns the operations that XLA's partitioner computes wrongly with these strategies, one for each vertex."""
    return [v for v in graph.operations() if is_partitioned_wrongly(v, strategies[v.index])]

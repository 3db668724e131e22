"""Bytes that an operation moves between a device and its memory."""

import numpy as np

from search_spaces.sharding.graph import Operand, Value, Vertex
from search_spaces.sharding.spec import Spec, shards
from search_spaces.sharding.strategies import ShardingStrategy

# Read of their first operand no more than they return.
PICKS = frozenset({"gather", "slice", "dynamic_slice"})
# Write their update into the first operand's memory; by name, which operand the update is.
UPDATES = {
    "dynamic_update_slice": 1,
    "scatter": 2,
    "scatter-add": 2,
    "scatter-mul": 2,
    "scatter-min": 2,
    "scatter-max": 2,
}


def touched_bytes(
    vertex: Vertex, strategy: ShardingStrategy, written: np.ndarray, axis_sizes: tuple[int, ...]
) -> float:
    """What an operation reads and writes on one device: nothing of what is fused, of a table only what it picks.

    Args:
      vertex: an operation.
      strategy: how it runs.
      written: for each value, by id, whether it exists in memory.
      axis_sizes: devices along each mesh axis.
    """

    def local(array: Operand, spec: Spec) -> float:
        if not isinstance(array, Value) or not written[array.id]:
            return 0.0
        return array.num_bytes / shards(spec, axis_sizes)

    reads = [local(o, spec) for o, spec in zip(vertex.operands, strategy.operands, strict=True)]
    writes = [local(v, spec) for v, spec in zip(vertex.results, strategy.unreduced, strict=True)]
    name = vertex.equation.primitive.name if vertex.equation is not None else ""
    if name in PICKS:
        reads[0] = min(reads[0], writes[0])
    elif name in UPDATES and reads[0]:
        reads[0], writes[0] = 0.0, reads[UPDATES[name]]
    return sum(reads) + sum(writes)

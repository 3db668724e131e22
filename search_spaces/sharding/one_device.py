"""What the step of a space takes on one device alone, which computes everything and waits for no links."""

from typing import NamedTuple

import numpy as np

from search_spaces.sharding.memory import memory_use, usages_of
from search_spaces.sharding.nodes import Node
from search_spaces.sharding.scheduling import held_positions
from search_spaces.sharding.space import ShardingSpace
from search_spaces.sharding.spec import replicated_spec
from search_spaces.sharding.strategies import strategy_of_spec, whole_strategy


class OneDevice(NamedTuple):
    """A step on one device, with all of its state in the memory of the device.

    Attributes:
      step_s: predicted seconds.
      peak_bytes: predicted peak of its memory.
    """

    step_s: float
    peak_bytes: float


def on_one_device(space: ShardingSpace) -> OneDevice:
    """Returns the seconds and the memory of the step of a space where nothing is split."""
    graph, sizes = space.graph, space.axis_sizes

    def whole(node: Node) -> Node:
        if node.shared_value is None:
            return node._replace(strategies=(whole_strategy(node.vertex),))
        return node._replace(strategies=(strategy_of_spec(replicated_spec(len(node.shared_value.shape)), sizes),))

    nodes = [whole(node) for node in space.nodes]
    held = held_positions(graph, sizes, space.hardware, space.reshard_costs.path)
    usages = usages_of(graph, nodes, space.shared_reshards, space.lifetimes, sizes, held, {}, {}, ())
    vertices = (vertex for vertex in graph.vertices if vertex.kind in ("operation", "stack"))
    return OneDevice(
        sum(space.node_costs.chosen_compute_s(vertex, whole_strategy(vertex)) for vertex in vertices),
        float(np.max(memory_use(usages, (0,) * len(nodes)).num_bytes)),
    )

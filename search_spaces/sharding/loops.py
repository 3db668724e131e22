"""What the trips of a loop have to do with each other: which carried arrays each trip waits for, and what it reads.

A compiled loop ends all that a trip has begun before the next one begins. So the collectives of two trips are never
combined, and what the first product of a trip is computed from has no time to come from the trip before.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from search_spaces.sharding.graph import Graph, Region, Value, Vertex, is_contraction

Steps = Sequence[Vertex | Region]


def loops_of(steps: Steps) -> Iterator[Region]:
    """Returns the scans and while loops among some steps and inside of these, outer ones before inner ones."""
    for step in steps:
        if isinstance(step, Region):
            if step.carries or step.slices:
                yield step
            for block in step.blocks:
                yield from loops_of(block.steps)


def vertices_of(steps: Steps) -> Iterator[Vertex]:
    """Returns the vertices of some steps and of the blocks inside of these, in program order."""
    for step in steps:
        if isinstance(step, Region):
            for block in step.blocks:
                yield from vertices_of(block.steps)
        else:
            yield step


def carries_waited_for(graph: Graph) -> set[int]:
    """Returns the indices of carries that the first contraction of a loop's body is computed from.

    They are activations that go from layer to layer. A parameter that a loop over training steps carries is another
    matter: unless it is the first layer's, the products before it leave time to gather it.
    """
    found: set[int] = set()
    for loop in loops_of(graph.block.steps):
        if loop.equation.params.get("length") == 1:  # there is no next trip
            continue
        body = vertices_of(loop.blocks[-1].steps)
        first = next((vertex for vertex in body if is_contraction(vertex)), None)
        if first is not None:
            found |= _ancestors(graph, first) & {carry.index for carry in loop.carries}
    return found


def bytes_of_trips(graph: Graph, is_activation: np.ndarray) -> dict[int, float]:
    """Returns for the vertices inside of loops the bytes of what a trip of the innermost loop reads of stacked weights.

    Loops that read none are left out, and so are the vertices that are in no other loop.

    Args:
      graph: the traced function.
      is_activation: for each vertex whether it depends on a contraction, as what a backward pass reads does.
    """
    num_bytes: dict[int, float] = {}
    for loop in loops_of(graph.block.steps):
        of_trip = sum(vertex.results[0].num_bytes for vertex in loop.slices if not is_activation[vertex.index])
        if of_trip:
            inside = [*loop.slices, *(vertex for block in loop.blocks for vertex in vertices_of(block.steps))]
            num_bytes.update((vertex.index, float(of_trip)) for vertex in inside)
    return num_bytes


def _ancestors(graph: Graph, vertex: Vertex) -> set[int]:
    """Returns the vertices that a vertex is computed from in its own trip of each loop, itself included."""
    seen, left = {vertex.index}, [vertex]
    while left:
        one = left.pop()
        operands = one.operands[:1] if one.kind == "carry" else one.operands
        makers = {operand.vertex for operand in operands if isinstance(operand, Value)} - seen
        seen |= makers
        left += [graph.vertices[index] for index in makers]
    return seen

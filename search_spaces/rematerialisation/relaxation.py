"""A lower bound over all choices of what is kept and what is computed again, and all shardings of both.

Whatever runs again only adds work and memory to the steps of the function as it was traced. So the function's own
problem, made easier in all that a choice could change, bounds them all: where a value goes from the forward pass to a
step of the backward pass, that step may take it from nowhere. It then reads no bytes, waits for no reshard, and nothing
is in memory between the two passes. What is left is the cost of every step once, with the kernels that the forward pass
has if none of its values need be written for the backward pass.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from cost.base import Problem
from search_spaces.rematerialisation.choices import Network
from search_spaces.rematerialisation.passes import Passes, vertices_of
from search_spaces.sharding.edge_costs import transfer_matrices
from search_spaces.sharding.graph import Graph, Operand, Value, Vertex
from search_spaces.sharding.kernels import kernels_of
from search_spaces.sharding.memory import Lifetimes, lifetimes_of
from search_spaces.sharding.node_costs import NodeCosts
from search_spaces.sharding.reshard_costs import CollectiveShares
from search_spaces.sharding.space import ShardingSpace


def relaxed_problem(space: ShardingSpace, passes: Sequence[Passes], network: Network) -> Problem:
    """Returns a problem of a space's own choices that costs no more than any choice of what is computed again.

    Args:
      space: of the function as it was traced.
      passes: its forward and backward passes.
      network: what can be computed again.
    """
    taken = _taken(space.graph, passes, network)
    cut = _without(space.graph, taken)
    rules = [*space.rules, *[None] * (len(cut.vertices) - len(space.rules))]
    kernels = kernels_of(cut, rules, space.donated)
    for vertex, operand in taken:
        kernels.reads[vertex][operand] = kernels.copies[vertex][operand] = 0.0
    shares = CollectiveShares(space.graph, space.hardware.exposed_share)
    costs = NodeCosts(space.axis_sizes, space.hardware, space.reshard_costs, shares, kernels)
    own_s = space.problem.node_cost
    edges = [edge for edge in space.edges if (edge.reader, edge.operand) not in taken]
    matrices = transfer_matrices(edges, space.nodes, space.reshard_costs, shares)
    usages = space.usages_with(_shorter(lifetimes_of(cut, rules, space.donated), space.graph, passes, network))
    return space.problem._replace(
        node_cost=[np.minimum(a, b) for a, b in zip(own_s, costs.all_s(space.nodes, space.forms), strict=True)],
        edge_nodes=np.array(list(matrices), int).reshape(-1, 2),
        edge_cost=list(matrices.values()),
        usage_node=np.array(usages.node, int),
        usage=usages.num_bytes,
        usage_interval=np.array(usages.interval, int).reshape(-1, 2),
    )


def _taken(graph: Graph, passes: Sequence[Passes], network: Network) -> frozenset[tuple[int, int]]:
    """Returns (vertex, operand) of everything that reads what could be computed again, in a backward pass or for it."""
    taken: set[tuple[int, int]] = set()
    free_stacks = {stack.id for one in passes for stack in _stacks_and_slices(one, network)}
    for one in passes:
        own = {v.id for step in one.forward for v in step.results} & network.freeable
        for step in one.backward:
            for vertex in vertices_of(step):
                taken |= {(vertex.index, i) for i, o in enumerate(vertex.operands) if _id(o) in own | free_stacks}
    taken |= {(v.index, 0) for v in graph.vertices if v.kind == "stack" and v.results[0].id in free_stacks}
    return frozenset(taken)


def _stacks_and_slices(passes: Passes, network: Network) -> list[Value]:
    """Returns the stacked arrays of a pair of scans that could be left out, and their slices in the backward body."""
    values: list[Value] = []
    if passes.pair is not None:
        for piece in passes.pair.backward.slices:
            inner = passes.pair.aliases.get(piece.results[0].id)
            if inner is not None and inner.id in network.freeable:
                values += [o for o in piece.operands if isinstance(o, Value)] + piece.results
    return values


def _without(graph: Graph, taken: frozenset[tuple[int, int]]) -> Graph:
    """Returns a graph in which these operands are arguments of their own; only its vertices and values are changed."""
    values, vertices, others = list(graph.values), list(graph.vertices), []
    for index, position in taken:
        vertex = vertices[index]
        operand = vertex.operands[position]
        assert isinstance(operand, Value)
        number = len(vertices) + len(others)
        value = replace(operand, id=len(values), vertex=number, result=0, made_at=-1)
        values.append(value)
        others.append(Vertex(number, "input", None, [], [], [value], 1.0, -1))
        operands = [value if i == position else o for i, o in enumerate(vertex.operands)]
        vertices[index] = replace(vertex, operands=operands)
    cut = replace(graph, vertices=[*vertices, *others], values=values)
    outputs, consumers = {_id(o) for o in graph.outputs}, cut.consumers()
    for value in {_id(graph.vertices[v].operands[i]) for v, i in taken} - outputs:
        assert value is not None
        last = max((reader.position for reader, _ in consumers[value]), default=values[value].made_at)
        values[value] = replace(values[value], last_read_at=last)
    return cut


def _shorter(lifetimes: Lifetimes, graph: Graph, passes: Sequence[Passes], network: Network) -> Lifetimes:
    """Returns lifetimes of a graph's own values, without the stacks of what could be computed again."""
    size = len(graph.values)
    is_written = lifetimes.is_written[:size].copy()
    is_written[[v.id for one in passes for v in _stacks_and_slices(one, network)]] = False
    return Lifetimes(is_written, lifetimes.interval[:size], lifetimes.first_use[:size], lifetimes.last_use[:size])


def _id(operand: Operand) -> int | None:
    return operand.id if isinstance(operand, Value) else None

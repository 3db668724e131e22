"""Several phases as one problem: each phase's own problem, and edges that price the moves of state between them.

The cost of choices x_0, x_1, ... of the phases is

    Σ_i w_i n_i J_i(x_i)  +  Σ_i v_i Σ_a M_a[x_(i-1), x_i]

with the cost J_i of one step of phase i, its number of steps n_i, and the seconds M_a in which the array a of the state
moves from how phase i-1 stores it to how phase i does. M_a depends on the strategies of two arguments only, so that it
is an edge like any other. Memory limits hold in each phase alone: the phases' times are disjoint, and usages are scaled
to a common limit. The weights w_i and v_i are 1 where seconds count.

A step whose links take longer than all arithmetic waits for the difference, which is no sum. As in the search for one
phase, the weighted mean of both sums is a bound for every weight, and the problem is solved for a few of them.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from cost.base import Problem, is_forbidden
from diffshard.sharding_search.overlap import weighted_problem
from search_spaces.base import Choice
from search_spaces.partition_specs import IndexedSpec
from search_spaces.sharding.graph import Value
from search_spaces.sharding.space import ShardingSpace

MoveSeconds = Callable[[Value, IndexedSpec, IndexedSpec], float]
"""`move_s(array, spec_before, spec_after)`: the seconds in which one array moves into a phase."""


class WeightedPhase(NamedTuple):
    """A phase as a part of a joint problem.

    Attributes:
      space: of its step.
      step_weight: what the seconds of a step count.
      priced_weight: of the two sums of which a step takes the larger, the weight of the seconds as priced; the rest is
        that of the seconds with links that are always busy (see `sharding_search.overlap`).
      move_weight: what a second of the move into the phase counts.
      move_s: seconds of this move; not used for the first phase.
    """

    space: ShardingSpace
    step_weight: float
    priced_weight: float
    move_weight: float
    move_s: MoveSeconds


def joint_problem(phases: Sequence[WeightedPhase], is_state: Sequence[bool]) -> Problem:
    """Returns the phases as one problem.

    Args:
      phases: in order.
      is_state: for each flat argument whether it goes from phase to phase.
    """
    problems = [weighted_problem(phase.space, phase.priced_weight) for phase in phases]
    first_node = np.cumsum([0, *(len(problem.node_cost) for problem in problems)])
    limits = [phase.space.memory_limit_bytes for phase in phases]
    common_limit = next((limit for limit in limits if np.isfinite(limit)), np.inf)
    node_cost, edge_nodes, edge_cost, usage_node, usage, usage_interval = [], [], [], [], [], []
    first_time = 0
    for phase, problem, offset, limit in zip(phases, problems, first_node, limits, strict=False):
        node_cost += _scaled(problem.node_cost, phase.step_weight)
        edge_nodes.append(np.asarray(problem.edge_nodes).reshape(-1, 2) + offset)
        edge_cost += _scaled(problem.edge_cost, phase.step_weight)
        if not np.isfinite(limit):
            continue
        usage_node.append(np.asarray(problem.usage_node) + offset)
        usage += _scaled(problem.usage, common_limit / limit)
        interval = np.asarray(problem.usage_interval).reshape(-1, 2)
        usage_interval.append(interval + first_time)
        first_time += int(interval.max(initial=0)) + 1
    for i in range(1, len(phases)):
        for u, v, matrix in _moves(phases[i - 1].space, phases[i], is_state):
            edge_nodes.append(np.array([[first_node[i - 1] + u, first_node[i] + v]]))
            edge_cost.append(matrix)
    return Problem(
        node_cost=node_cost,
        edge_nodes=np.concatenate(edge_nodes),
        edge_cost=edge_cost,
        usage_node=np.concatenate(usage_node) if usage_node else np.zeros(0, np.int64),
        usage=usage,
        usage_interval=np.concatenate(usage_interval) if usage_interval else np.zeros((0, 2), np.int64),
        memory_limit=common_limit,
    )


def joint_alike(spaces: Sequence[ShardingSpace]) -> np.ndarray:
    """Returns numbers of the nodes, equal for those at the same place of equal layers of one phase, `[V]`."""
    numbers, first = [], 0
    for space in spaces:
        numbers.append(space.alike + first)
        first += int(space.alike.max(initial=0)) + 1
    return np.concatenate(numbers)


def choices_of(spaces: Sequence[ShardingSpace], choice: Sequence[int]) -> list[Choice]:
    """Returns the choice of each phase in a choice of the joint problem."""
    choices, first = [], 0
    for space in spaces:
        end = first + len(space.nodes)
        choices.append(tuple(choice[first:end]))
        first = end
    return choices


def _moves(before: ShardingSpace, phase: WeightedPhase, is_state: Sequence[bool]) -> list[tuple[int, int, np.ndarray]]:
    """Returns the nodes of each array of the state before and after a move, and its edge cost; equal ones share it."""
    after, matrices, edges = phase.space, {}, []
    for old, new, moves in zip(before.graph.inputs, after.graph.inputs, is_state, strict=True):
        if not moves:
            continue
        value = new.results[0]
        rows = tuple(s.unreduced[0] for s in before.nodes[old.index].strategies)
        columns = tuple(s.unreduced[0] for s in after.nodes[new.index].strategies)
        key = value.shape, value.num_bytes, rows, columns
        if key not in matrices:
            pairs = {(r, c): phase.move_s(value, r, c) for r in dict.fromkeys(rows) for c in dict.fromkeys(columns)}
            matrices[key] = phase.move_weight * np.array([[pairs[r, c] for c in columns] for r in rows])
        edges.append((old.index, new.index, matrices[key]))
    return edges


def _scaled(arrays: Sequence[np.ndarray], factor: float) -> list[np.ndarray]:
    """Returns arrays times a factor; the same array stays one array, and what is forbidden stays so."""
    if factor == 1:
        return list(arrays)
    scaled = {id(array): np.where(is_forbidden(array), array, np.asarray(array) * factor) for array in arrays}
    return [scaled[id(array)] for array in arrays]

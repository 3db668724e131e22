"""Several phases as one problem with one objective: the steps of each phase, and the moves of state between them.

With the seconds T_i of a step of phase i, its number of steps n_i, and the seconds M_a in which the array a of the
state moves from how phase i-1 stores it to how phase i does, choices x_0, x_1, ... of the phases take

    Σ_i n_i T_i(x_i)  +  Σ_i Σ_a M_a[x_(i-1), x_i]

seconds. M_a depends on the strategies of two arguments only, so that it is an edge like any other. Where phases last
for a time D_i instead, Σ_i (D_i - m_i) / T_i steps fit into them, with the seconds m_i of the move into a phase. Both
are functions of quantities, for which `diffshard.solving.objectives` finds choices. Memory limits hold in each phase
alone: the phases' times are disjoint, and usages are scaled to a common limit.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np

from cost.base import Problem
from cost.quantities import Quantity
from diffshard.budgets.base import Phase
from diffshard.sharding_search.step_objective import STEP_QUANTITIES, seconds_of
from diffshard.solving.objectives.objective import Objective
from search_spaces.base import Choice
from search_spaces.partition_specs import IndexedSpec
from search_spaces.sharding.graph import Value
from search_spaces.sharding.space import ShardingSpace

MoveSeconds = Callable[[Value, IndexedSpec, IndexedSpec], float]
"""`move_s(array, spec_before, spec_after)`: the seconds in which one array moves into a phase."""
_MOVES = "moves_s"


def joint_problem(
    phases: Sequence[Phase], spaces: Sequence[ShardingSpace], moves_s: Sequence[MoveSeconds], is_state: Sequence[bool]
) -> tuple[Problem, Objective]:
    """Returns the phases as one problem, whose linear part are preferences, and the seconds or steps as an objective.

    Steps count as negative, because the objective is made small.

    Args:
      phases: in order.
      moves_s: seconds of moves into each phase but the first.
      is_state: for each flat argument whether it goes from phase to phase.
    """
    first_node = np.cumsum([0, *(len(space.nodes) for space in spaces)])
    parts = [space.preference_problem for space in spaces]
    edge_nodes = [np.asarray(part.edge_nodes).reshape(-1, 2) + n for part, n in zip(parts, first_node, strict=False)]
    edge_cost = [matrix for part in parts for matrix in part.edge_cost]
    phase_of_edge = [np.full(len(part.edge_cost), i) for i, part in enumerate(parts)]
    num_inner = len(edge_cost)  # the moves are behind them
    for i, (before, after) in enumerate(pairwise(spaces)):
        for u, v, matrix in _moves(before, after, moves_s[i], is_state):
            edge_nodes.append(np.array([[first_node[i] + u, first_node[i + 1] + v]]))
            edge_cost.append(matrix)
            phase_of_edge.append(np.array([i + 1]))
    groups = (
        np.concatenate([np.full(len(space.nodes), i) for i, space in enumerate(spaces)]),
        np.concatenate(phase_of_edge),
    )
    problem = _with_memory(
        Problem(
            [cost for part in parts for cost in part.node_cost],
            np.concatenate(edge_nodes),
            [np.zeros_like(matrix) for matrix in edge_cost],
        ),
        spaces,
        first_node,
    )
    moves = Quantity((), edge_cost, None, groups[1], len(spaces))  # those inside a phase are zero here
    quantities = {name: _joint_quantity(name, spaces, edge_cost[num_inner:], groups) for name in STEP_QUANTITIES}
    return problem, Objective(_total_of(phases), quantities | {_MOVES: moves}, name="budget")


def joint_tied(spaces: Sequence[ShardingSpace]) -> np.ndarray:
    """Returns numbers of the nodes, equal for those at the same place of equal layers of one phase, `[V]`."""
    numbers, first = [], 0
    for space in spaces:
        numbers.append(space.tied + first)
        first += int(space.tied.max(initial=0)) + 1
    return np.concatenate(numbers)


def choices_of(spaces: Sequence[ShardingSpace], choice: Sequence[int]) -> list[Choice]:
    """Returns the choice of each phase in a choice of the joint problem."""
    choices, first = [], 0
    for space in spaces:
        end = first + len(space.nodes)
        choices.append(tuple(choice[first:end]))
        first = end
    return choices


def _total_of(phases: Sequence[Phase]) -> Callable[[dict[str, jax.Array]], jax.Array]:
    """Returns the objective as a function of amounts by phase."""
    num_steps = np.array([phase.num_steps or 0 for phase in phases], float)
    durations_s = np.array([phase.duration_s or 0.0 for phase in phases])

    def total(amounts: dict[str, jax.Array]) -> jax.Array:
        steps_s: jax.Array = jax.vmap(seconds_of)({name: amounts[name] for name in STEP_QUANTITIES})
        if phases[0].duration_s is None:
            return jnp.vdot(num_steps, steps_s) + jnp.sum(amounts[_MOVES])
        return -jnp.sum(jnp.maximum(durations_s - amounts[_MOVES], 0.0) / jnp.maximum(steps_s, 1e-30))

    return total


def _joint_quantity(
    name: str, spaces: Sequence[ShardingSpace], moves: Sequence[np.ndarray], groups: tuple[np.ndarray, np.ndarray]
) -> Quantity:
    """Returns one quantity of the steps of all phases, in groups by phase, whose meshes may differ in their axes."""
    own: list[Quantity] = [space.quantities[name] for space in spaces]  # pyright: ignore[reportAssignmentType]
    most = max((quantity.shape[0] for quantity in own if quantity.shape), default=0)
    nodes = [array for quantity in own for array in _padded(quantity.node, 1, most)]
    edges = [array for quantity in own for array in _padded(quantity.edge, 2, most)]
    rest = (most,) if own[0].shape else ()
    if edges:
        edges += [np.zeros((*np.shape(matrix), *rest)) for matrix in moves]
    return Quantity(nodes, edges, *groups, len(spaces))


def _padded(arrays: Sequence[np.ndarray], rank: int, most: int) -> list[np.ndarray]:
    """Returns arrays whose last dimension after the first `rank` ones has length `most`; equal arrays stay one."""
    by_id: dict[int, np.ndarray] = {}
    for array in arrays:
        if id(array) not in by_id:
            extra = np.ndim(array) - rank
            by_id[id(array)] = (
                np.pad(array, [(0, 0)] * rank + [(0, most - array.shape[-1])] * extra) if extra else array
            )
    return [by_id[id(array)] for array in arrays]


def _with_memory(problem: Problem, spaces: Sequence[ShardingSpace], first_node: np.ndarray) -> Problem:
    """Returns a joint problem with the memory of each phase, scaled to one limit."""
    limits = [space.memory_limit_bytes for space in spaces]
    common_limit = next((limit for limit in limits if np.isfinite(limit)), np.inf)
    usage_node, usage, usage_interval = [np.zeros(0, np.int64)], [], [np.zeros((0, 2), np.int64)]
    first_time = 0
    for space, offset, limit in zip(spaces, first_node.tolist(), limits, strict=False):
        if not np.isfinite(limit):
            continue
        own = space.problem
        usage_node.append(np.asarray(own.usage_node) + offset)
        usage += [np.asarray(amount) * (common_limit / limit) for amount in own.usage]
        interval = np.asarray(own.usage_interval).reshape(-1, 2)
        usage_interval.append(interval + first_time)
        first_time += int(interval.max(initial=0)) + 1
    return problem._replace(
        usage_node=np.concatenate(usage_node),
        usage=usage,
        usage_interval=np.concatenate(usage_interval),
        memory_limit=common_limit,
    )


def _moves(
    before: ShardingSpace, after: ShardingSpace, move_s: MoveSeconds, is_state: Sequence[bool]
) -> list[tuple[int, int, np.ndarray]]:
    """Returns the nodes of each array of the state before and after a move, and its seconds; equal ones share them."""
    matrices, edges = {}, []
    for old, new, moves in zip(before.graph.inputs, after.graph.inputs, is_state, strict=True):
        if not moves:
            continue
        value = new.results[0]
        rows = tuple(s.unreduced[0] for s in before.nodes[old.index].strategies)
        columns = tuple(s.unreduced[0] for s in after.nodes[new.index].strategies)
        key = value.shape, value.num_bytes, rows, columns
        if key not in matrices:
            pairs = {(r, c): move_s(value, r, c) for r in dict.fromkeys(rows) for c in dict.fromkeys(columns)}
            matrices[key] = np.array([[pairs[r, c] for c in columns] for r in rows])
        edges.append((old.index, new.index, matrices[key]))
    return edges

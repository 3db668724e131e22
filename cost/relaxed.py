"""The relaxed cost of a `Problem`: weights on the strategies in place of a choice, differentiable in the weights."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from cost.base import Problem, is_forbidden, load_groups, num_strategies


def relaxed_cost(problem: Problem, relaxed: Sequence[jax.Array] | jax.Array) -> jax.Array:
    """Computes J(p), the cost of weights, differentiable in them: exact for a choice, a lower estimate elsewhere.

    J(p) = Σ_v ⟨c_v, p_v⟩ + Σ_e ⟨T_e, p_u p_vᵀ⟩ + Σ_g max_(r in g) load_r(p)

    with load_r(p) = Σ_v ⟨L_v[:, r], p_v⟩ + Σ_e ⟨L_e[..., r], p_u p_vᵀ⟩.

    Args:
      problem: its limits are constraints, not a part of J.
      relaxed: the relaxed choice, V arrays `[S_v]` on the simplex, or their concatenation `[ΣS_v]`.

    Returns:
      A scalar. It is infinite where a forbidden entry has weight; its gradient is then that of the allowed entries.
    """
    flat = relaxed if isinstance(relaxed, jax.Array) else jnp.concatenate([jnp.ravel(weights) for weights in relaxed])
    if flat.shape != (num_strategies(problem).sum(),):
        raise ValueError(
            f"`relaxed` must have one weight for each strategy, {num_strategies(problem).sum()} in all, "
            f"got {flat.shape}."
        )
    source, target = _pairs(problem)
    entries = _concatenated([np.ravel(matrix) for matrix in problem.edge_cost])
    total = _expected_cost(_concatenated(problem.node_cost), flat)
    total = total + _expected_cost(entries, flat[source] * flat[target])
    if not len(problem.load):
        return total
    loads = flat @ jnp.asarray(_concatenated(problem.load))
    if len(problem.edge_load):
        tables = _concatenated([np.reshape(table, (-1, np.shape(table)[2])) for table in problem.edge_load])
        loads = loads + (flat[source] * flat[target]) @ jnp.asarray(tables)
    return total + sum(jnp.max(loads[group]) for group in load_groups(problem))


def _concatenated(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.asarray(array, float) for array in arrays]) if len(arrays) else np.zeros(0)


def _expected_cost(costs: np.ndarray, weights: jax.Array) -> jax.Array:
    is_allowed = ~is_forbidden(costs)
    total = jnp.where(is_allowed, costs, 0.0) @ weights
    return total if is_allowed.all() else jnp.where(jnp.any(weights[~is_allowed] > 0), jnp.inf, total)


def _pairs(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Returns the two positions in the concatenated weights of every transfer matrix's entries."""
    sizes = num_strategies(problem)
    starts = (np.cumsum(sizes) - sizes).tolist()
    source, target = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for (u, v), cost in zip(np.asarray(problem.edge_nodes).reshape(-1, 2).tolist(), problem.edge_cost, strict=True):
        rows, columns = np.indices(np.shape(cost))
        source.append(starts[u] + rows.ravel())
        target.append(starts[v] + columns.ravel())
    return np.concatenate(source), np.concatenate(target)

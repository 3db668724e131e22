"""The relaxed cost of a `Problem`: weights on the strategies in place of a choice, differentiable in the weights."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from cost.base import Problem, is_forbidden, num_strategies


def relaxed_cost(problem: Problem, relaxed: Sequence[jax.Array] | jax.Array) -> jax.Array:
    """Computes J(p), the cost of weights, differentiable in them: exact for a choice, a lower estimate elsewhere.

    J(p) = Σ_v ⟨c_v, p_v⟩ + Σ_e ⟨T_e, p_u p_vᵀ⟩ + max_d Σ_v ⟨p_v, L_v[:, d]⟩

    Args:
      problem: its memory limit is a constraint, not a part of J.
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
    source, target, entries = _flat_edges(problem)
    total = _expected_cost(np.concatenate([np.asarray(c, float) for c in problem.node_cost]), flat)
    total = total + _expected_cost(entries, flat[source] * flat[target])
    if len(problem.load):
        total = total + jnp.max(flat @ jnp.asarray(np.concatenate([np.asarray(row, float) for row in problem.load])))
    return total


def _expected_cost(costs: np.ndarray, weights: jax.Array) -> jax.Array:
    is_allowed = ~is_forbidden(costs)
    total = jnp.where(is_allowed, costs, 0.0) @ weights
    return total if is_allowed.all() else jnp.where(jnp.any(weights[~is_allowed] > 0), jnp.inf, total)


def _flat_edges(problem: Problem) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns every transfer matrix entry's two positions in the concatenated weights, and its cost."""
    sizes = num_strategies(problem)
    starts = (np.cumsum(sizes) - sizes).tolist()
    source, target, entries = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0)]
    for (u, v), cost in zip(np.asarray(problem.edge_nodes).reshape(-1, 2).tolist(), problem.edge_cost, strict=True):
        rows, columns = np.indices(np.shape(cost))
        source.append(starts[u] + rows.ravel())
        target.append(starts[v] + columns.ravel())
        entries.append(np.asarray(cost, float).ravel())
    return np.concatenate(source), np.concatenate(target), np.concatenate(entries)

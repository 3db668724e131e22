"""The dual with soft minima in the place of minima: it can be differentiated, and its gradient is a relaxed choice.

For messages m and prices, with c the node costs at these prices and T the edge costs,

    D_t(m) = Σ_v softmin_t(c_v + Σ_e m_ev) + Σ_e softmin_t(T_e - m_eu - m_ev) + Σ price · (base - limit)

where softmin_t(x) = -t · log Σ exp(-x / t), and the minimum at t = 0. As softmin_t(x) <= min(x) for every t, *any*
messages and prices give a valid lower bound on every feasible choice, at any temperature. It is looser than min-plus at
the same messages by at most the entropy of uniform rows: D_t <= D_0 <= D_t + t · (Σ_v log S_v + Σ_e log(S_u · S_v)).

A sweep maximises D_t exactly over all messages at the nodes of one colour, colour after colour. The gradient of D_t
with respect to costs at fixed messages are marginals, rows of softmax weights; where the sweeps have converged it is
also the gradient of the whole, sweeps included. Everything here can be differentiated, the marginals too.

Source: Meshi, Jaakkola and Globerson, "Convergence rate analysis of MAP coordinate minimization algorithms" (NeurIPS
2012), section 3, the star update on the smoothed dual; at temperature 0 it is one of Globerson and Jaakkola's, "Fixing
max-product" (NeurIPS 2007); for the view as reparameterisation Werner, "A linear programming approach to max-sum
problem: a review" (PAMI 2007).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cost.base import Problem, num_strategies
from diffshard.solving.dual.ascent import Prices, initial_prices
from diffshard.solving.dual.sweeps import colours
from diffshard.solving.flat import flatten, with_ceiling


class SoftProblem(NamedTuple):
    """A problem padded to V nodes of S strategies, with E edges and J = 2E directed edges.

    Forbidden costs became a number above every allowed choice's cost. Gradients go through the fields up to `slack`.

    Attributes:
      node_cost: `[V, S]`.
      edge_cost: `[E, S, S]`.
      load: `[V, S, D']` seconds of each device's time; D' = 0 where devices do equal work.
      usage: `[Z]` bytes of the usages, beyond each usage's least, entry by entry.
      slack: `[T, D]` limit less the sum of the least usages; 0 where the limit is infinite.
      node_mask: `[V, S]`, which strategies there are.
      edge_nodes: `[E, 2]`.
      usage_at: `[Z, 3]` node, strategy, and column: usage times devices + device.
      interval: `[K, 2]` times of the usages.
      star: `[C, J']` for each colour the directed edges that end in its nodes: e for the edge's second node, E + e for
        its first; 2E is padding.
      degree: `[V]`.
    """

    node_cost: jax.Array
    edge_cost: jax.Array
    load: jax.Array
    usage: jax.Array
    slack: jax.Array
    node_mask: jax.Array
    edge_nodes: jax.Array
    usage_at: jax.Array
    interval: jax.Array
    star: jax.Array
    degree: jax.Array


class SoftDual(NamedTuple):
    """A climbed dual.

    Attributes:
      value: D_t, a lower bound on every feasible choice's cost up to rounding.
      marginals: `[V, S]` rows of softmax weights; padding is 0.
      messages: `[J, S]` to start from again.
    """

    value: jax.Array
    marginals: jax.Array
    messages: jax.Array


def soft_problem(problem: Problem) -> SoftProblem:
    """Pads a problem, in JAX's default precision; costs are best in units in which a node's are near 1."""
    flat = with_ceiling(flatten(problem))
    sizes, count = num_strategies(problem), len(problem.node_cost)
    width = int(sizes.max(initial=1))
    mask = np.arange(width) < sizes[:, None]
    node_cost = np.zeros((count, width))
    node_cost[mask] = flat.cost
    load = np.zeros((count, width, flat.load.shape[1]))
    load[mask] = flat.load
    forward = np.flatnonzero(flat.source < flat.target)
    edge_cost = np.zeros((len(forward), width, width))
    for matrix, e in zip(edge_cost, forward.tolist(), strict=True):
        rows, columns = int(flat.sizes[flat.source[e]]), int(flat.sizes[flat.target[e]])
        entries = flat.entries[flat.matrix[e] : flat.matrix[e] + rows * columns]
        matrix[:rows, :columns] = entries.reshape(rows, columns)
    pairs = np.stack([flat.source[forward], flat.target[forward]], axis=1)
    usage = flat.usage.tocoo()
    row, column = usage.coords
    node = np.searchsorted(flat.start, row, side="right") - 1
    devices = max(flat.base.shape[1], 1)
    slack = np.where(np.isfinite(flat.limit), flat.limit - flat.base, 0.0)
    return SoftProblem(
        node_cost=jnp.asarray(node_cost),
        edge_cost=jnp.asarray(edge_cost),
        load=jnp.asarray(load),
        usage=jnp.asarray(np.where(np.isfinite(flat.limit)[column % devices], usage.data, 0.0)),
        slack=jnp.asarray(slack),
        node_mask=jnp.asarray(mask),
        edge_nodes=jnp.asarray(pairs),
        usage_at=jnp.asarray(np.stack([node, row - flat.start[node], column], axis=1)),
        interval=jnp.asarray(flat.interval),
        star=jnp.asarray(_stars(pairs, colours(flat))),
        degree=jnp.asarray(np.bincount(pairs.ravel(), minlength=count)),
    )


def free_prices(problem: Problem) -> Prices:
    """Returns prices to start from, as JAX arrays: memory is free, and every device's time counts alike."""
    memory, load = initial_prices(flatten(problem))
    return Prices(jnp.asarray(memory), jnp.asarray(load))  # pyright: ignore[reportArgumentType]


@functools.partial(jax.jit, static_argnames="sweeps")
def soft_dual(
    problem: SoftProblem,
    prices: Prices,
    *,
    temperature: jax.Array | float,
    sweeps: int = 50,
    messages: jax.Array | None = None,
) -> SoftDual:
    """Climbs the smoothed dual; differentiable in all arrays of `problem` with a gradient, in the prices and messages.

    Args:
      problem: from `soft_problem`; its costs may be traced.
      prices: of memory `[T, D]`, not negative, and of loads `[D']`, on the simplex, or the value is no bound.
      temperature: in units of cost, 0 for min-plus; one for all sweeps. Cool down by calling again with the messages.
      sweeps: how many, each over all colours; compiled for each number.
      messages: where to start, `[J, S]`; None is zero.
    """
    cost = priced_nodes(problem, prices)
    temperature = jnp.asarray(temperature, cost.dtype)
    if messages is None:
        messages = jnp.zeros((2 * len(problem.edge_nodes), cost.shape[1]), cost.dtype)

    @jax.checkpoint
    def one_sweep(messages: jax.Array, _: None) -> tuple[jax.Array, None]:
        update = functools.partial(_update, problem, cost, temperature)
        return jax.lax.scan(lambda m, star: (update(m, star), None), messages, problem.star)

    messages = jax.lax.scan(one_sweep, messages, length=sweeps)[0] if len(problem.edge_nodes) else messages
    value = dual_value(problem, prices, messages, temperature)
    rows = _softmin_weights(_absorb(problem, cost, messages), problem.node_mask, temperature)
    return SoftDual(value, rows, messages)


@jax.jit
def dual_value(problem: SoftProblem, prices: Prices, messages: jax.Array, temperature: jax.Array | float) -> jax.Array:
    """Computes D_t of any messages and prices; its gradient for `node_cost` are the marginals of `soft_dual`."""
    cost = priced_nodes(problem, prices)
    nodes = _softmin(_absorb(problem, cost, messages), problem.node_mask, temperature)
    u, v = problem.edge_nodes.T
    to_v, to_u = jnp.split(messages, 2)
    edges = problem.edge_cost - to_u[:, :, None] - to_v[:, None, :]
    mask = problem.node_mask[u][:, :, None] & problem.node_mask[v][:, None, :]
    entries = edges.shape[1] * edges.shape[2]
    edge_values = _softmin(edges.reshape(len(edges), entries), mask.reshape(len(edges), entries), temperature)
    return nodes.sum() + edge_values.sum() - jnp.sum(prices.memory * problem.slack)


def priced_nodes(problem: SoftProblem, prices: Prices) -> jax.Array:
    """Returns `[V, S]` node costs with their memory and loads at these prices."""
    cost = problem.node_cost + problem.load @ jnp.asarray(prices.load, problem.node_cost.dtype)
    if not problem.slack.size or not problem.usage.size:
        return cost
    memory = jnp.asarray(prices.memory)
    below = jnp.concatenate([jnp.zeros_like(memory[:1]), jnp.cumsum(memory, axis=0)])
    each = below[problem.interval[:, 1]] - below[problem.interval[:, 0]]  # [K, D]
    node, strategy, column = problem.usage_at.T
    return cost.at[node, strategy].add(problem.usage * each.ravel()[column])


def _update(
    problem: SoftProblem, cost: jax.Array, temperature: jax.Array, messages: jax.Array, star: jax.Array
) -> jax.Array:
    """Maximises exactly over all messages at the nodes of one colour, whose directed edges are `star`."""
    count = len(problem.edge_nodes)
    edge = star % count
    first = (star >= count)[:, None]  # to the edge's first node, so its rows stay and its columns are minimised over
    u, v = problem.edge_nodes[edge].T
    node = jnp.where(first[:, 0], u, v)
    other = jnp.where(first[:, 0], v, u)
    matrix = problem.edge_cost[edge]
    matrix = jnp.where(first[:, :, None], matrix, matrix.transpose(0, 2, 1))
    opposite = messages[jnp.where(first[:, 0], edge, edge + count)]  # m_{e, other}
    through = _softmin(matrix - opposite[:, None, :], problem.node_mask[other][:, None, :], temperature)
    through = jnp.where(problem.node_mask[node] & (star < 2 * count)[:, None], through, 0.0)
    total = cost.at[node].add(through)  # padding adds zeros
    share = total / (1.0 + problem.degree)[:, None]
    new = jnp.where(problem.node_mask[node], through - share[node], 0.0)
    return messages.at[star].set(new, mode="drop")


def _absorb(problem: SoftProblem, cost: jax.Array, messages: jax.Array) -> jax.Array:
    """Returns `[V, S]` node costs with all messages."""
    to_v, to_u = jnp.split(messages, 2)
    u, v = problem.edge_nodes.T
    return cost.at[v].add(to_v).at[u].add(to_u)


def _softmin(x: jax.Array, mask: jax.Array, temperature: jax.Array | float) -> jax.Array:
    """Returns -t log Σ exp(-x / t) along the last axis over what the mask allows, 0 where it allows nothing."""
    weights, least, temperature = _shift(x, mask, temperature)
    total = weights.sum(axis=-1)
    return least[..., 0] - temperature * jnp.log(jnp.where(total > 0, total, 1.0))


def _softmin_weights(x: jax.Array, mask: jax.Array, temperature: jax.Array | float) -> jax.Array:
    weights, _, _ = _shift(x, mask, temperature)
    return weights / weights.sum(axis=-1, keepdims=True)


def _shift(x: jax.Array, mask: jax.Array, temperature: jax.Array | float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns exp(-(x - least) / t), the least, and t, which is kept above 0.

    Results do not depend on the least, which only keeps numbers small; so no gradient goes through it.
    """
    temperature = jnp.maximum(temperature, jnp.finfo(x.dtype).tiny ** 0.5)
    least = jax.lax.stop_gradient(jnp.min(jnp.where(mask, x, jnp.inf), axis=-1, keepdims=True, initial=jnp.inf))
    least = jnp.where(jnp.isfinite(least), least, 0.0)
    above = jnp.where(mask, x - least, 0.0)
    return jnp.where(mask, jnp.exp(-above / temperature), 0.0), least, temperature


def _stars(pairs: np.ndarray, colour: np.ndarray) -> np.ndarray:
    """Returns `[C, J']` directed edges by the colour of the node that they end in."""
    ends = np.concatenate([pairs[:, 1], pairs[:, 0]])
    groups = [np.flatnonzero(colour[ends] == c) for c in range(int(colour.max(initial=0)) + 1)]
    longest = max(len(group) for group in groups)
    return np.stack([np.append(group, np.full(longest - len(group), len(ends))) for group in groups])

"""Predicts how much each strategy increases the loss, with one probe for each operation.

A probe is an array `[S]` of zeros that leaves the operation's exact result as it is. A custom derivative stands in for
its gradient: the backward pass brings the cotangent g of the result, and from g and the error e_j of strategy j (its
result minus the exact one) follows the predicted increase. `jax.grad` with respect to the probes of all operations thus
returns the increases of all strategies, at the price of one backward pass.

Each error is taken alone, in training that is exact otherwise. In units of the loss, the increases are:

- forward: ½ · T · Σ_t (g_t · e_t)² over the T tokens t, with g_t the derivative of the mean loss at the token's result.
  Tokens are all dimensions of the result but the last, on all devices; cotangents of copies of a result are summed.
  This is the second-order term of the loss, with the mean outer product of token gradients as its Hessian and errors
  of different tokens taken as independent.
- gradient: ¼ · Σ_i η_i e_i², with η_i the step size of parameter i. The loss is higher by this much where the noise of
  the steps and the pull to the minimum are in balance, whatever the Hessian is. Residuals are not accounted for: what
  is sent in a later step counts as lost.
- backward: the same for the error that e causes in the gradients of parameters. It is estimated with random signs z as
  ¼ · Σ_t (a_t · e_t)², where a is the derivative of ⟨z √η, gradients⟩ with respect to the operation's result. This is
  the derivative of the forward operation's operand along z √η, so `jax.jvp` gives a in the forward pass.

Source of the balance: Mandt, Hoffman and Blei, "Stochastic gradient descent as approximate Bayesian inference" (JMLR
2017), section 3.

Of alternatives the first function runs, and the others beside it for their own error alone. Operations that lie in
other branches only are measured in a pass of their own, in which the alternatives around them run that branch.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from search_spaces.communication.base import CollectiveOp
from search_spaces.communication.collectives import run_exact
from search_spaces.communication.device_step import DeviceStep, as_vector, gradient_key, total_by_function
from search_spaces.replay import custom_vjp_with_tangents

_Branches = Mapping[int, int]
"""By the group of alternatives the branch that runs, where it is not the first."""
_Probes = Sequence[jax.Array | None]
"""For each group zeros `[S]`, or None where nothing is measured."""


def local_loss_increases(
    device: DeviceStep,
    params: Any,
    batch: Any,
    validation: Any,
    step_sizes: Any,
    direction: Any,
    key: jax.Array,
    step: jax.Array,
) -> list[jax.Array]:
    """Returns this device's share of the predicted increases, for each group `[S]`.

    Args:
      validation: this device's part of the batch for forward operations and alternatives.
      step_sizes: η, as `params`.
      direction: z √η with random signs z, as `params`.
      key: a random key.
    """
    branches = [min((_branches_around(device, o) for o in group.operations), key=len) for group in device.groups]

    def measure(active_branches: _Branches) -> tuple[list[Any], Any]:
        """Returns increases of forward and backward operations in these branches, None for others; and gradients."""
        probes = [
            jnp.zeros(len(group.names)) if group_branches == active_branches else None
            for group, group_branches in zip(device.groups, branches, strict=True)
        ]
        forward = jax.grad(lambda p: _forward_loss(device, params, validation, key, step, p, active_branches))(probes)
        # The barrier runs one pass after the other: at the same time, both would hold their activations in memory.
        same_params, forward = lax.optimization_barrier((params, forward))
        backward, gradients = jax.grad(
            lambda p, params: _backward_loss(device, params, batch, direction, key, step, p, active_branches),
            argnums=(0, 1),
        )(probes, same_params)
        increases = [None if f is None else f + b / 2 for f, b in zip(forward, backward, strict=True)]
        return increases, gradients

    measured_increases, gradients = measure({})
    of_gradients = _gradient_increases(device, step_sizes, gradients, key, step)
    increases = [g if m is None else m + g for m, g in zip(measured_increases, of_gradients, strict=True)]
    for active_branches in [b for i, b in enumerate(branches) if b and b not in branches[:i]]:
        measured_increases, _ = measure(active_branches)
        increases = [old if m is None else m for m, old in zip(measured_increases, increases, strict=True)]
    return increases


def random_direction(params: Any, step_sizes: Any, key: jax.Array) -> tuple[Any, Any]:
    """Returns the step sizes η of all parameters, and z √η with random signs z; both as `params`."""
    whole = jax.tree.broadcast(step_sizes, params)
    step_sizes = jax.tree.map(lambda size, p: jnp.broadcast_to(size, p.shape).astype(jnp.float32), whole, params)
    signs: Any = optax.tree.random_like(
        jax.random.fold_in(key, 2**31 - 2), params, sampler=jax.random.rademacher, dtype=jnp.float32
    )
    direction = jax.tree.map(lambda z, size, p: (z * jnp.sqrt(size)).astype(p.dtype), signs, step_sizes, params)
    return step_sizes, direction


def _branches_around(device: DeviceStep, o: int) -> dict[int, int]:
    """Returns the branches that an operation lies in, but first ones, by the group of their alternatives."""
    branch, branches = device.operations[o].branch, {}
    while branch is not None:
        call_site, number = branch
        outer = device.operation_at["forward", call_site]
        if number:
            branches[device.group_of[outer]] = number
        branch = device.operations[outer].branch
    return branches


def _forward_loss(
    device: DeviceStep,
    params: Any,
    batch: Any,
    key: jax.Array,
    step: jax.Array,
    probes: _Probes,
    active_branches: _Branches,
) -> jax.Array:
    """Returns the exact loss; gradients of `probes` are increases of forward operations and of alternatives."""

    def num_tokens(y: jax.Array, num_copies: int) -> float:
        return float(prod(y.shape[:-1])) * device.num_devices / num_copies

    def at_collective(c: int, x: jax.Array, key: jax.Array) -> jax.Array:
        o, operand = device.operation_at["forward", c], lax.stop_gradient(x)
        collective = device.collective(o)
        y, copies, probe = run_exact(collective, x), collective.num_copies, probes[device.group_of[o]]
        if probe is None or not jnp.issubdtype(x.dtype, jnp.floating):
            return y
        functions, numbers = device.functions_at(o, step)
        probe = total_by_function(probe, functions, numbers)
        others = operand, lax.stop_gradient(y), device.keys(c, key)[0], step
        return with_probe(y, partial(_errors, functions), others, probe, collective.axes, copies, num_tokens(y, copies))

    def at_alternatives(c: int, branches: Sequence[Callable[..., Any]], operands: Sequence[Any]) -> Any:
        g = device.group_of[device.operation_at["forward", c]]
        probe = probes[g]
        if probe is None or g in active_branches:
            return branches[active_branches.get(g, 0)](*operands)
        first, *others = [branch(*operands) for branch in branches]
        results = []
        for i, y in enumerate(first):
            errors = lax.stop_gradient([jnp.zeros_like(y), *(other[i] - y for other in others)])
            results.append(with_probe(y, lambda *errors: errors, errors, probe, (), 1, num_tokens(y, 1)))
        return results

    return device.loss_with(params, batch, key, at_collective, at_alternatives)


def _backward_loss(
    device: DeviceStep,
    params: Any,
    batch: Any,
    direction: Any,
    key: jax.Array,
    step: jax.Array,
    probes: _Probes,
    active_branches: _Branches,
) -> jax.Array:
    """Returns the exact loss; gradients of `probes` are ½ Σ_t (a_t · e_t)² of backward ones, a along `direction`."""

    def at_collective(c: int, x: jax.Array, key: jax.Array) -> jax.Array:
        collective = device.collective(device.operation_at["forward", c])
        backward_operation = device.operation_at.get(("backward", c))
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return run_exact(collective, x)
        probe = None if backward_operation is None else probes[device.group_of[backward_operation]]
        if backward_operation is None or probe is None:
            return with_tangent(collective, x)

        functions, numbers = device.functions_at(backward_operation, step)
        probe = total_by_function(probe, functions, numbers)
        return with_backward_probe(collective, partial(_errors, functions), x, probe, (device.keys(c, key)[1], step))

    def at_alternatives(c: int, branches: Sequence[Callable[..., Any]], operands: Sequence[Any]) -> Any:
        return branches[active_branches.get(device.group_of[device.operation_at["forward", c]], 0)](*operands)

    def loss(params: Any) -> jax.Array:
        return device.loss_with(params, batch, key, at_collective, at_alternatives, custom_vjp_with_tangents)

    return jax.jvp(loss, (params,), (direction,))[0]


def _gradient_increases(
    device: DeviceStep, step_sizes: Any, gradients: Any, key: jax.Array, step: jax.Array
) -> list[jax.Array]:
    """Returns ¼ Σ_i η_i e_i² for each group `[S]`, zeros for groups that are not of gradients."""
    increases = [jnp.zeros(len(group.names)) for group in device.groups]
    sizes, gradient_leaves = jax.tree.leaves(step_sizes), jax.tree.leaves(gradients)
    for g, numbers in device.gradient_groups():
        first, x = device.groups[g].operations[0], as_vector([gradient_leaves[leaf] for leaf in numbers])
        collective = device.collective(first)
        weights = as_vector([sizes[leaf] for leaf in numbers]) / (4 * collective.num_copies)
        functions, numbers = device.functions_at(first, step)
        errors = _errors(functions, x, run_exact(collective, x), gradient_key(key, g), step)
        increases[g] += jnp.stack([weights @ jnp.square(error.astype(jnp.float32)) for error in errors])[numbers]
    return increases


def _errors(
    functions: Sequence[Callable[..., Any]], x: jax.Array, exact: jax.Array, key: jax.Array, step: jax.Array
) -> Iterator[jax.Array]:
    """Yields each function's result minus the exact one."""
    return (run(x, None, key, step)[0] - exact for run in functions)


def with_probe(
    y: jax.Array,
    errors: Callable[..., Iterable[jax.Array]],
    others: Any,
    probe: jax.Array,
    axes: tuple[str, ...],
    num_copies: int,
    scale: float,
) -> jax.Array:
    """Returns `y`; the gradient of `probe` is scale/2 · Σ_t (g_t · e_t)² `[S]`, t over all dimensions but the last.

    Args:
      errors: `errors(*others)`, S arrays as `y`: each strategy's result minus `y`. The backward pass makes them, one
        after the other, so that no memory holds all of them.
      probe: `[S]`, of any value.
      axes: over which the result is copied, if it is.
      num_copies: how many devices hold the same result; their cotangents are summed, and each counts for its share.
    """

    @jax.custom_vjp
    def op(y: jax.Array, others: Any, probe: jax.Array) -> jax.Array:
        return y

    def op_backward(others: Any, cotangent: jax.Array) -> Any:
        whole = lax.psum(cotangent, axes) if num_copies > 1 else cotangent
        return cotangent, None, scale / num_copies * _second_order(whole, errors(*others))

    op.defvjp(lambda y, others, probe: (y, others), op_backward)
    return op(y, others, probe)


def with_backward_probe(
    collective: CollectiveOp, errors: Callable[..., Iterable[jax.Array]], x: jax.Array, probe: jax.Array, others: Any
) -> jax.Array:
    """Runs a collective exactly, with a probe of its backward operation; to be run under `jax.jvp` within a gradient.

    For a tangent ẋ of x along v in the parameters, ẋ · e is the inner product of v and of what e changes in the
    gradients of the parameters. The gradient of `probe` is ½ · Σ_t (ẋ_t · e_t)² `[S]`, t over all dimensions of `x` but
    the last; tangents of copies of the backward operation's result are summed.

    Args:
      errors: `errors(cotangent, result, *others)`, S arrays as `x`: each strategy's result at the backward operation
        minus the exact one.
      probe: `[S]`, of any value.
    """
    backward_collective = collective.transpose()

    @jax.custom_vjp
    def run(x: jax.Array, tangent: jax.Array, probe: jax.Array, others: Any) -> jax.Array:
        return run_exact(collective, x)

    def run_backward(saved_values: Any, cotangent: jax.Array) -> Any:
        tangent, others = saved_values
        result = run_exact(backward_collective, cotangent)
        whole = lax.psum(tangent, backward_collective.axes) if backward_collective.num_copies > 1 else tangent
        increase = _second_order(whole, errors(cotangent, result, *others)) / backward_collective.num_copies
        return result, None, increase, None

    run.defvjp(lambda x, tangent, probe, others: (run_exact(collective, x), (tangent, others)), run_backward)

    @jax.custom_jvp
    def op(x: jax.Array, probe: jax.Array, others: Any) -> jax.Array:
        return run_exact(collective, x)

    @op.defjvp
    def _(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
        x, probe, others = primals
        tangent = lax.stop_gradient(tangents[0])
        return run(x, tangent, probe, others), run_exact(collective, tangent)

    return op(x, probe, others)


def _second_order(adjoint: jax.Array, errors: Iterable[jax.Array]) -> jax.Array:
    """Returns ½ Σ_t (a_t · e_t)² `[S]` for adjoints `[..., elements]` and S errors of their shape."""

    def increase(error: jax.Array) -> jax.Array:
        product = adjoint.astype(jnp.float32) * error
        return 0.5 * jnp.square(product.sum(axis=-1) if product.ndim > 1 else product).sum()

    return jnp.stack([increase(error) for error in errors])


def with_tangent(collective: CollectiveOp, x: jax.Array) -> jax.Array:
    """Runs a collective exactly under `jax.jvp`, which cannot differentiate a `jax.custom_vjp` by itself."""

    @jax.custom_jvp
    def op(x: jax.Array) -> jax.Array:
        return run_exact(collective, x)

    op.defjvp(lambda primals, tangents: (run_exact(collective, *primals), run_exact(collective, *tangents)))
    return op(x)

"""What each strategy's error would do to the loss, to second order, as one device takes part in finding it out.

`CommunicationSpace.loss_increases` has the formulas and their source.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from search_spaces.communication.device_step import DeviceStep, gradient_key, joined
from search_spaces.communication.probes import probed, probed_back, unprobed_back
from search_spaces.communication.tangents import with_tangents

_Branches = Mapping[int, int]
"""The branch that runs by the group of its alternatives, where it is not the first."""
_Probes = Sequence[jax.Array | None]
"""For each group `[S]`, or None where nothing is measured."""


def local_loss_increases(
    device: DeviceStep,
    params: Any,
    batch: Any,
    validation: Any,
    step_sizes: Any,
    along: Any,
    key: jax.Array,
    step: jax.Array,
) -> list[jax.Array]:
    """This device's share of the loss_increases, for each group `[S]`.

    Args:
      device: the loss with its sites.
      params: this device's part.
      batch: this device's part.
      validation: this device's part of the batch for forward loss_increases.
      step_sizes: η, as `params`.
      along: random signs times √η, as `params`.
      key: a random key.
      step: number of the training step.
    """
    needed = [min((_branches_to(device, s) for s in group.sites), key=len) for group in device.groups]

    def measured(running: _Branches) -> tuple[list[Any], Any]:
        """Damages at forward and backward sites of the groups that need these branches, and gradients."""
        probes = [
            jnp.zeros(len(group.names)) if own == running else None
            for group, own in zip(device.groups, needed, strict=True)
        ]
        ahead = jax.grad(lambda p: _ahead(device, params, validation, key, step, p, running))(probes)
        # One after the other: side by side, both would hold their activations.
        own, ahead = lax.optimization_barrier((params, ahead))
        back, gradients = jax.grad(
            lambda p, params: _back(device, params, batch, along, key, step, p, running), argnums=(0, 1)
        )(probes, own)
        return [None if a is None else a + b / 2 for a, b in zip(ahead, back, strict=True)], gradients

    found, gradients = measured({})
    of_gradients = _of_gradients(device, step_sizes, gradients, key, step)
    loss_increases = [g if f is None else f + g for f, g in zip(found, of_gradients, strict=True)]
    for running in [r for i, r in enumerate(needed) if r and r not in needed[:i]]:
        found, _ = measured(running)
        loss_increases = [d if f is None else f for f, d in zip(found, loss_increases, strict=True)]
    return loss_increases


def _branches_to(device: DeviceStep, s: int) -> dict[int, int]:
    """The branches around a site by the group of their alternatives, which all run the same, first ones left out."""
    branch, found = device.sites[s].branch, {}
    while branch is not None:
        place, number = branch
        around = device.site_at["forward", place]
        if number:
            found[device.group_of[around]] = number
        branch = device.sites[around].branch
    return found


def _ahead(
    device: DeviceStep,
    params: Any,
    batch: Any,
    key: jax.Array,
    step: jax.Array,
    probes: _Probes,
    running: _Branches,
) -> jax.Array:
    """The exact loss; gradients of `probes` are increases of forward sites, and of alternatives that run the first."""

    def num_tokens(y: jax.Array, num_copies: int) -> float:
        return float(prod(y.shape[:-1])) * device.num_devices / num_copies

    def at_collective(p: int, x: jax.Array, key: jax.Array) -> jax.Array:
        s, operand = device.site_at["forward", p], lax.stop_gradient(x)
        collective = device.collective(s)
        y, copies, probe = collective.exact(x), collective.num_copies, probes[device.group_of[s]]
        if probe is None or not jnp.issubdtype(x.dtype, jnp.floating):
            return y
        errors = _errors(device, s, operand, lax.stop_gradient(y), device.keys(p, key)[0], step)
        return probed(y, errors, probe, collective.axes, copies, num_tokens(y, copies))

    def at_alternatives(p: int, branches: Sequence[Callable[..., Any]], operands: Sequence[Any]) -> Any:
        g = device.group_of[device.site_at["forward", p]]
        probe, found = probes[g], []
        if probe is None or g in running:
            return branches[running.get(g, 0)](*operands)
        first, *others = [branch(*operands) for branch in branches]
        for i, y in enumerate(first):
            errors = jnp.stack([jnp.zeros_like(y), *(other[i] - y for other in others)])
            found.append(probed(y, errors, probe, (), 1, num_tokens(y, 1)))
        return found

    return device.evaluated(params, batch, key, at_collective, at_alternatives)


def _back(
    device: DeviceStep,
    params: Any,
    batch: Any,
    along: Any,
    key: jax.Array,
    step: jax.Array,
    probes: _Probes,
    running: _Branches,
) -> jax.Array:
    """The exact loss; gradients of `probes` are ½ Σ_t (a_t · e_t)² of backward sites, by derivatives along `along`."""

    def at_collective(p: int, x: jax.Array, key: jax.Array) -> jax.Array:
        collective, back = device.collective(device.site_at["forward", p]), device.site_at.get(("backward", p))
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return collective.exact(x)
        probe = None if back is None else probes[device.group_of[back]]
        if back is None or probe is None:
            return unprobed_back(collective, x)

        def errors(cotangent: jax.Array, result: jax.Array, others: Any) -> jax.Array:
            return _errors(device, back, cotangent, result, *others)

        return probed_back(collective, errors, x, probe, (device.keys(p, key)[1], step))

    def at_alternatives(p: int, branches: Sequence[Callable[..., Any]], operands: Sequence[Any]) -> Any:
        return branches[running.get(device.group_of[device.site_at["forward", p]], 0)](*operands)

    def loss(params: Any) -> jax.Array:
        return device.evaluated(params, batch, key, at_collective, at_alternatives, with_tangents)

    return jax.jvp(loss, (params,), (along,))[0]


def _of_gradients(
    device: DeviceStep, step_sizes: Any, gradients: Any, key: jax.Array, step: jax.Array
) -> list[jax.Array]:
    """¼ Σ_i η_i e_i² for each group `[S]`, over gradient sites."""
    loss_increases = [jnp.zeros(len(group.names)) for group in device.groups]
    sizes, own = jax.tree.leaves(step_sizes), jax.tree.leaves(gradients)
    for g, numbers in device.gradient_groups():
        first, x = device.groups[g].sites[0], joined([own[leaf] for leaf in numbers])
        collective = device.collective(first)
        weights = joined([sizes[leaf] for leaf in numbers]) / (4 * collective.num_copies)
        for j, run in enumerate(device.runs(first)):
            error = (run(x, gradient_key(key, g), step)[0] - collective.exact(x)).astype(jnp.float32)
            loss_increases[g] = loss_increases[g].at[j].add(weights @ jnp.square(error))
    return loss_increases


def _errors(device: DeviceStep, s: int, x: jax.Array, exact: jax.Array, key: jax.Array, step: jax.Array) -> jax.Array:
    """Each strategy's result minus the exact one, `[S, ...]`."""
    return jnp.stack([run(x, key, step)[0] - exact for run in device.runs(s)])

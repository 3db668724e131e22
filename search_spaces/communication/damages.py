"""What each strategy's error would do to the loss, to second order, as one device takes part in finding it out.

`CommunicationSpace.damages` has the formulas and their source.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from search_spaces.communication.device_step import DeviceStep, gradient_key, joined
from search_spaces.communication.probes import probed, probed_back

_Branches = Mapping[int, int]
"""The branch of alternatives that runs, by their place, where it is not the first."""


def local_damages(
    device: DeviceStep,
    params: Any,
    batch: Any,
    validation: Any,
    step_sizes: Any,
    along: Any,
    key: jax.Array,
    step: jax.Array,
) -> list[jax.Array]:
    """This device's share of the damages, for each group `[S]`.

    Args:
      device: the loss with its sites.
      params: this device's part.
      batch: this device's part.
      validation: this device's part of the batch for forward damages.
      step_sizes: η, as `params`.
      along: random signs times √η, as `params`.
      key: a random key.
      step: number of the training step.
    """
    probes = [jnp.zeros(len(group.names)) for group in device.groups]

    def measured(running: _Branches) -> tuple[list[jax.Array], Any]:
        """Damages of forward and backward sites where these branches run, and gradients."""
        ahead = jax.grad(lambda p: _ahead(device, params, validation, key, step, p, running))(probes)
        # One after the other: side by side, both would hold their activations.
        own, ahead = lax.optimization_barrier((params, ahead))
        back, gradients = jax.grad(
            lambda p, params: _back(device, params, batch, along, key, step, p, running), argnums=(0, 1)
        )(probes, own)
        return [a + b / 2 for a, b in zip(ahead, back, strict=True)], gradients

    found, gradients = measured({})
    of_gradients = _of_gradients(device, step_sizes, gradients, key, step)
    damages = [f + g for f, g in zip(found, of_gradients, strict=True)]
    needed = [min((_branches_to(device, s) for s in group.sites), key=len) for group in device.groups]
    for running in [r for i, r in enumerate(needed) if r and r not in needed[:i]]:
        found, _ = measured(running)
        damages = [f if r == running else d for f, d, r in zip(found, damages, needed, strict=True)]
    return damages


def _branches_to(device: DeviceStep, s: int) -> dict[int, int]:
    """The branches around a site by the place of their alternatives, first ones left out."""
    branch, found = device.sites[s].branch, {}
    while branch is not None:
        place, number = branch
        if number:
            found[place] = number
        branch = device.sites[device.site_at["forward", place]].branch
    return found


def _ahead(
    device: DeviceStep,
    params: Any,
    batch: Any,
    key: jax.Array,
    step: jax.Array,
    probes: list[jax.Array],
    running: _Branches,
) -> jax.Array:
    """The exact loss; gradients of `probes` are damages of forward sites, and of alternatives that run the first."""

    def num_tokens(y: jax.Array, num_copies: int) -> float:
        return float(prod(y.shape[:-1])) * device.num_devices / num_copies

    def at_collective(p: int, x: jax.Array, key: jax.Array) -> jax.Array:
        s, operand = device.site_at["forward", p], lax.stop_gradient(x)
        collective = device.collective(s)
        y, copies = collective.exact(x), collective.num_copies
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return y
        errors = _errors(device, s, operand, lax.stop_gradient(y), device.keys(p, key)[0], step)
        return probed(y, errors, probes[device.group_of[s]], collective.axes, copies, num_tokens(y, copies))

    def at_alternatives(p: int, branches: Sequence[Callable[..., Any]], operands: Sequence[Any]) -> Any:
        if p in running:
            return branches[running[p]](*operands)
        first, *others = [branch(*operands) for branch in branches]
        probe, found = probes[device.group_of[device.site_at["forward", p]]], []
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
    probes: list[jax.Array],
    running: _Branches,
) -> jax.Array:
    """The exact loss; gradients of `probes` are ½ Σ_t (a_t · e_t)² of backward sites, by derivatives along `along`."""

    def at_collective(p: int, x: jax.Array, key: jax.Array) -> jax.Array:
        collective, back = device.collective(device.site_at["forward", p]), device.site_at.get(("backward", p))
        transposed = collective.transposed()
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return collective.exact(x)

        def errors(cotangent: jax.Array, result: jax.Array, others: Any) -> jax.Array:
            return jnp.zeros((1, *x.shape)) if back is None else _errors(device, back, cotangent, result, *others)

        probe = jnp.zeros(1) if back is None else probes[device.group_of[back]]
        others = device.keys(p, key)[1], step
        axes, copies = transposed.axes, transposed.num_copies
        return probed_back(collective.exact, transposed.exact, errors, x, probe, others, axes, copies)

    def at_alternatives(p: int, branches: Sequence[Callable[..., Any]], operands: Sequence[Any]) -> Any:
        return branches[running.get(p, 0)](*operands)

    def loss(params: Any) -> jax.Array:
        return device.evaluated(params, batch, key, at_collective, at_alternatives, forward_mode=True)

    return jax.jvp(loss, (params,), (along,))[0]


def _of_gradients(
    device: DeviceStep, step_sizes: Any, gradients: Any, key: jax.Array, step: jax.Array
) -> list[jax.Array]:
    """¼ Σ_i η_i e_i² for each group `[S]`, over gradient sites."""
    damages = [jnp.zeros(len(group.names)) for group in device.groups]
    sizes, own = jax.tree.leaves(step_sizes), jax.tree.leaves(gradients)
    for g, numbers in device.gradient_groups():
        first, x = device.groups[g].sites[0], joined([own[leaf] for leaf in numbers])
        collective = device.collective(first)
        weights = joined([sizes[leaf] for leaf in numbers]) / (4 * collective.num_copies)
        for j, run in enumerate(device.runs(first)):
            error = (run(x, gradient_key(key, g), step)[0] - collective.exact(x)).astype(jnp.float32)
            damages[g] = damages[g].at[j].add(weights @ jnp.square(error))
    return damages


def _errors(device: DeviceStep, s: int, x: jax.Array, exact: jax.Array, key: jax.Array, step: jax.Array) -> jax.Array:
    """Each strategy's result minus the exact one, `[S, ...]`."""
    return jnp.stack([run(x, key, step)[0] - exact for run in device.runs(s)])

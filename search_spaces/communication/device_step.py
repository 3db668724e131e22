"""What each device computes: its share of the loss by a selection, or exact with probes, and its gradients' way."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from math import prod
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from search_spaces.communication.collectives import Collective
from search_spaces.communication.groups import Group
from search_spaces.communication.selection import Selection, probed, select, with_backward
from search_spaces.communication.sites import Direction, Site, Traced


@dataclass(frozen=True)
class DeviceStep:
    """A traced loss with strategies at its sites; its methods run inside a mapping over the mesh's axes.

    Attributes:
      traced: the loss.
      sites: its sites.
      groups: of the sites.
      num_devices: of the mesh.
    """

    traced: Traced
    sites: tuple[Site, ...]
    groups: tuple[Group, ...]
    num_devices: int

    @cached_property
    def group_of(self) -> dict[int, int]:
        """The group of each site."""
        return {s: g for g, group in enumerate(self.groups) for s in group.sites}

    @cached_property
    def site_at(self) -> dict[tuple[Direction, int], int]:
        """The site at a place in a direction."""
        return {(site.direction, site.place): s for s, site in enumerate(self.sites)}

    @cached_property
    def measured_in(self) -> list[dict[int, int]]:
        """For each group, which branches must run where it is not in the first ones (see `probed_loss`)."""
        return [min((self._branches_to(s) for s in group.sites), key=len) for group in self.groups]

    def _branches_to(self, s: int) -> dict[int, int]:
        """The branches around a site by the place of their alternatives, first ones left out."""
        branch, found = self.sites[s].branch, {}
        while branch is not None:
            place, number = branch
            if number:
                found[place] = number
            branch = self.sites[self.site_at["forward", place]].branch
        return found

    def loss(
        self, params: Any, batch: Any, key: jax.Array, step: jax.Array, selection: Sequence[Selection]
    ) -> jax.Array:
        """This device's share of the training loss, by a selection."""

        def run(s: int, x: jax.Array, traced: Any, key: jax.Array, step: jax.Array) -> jax.Array:
            chosen = selection[self.group_of[s]] if traced is None else traced
            return select(self._runs(s), chosen, x, key, step)[0]

        def traced(s: int) -> Any:
            chosen = selection[self.group_of[s]]
            return None if isinstance(chosen, int) else chosen

        def at_alternatives(p: int, branches: Sequence[Callable[..., Any]], operands: Sequence[Any]) -> Any:
            return select(branches, selection[self.group_of[self.site_at["forward", p]]], *operands)

        return self._evaluated(params, batch, key, step, run, traced, at_alternatives)

    def probed_loss(
        self,
        params: Any,
        batch: Any,
        key: jax.Array,
        step: jax.Array,
        ahead: list[jax.Array] | None,
        back: list[jax.Array] | None,
        running: Mapping[int, int] = MappingProxyType({}),
    ) -> jax.Array:
        """The same with everything exact, and gradients of probes that are damages (see `selection.probed`).

        Args:
          params: this device's part.
          batch: this device's part.
          key: a random key.
          step: number of the training step.
          ahead: for each group `[S]`, probes of forward sites; None for no damages of those.
          back: of backward sites, to be differentiated through a gradient of this loss; None for no damages of those.
          running: the branch of alternatives by their place, where it is not the first; those are not probed.
        """

        def run(s: int, x: jax.Array, probe: jax.Array | None, key: jax.Array, step: jax.Array) -> jax.Array:
            collective, operand = self._collective(s), lax.stop_gradient(x)
            y = collective.exact(x)
            if probe is None:
                return y
            errors = jnp.stack([run(operand, key, step)[0] - lax.stop_gradient(y) for run in self._runs(s)])
            copies = collective.num_copies
            scale = self._num_tokens(y, copies) if self.sites[s].direction == "forward" else 1.0
            return probed(y, errors, probe, collective.axes, copies, scale)

        def probe(s: int) -> jax.Array | None:
            probes = back if self.sites[s].direction == "backward" else ahead
            return None if probes is None else probes[self.group_of[s]]

        def at_alternatives(p: int, branches: Sequence[Callable[..., Any]], operands: Sequence[Any]) -> Any:
            probe_here = probe(self.site_at["forward", p])
            if probe_here is None or p in running:
                return branches[running.get(p, 0)](*operands)
            first, *others = [branch(*operands) for branch in branches]
            found = []
            for i, y in enumerate(first):
                errors = jnp.stack([jnp.zeros_like(y), *(other[i] - y for other in others)])
                found.append(probed(y, errors, probe_here, (), 1, self._num_tokens(y, 1)))
            return found

        return self._evaluated(params, batch, key, step, run, probe, at_alternatives)

    def send(
        self,
        gradients: Any,
        state: dict[str, jax.Array],
        key: jax.Array,
        step: jax.Array,
        selection: Sequence[Selection],
    ) -> tuple[Any, dict[str, jax.Array]]:
        """Parameters' gradients as they arrive, and the residuals for the next step `[1, *local shape]`."""
        leaves, structure = jax.tree.flatten(gradients)
        unsent = {}
        for g, numbers in self._gradient_groups():
            own = [leaves[leaf] for leaf in numbers]
            names = [self.traced.param_names[leaf] for leaf in numbers]
            wanted = [x + state[name][0] if name in state else x for x, name in zip(own, names, strict=True)]
            operand = _joined(wanted).astype(own[0].dtype)
            runs = self._runs(self.groups[g].sites[0])
            y, left = select(runs, selection[g], operand, _gradient_key(key, g), step)
            left = left + (_joined(wanted) - operand)  # what a narrower type than the residual's cuts off
            for leaf, name, arrived, rest in zip(numbers, names, _parted(y, own), _parted(left, own), strict=True):
                leaves[leaf] = arrived.astype(operand.dtype)
                if name in state:
                    unsent[name] = rest[None].astype(jnp.float32)
        return jax.tree.unflatten(structure, leaves), unsent

    def summed(self, gradients: Any) -> Any:
        """Parameters' gradients, summed exactly."""
        leaves, structure = jax.tree.flatten(gradients)
        for s, site in enumerate(self.sites):
            if site.direction == "gradient":
                leaves[site.place] = self._collective(s).exact(leaves[site.place])
        return jax.tree.unflatten(structure, leaves)

    def gradient_damages(self, step_sizes: Any, gradients: Any, key: jax.Array, step: jax.Array) -> list[jax.Array]:
        """This device's share of ¼ Σ_i η_i e_i² for each group `[S]`, with η the step sizes, over gradient sites."""
        damages = [jnp.zeros(len(group.names)) for group in self.groups]
        sizes, own = jax.tree.leaves(step_sizes), jax.tree.leaves(gradients)
        for g, numbers in self._gradient_groups():
            first, operands = self.groups[g].sites[0], [own[leaf] for leaf in numbers]
            collective, x = self._collective(first), _joined(operands)
            exact = collective.exact(x)
            weights = _joined([sizes[leaf] for leaf in numbers]) / (4 * collective.num_copies)
            for j, run in enumerate(self._runs(first)):
                error = (run(x, _gradient_key(key, g), step)[0] - exact).astype(jnp.float32)
                damages[g] = damages[g].at[j].add(weights @ jnp.square(error))
        return damages

    def _evaluated(
        self,
        params: Any,
        batch: Any,
        key: jax.Array,
        step: jax.Array,
        run: Callable[..., jax.Array],
        extra: Callable[[int], Any],
        at_alternatives: Callable[..., Any],
    ) -> jax.Array:
        def at_collective(p: int, x: jax.Array, key: jax.Array) -> jax.Array:
            ahead = self.site_at["forward", p]
            back = self.site_at.get(("backward", p))
            if not jnp.issubdtype(x.dtype, jnp.floating):
                return self._collective(ahead).exact(x)
            keys = jax.random.split(jax.random.fold_in(key, p))

            def forward(x: jax.Array, extra: Any, keys: jax.Array, step: jax.Array) -> jax.Array:
                return run(ahead, x, extra, keys[0], step)

            def backward(cotangent: jax.Array, extra: Any, keys: jax.Array, step: jax.Array) -> jax.Array:
                if back is None:  # no parameter's gradient needs it, but someone differentiates all the same
                    return self._collective(ahead).transposed().exact(cotangent)
                return run(back, cotangent, extra, keys[1], step)

            extras = extra(ahead), None if back is None else extra(back)
            return with_backward(forward, backward, x, *extras, keys, step)

        return self.traced.loss(params, batch, key, at_collective, at_alternatives) / self.num_devices

    def _gradient_groups(self) -> list[tuple[int, list[int]]]:
        """Groups of gradient sites, and the parameter leaves of each: they travel as one vector."""
        of_gradients = [g for g, group in enumerate(self.groups) if self.sites[group.sites[0]].direction == "gradient"]
        return [(g, [self.sites[s].place for s in self.groups[g].sites]) for g in of_gradients]

    def _collective(self, s: int) -> Collective:
        collective = self.sites[s].collective
        assert collective is not None
        return collective

    def _runs(self, s: int) -> list[Callable[..., tuple[jax.Array, jax.Array]]]:
        return [partial(strategy.run, self._collective(s)) for strategy in self.groups[self.group_of[s]].strategies]

    def _num_tokens(self, y: jax.Array, num_copies: int) -> float:
        return float(prod(y.shape[:-1])) * self.num_devices / num_copies


def _gradient_key(key: jax.Array, group: int) -> jax.Array:
    return jax.random.fold_in(jax.random.fold_in(key, 2**31 - 1), group)


def _joined(arrays: Sequence[jax.Array]) -> jax.Array:
    return jnp.concatenate([x.ravel() for x in arrays])


def _parted(x: jax.Array, like: Sequence[jax.Array]) -> list[jax.Array]:
    """A vector cut into arrays of the given shapes."""
    ends = list(accumulate(y.size for y in like))
    return [part.reshape(y.shape) for part, y in zip(jnp.split(x, ends[:-1]), like, strict=True)]

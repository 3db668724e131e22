"""What each device computes: its share of the loss by a selection, or exact with probes, and its gradients' way."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from search_spaces.communication.collectives import Collective
from search_spaces.communication.groups import Group
from search_spaces.communication.selection import Selection, probed, probed_back, select, with_backward
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

        def traced(s: int | None) -> Any:
            chosen = None if s is None else selection[self.group_of[s]]
            return None if isinstance(chosen, int) else chosen

        def at_collective(p: int, x: jax.Array, key: jax.Array) -> jax.Array:
            ahead, back = self.site_at["forward", p], self.site_at.get(("backward", p))
            if not jnp.issubdtype(x.dtype, jnp.floating):
                return self._collective(ahead).exact(x)

            def forward(x: jax.Array, chosen: Any, keys: jax.Array, step: jax.Array) -> jax.Array:
                return run(ahead, x, chosen, keys[0], step)

            def backward(cotangent: jax.Array, chosen: Any, keys: jax.Array, step: jax.Array) -> jax.Array:
                if back is None:  # no parameter's gradient needs it, but someone differentiates all the same
                    return self._collective(ahead).transposed().exact(cotangent)
                return run(back, cotangent, chosen, keys[1], step)

            return with_backward(forward, backward, x, traced(ahead), traced(back), self._keys(p, key), step)

        def at_alternatives(p: int, branches: Sequence[Callable[..., Any]], operands: Sequence[Any]) -> Any:
            return select(branches, selection[self.group_of[self.site_at["forward", p]]], *operands)

        return self._evaluated(params, batch, key, at_collective, at_alternatives)

    def probed_loss(
        self,
        params: Any,
        batch: Any,
        key: jax.Array,
        step: jax.Array,
        probes: list[jax.Array],
        running: Mapping[int, int],
    ) -> jax.Array:
        """The same with everything exact; gradients of probes are damages of forward sites (see `selection.probed`).

        Args:
          params: this device's part.
          batch: this device's part.
          key: a random key.
          step: number of the training step.
          probes: for each group `[S]`.
          running: the branch of alternatives by their place, where it is not the first; those are not probed.
        """

        def at_collective(p: int, x: jax.Array, key: jax.Array) -> jax.Array:
            s, operand = self.site_at["forward", p], lax.stop_gradient(x)
            collective = self._collective(s)
            y, copies = collective.exact(x), collective.num_copies
            if not jnp.issubdtype(x.dtype, jnp.floating):
                return y
            errors = self._errors(s, operand, lax.stop_gradient(y), self._keys(p, key)[0], step)
            probe = probes[self.group_of[s]]
            return probed(y, errors, probe, collective.axes, copies, self._num_tokens(y, copies))

        def at_alternatives(p: int, branches: Sequence[Callable[..., Any]], operands: Sequence[Any]) -> Any:
            if p in running:
                return branches[running[p]](*operands)
            first, *others = [branch(*operands) for branch in branches]
            probe, found = probes[self.group_of[self.site_at["forward", p]]], []
            for i, y in enumerate(first):
                errors = jnp.stack([jnp.zeros_like(y), *(other[i] - y for other in others)])
                found.append(probed(y, errors, probe, (), 1, self._num_tokens(y, 1)))
            return found

        return self._evaluated(params, batch, key, at_collective, at_alternatives)

    def probed_back_loss(
        self,
        params: Any,
        batch: Any,
        along: Any,
        key: jax.Array,
        step: jax.Array,
        probes: list[jax.Array],
        running: Mapping[int, int],
    ) -> jax.Array:
        """Likewise for backward sites (see `selection.probed_back`), by derivatives along a direction of parameters.

        Arguments as for `probed_loss`, and `along` as `params`.
        """

        def at_collective(p: int, x: jax.Array, key: jax.Array) -> jax.Array:
            collective, back = self._collective(self.site_at["forward", p]), self.site_at.get(("backward", p))
            transposed = collective.transposed()
            if not jnp.issubdtype(x.dtype, jnp.floating):
                return collective.exact(x)

            def errors(cotangent: jax.Array, result: jax.Array, others: Any) -> jax.Array:
                return jnp.zeros((1, *x.shape)) if back is None else self._errors(back, cotangent, result, *others)

            probe = jnp.zeros(1) if back is None else probes[self.group_of[back]]
            others = self._keys(p, key)[1], step
            axes, copies = transposed.axes, transposed.num_copies
            return probed_back(collective.exact, transposed.exact, errors, x, probe, others, axes, copies)

        def at_alternatives(p: int, branches: Sequence[Callable[..., Any]], operands: Sequence[Any]) -> Any:
            return branches[running.get(p, 0)](*operands)

        def loss(params: Any) -> jax.Array:
            return self._evaluated(params, batch, key, at_collective, at_alternatives, forward_mode=True)

        return jax.jvp(loss, (params,), (along,))[0]

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
        at_collective: Callable[..., jax.Array],
        at_alternatives: Callable[..., Any],
        forward_mode: bool = False,
    ) -> jax.Array:
        """This device's share of the training loss."""
        return self.traced.loss(params, batch, key, at_collective, at_alternatives, forward_mode) / self.num_devices

    def _keys(self, place: int, key: jax.Array) -> jax.Array:
        """Of the forward and of the backward site at a place."""
        return jax.random.split(jax.random.fold_in(key, place))

    def _errors(self, s: int, x: jax.Array, exact: jax.Array, key: jax.Array, step: jax.Array) -> jax.Array:
        """Each strategy's result minus the exact one, `[S, ...]`."""
        return jnp.stack([run(x, key, step)[0] - exact for run in self._runs(s)])

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

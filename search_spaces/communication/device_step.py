"""What each device computes: its share of the loss by a selection, and its gradients' way."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp

from search_spaces.base import Selection
from search_spaces.communication.collectives import CollectiveOp
from search_spaces.communication.groups import Group
from search_spaces.communication.selection import select, with_backward
from search_spaces.communication.sites import Direction, Site, TracedLoss


@dataclass(frozen=True)
class DeviceStep:
    """A traced loss with strategies at its sites; its methods run inside a mapping over the mesh's axes.

    Attributes:
      traced: the loss.
      sites: its sites.
      groups: of the sites.
      num_devices: of the mesh.
    """

    traced: TracedLoss
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

    def loss(self, params: Any, batch: Any, key: jax.Array, step: jax.Array, selection: Selection) -> jax.Array:
        """This device's share of the training loss, by a selection."""

        def run(s: int, x: jax.Array, traced: Any, key: jax.Array, step: jax.Array) -> jax.Array:
            chosen = selection[self.group_of[s]] if traced is None else traced
            return select(self.runs(s), chosen, x, key, step)[0]

        def traced(s: int | None) -> Any:
            chosen = None if s is None else selection[self.group_of[s]]
            return None if isinstance(chosen, int) else chosen

        def at_collective(p: int, x: jax.Array, key: jax.Array) -> jax.Array:
            ahead, back = self.site_at["forward", p], self.site_at.get(("backward", p))
            if not jnp.issubdtype(x.dtype, jnp.floating):
                return self.collective(ahead).exact(x)

            def forward(x: jax.Array, chosen: Any, keys: jax.Array, step: jax.Array) -> jax.Array:
                return run(ahead, x, chosen, keys[0], step)

            def backward(cotangent: jax.Array, chosen: Any, keys: jax.Array, step: jax.Array) -> jax.Array:
                if back is None:  # no parameter's gradient needs it, but someone differentiates all the same
                    return self.collective(ahead).transposed().exact(cotangent)
                return run(back, cotangent, chosen, keys[1], step)

            return with_backward(forward, backward, x, traced(ahead), traced(back), self.keys(p, key), step)

        def at_alternatives(p: int, branches: Sequence[Callable[..., Any]], operands: Sequence[Any]) -> Any:
            return select(branches, selection[self.group_of[self.site_at["forward", p]]], *operands)

        return self.evaluated(params, batch, key, at_collective, at_alternatives)

    def send(
        self,
        gradients: Any,
        state: dict[str, jax.Array],
        key: jax.Array,
        step: jax.Array,
        selection: Selection,
    ) -> tuple[Any, dict[str, jax.Array]]:
        """Parameters' gradients as they arrive, and the residuals for the next step `[1, *local shape]`."""
        leaves, structure = jax.tree.flatten(gradients)
        unsent = {}
        for g, numbers in self.gradient_groups():
            own = [leaves[leaf] for leaf in numbers]
            names = [self.traced.param_names[leaf] for leaf in numbers]
            wanted = [x + state[name][0] if name in state else x for x, name in zip(own, names, strict=True)]
            operand = joined(wanted).astype(own[0].dtype)
            runs = self.runs(self.groups[g].sites[0])
            y, left = select(runs, selection[g], operand, gradient_key(key, g), step)
            left = left + (joined(wanted) - operand)  # what a narrower type than the residual's cuts off
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
                leaves[site.place] = self.collective(s).exact(leaves[site.place])
        return jax.tree.unflatten(structure, leaves)

    def evaluated(
        self,
        params: Any,
        batch: Any,
        key: jax.Array,
        at_collective: Callable[..., jax.Array],
        at_alternatives: Callable[..., Any],
        at_own_way_back: Callable[..., Any] | None = None,
    ) -> jax.Array:
        """This device's share of the training loss with operations at the places' stead (see `Interpreter`)."""
        loss = self.traced.loss(params, batch, key, at_collective, at_alternatives, at_own_way_back)
        return loss / self.num_devices

    def keys(self, place: int, key: jax.Array) -> jax.Array:
        """Of the forward and of the backward site at a place."""
        return jax.random.split(jax.random.fold_in(key, place))

    def gradient_groups(self) -> list[tuple[int, list[int]]]:
        """Groups of gradient sites, and the parameter leaves of each: they travel as one vector."""
        of_gradients = [g for g, group in enumerate(self.groups) if self.sites[group.sites[0]].direction == "gradient"]
        return [(g, [self.sites[s].place for s in self.groups[g].sites]) for g in of_gradients]

    def collective(self, s: int) -> CollectiveOp:
        """What runs at a site that is no alternatives."""
        collective = self.sites[s].collective
        assert collective is not None
        return collective

    def runs(self, s: int) -> list[Callable[..., tuple[jax.Array, jax.Array]]]:
        """The strategies at a site as functions of an operand, a key and the step's number (see `Strategy.run`)."""
        return [partial(strategy.run, self.collective(s)) for strategy in self.groups[self.group_of[s]].strategies]


def gradient_key(key: jax.Array, group: int) -> jax.Array:
    """Of what a group of gradients is sent by."""
    return jax.random.fold_in(jax.random.fold_in(key, 2**31 - 1), group)


def joined(arrays: Sequence[jax.Array]) -> jax.Array:
    """Arrays as one vector."""
    return jnp.concatenate([x.ravel() for x in arrays])


def _parted(x: jax.Array, like: Sequence[jax.Array]) -> list[jax.Array]:
    """A vector cut into arrays of the given shapes."""
    ends = list(accumulate(y.size for y in like))
    return [part.reshape(y.shape) for part, y in zip(jnp.split(x, ends[:-1]), like, strict=True)]

"""Sites that are given the same strategy, and what they choose from."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from search_spaces.communication.costs import site_bytes
from search_spaces.communication.sites import Site
from search_spaces.communication.strategies import DEFAULT, CollectiveStrategy


class Group(NamedTuple):
    """Sites that are given the same strategy.

    Attributes:
      name: their type, with a number from the second group of that type on; or the name of the only site.
      sites: their numbers.
      strategies: what they choose from; none for alternatives.
      names: of the strategies, or the labels of the alternatives.
    """

    name: str
    sites: tuple[int, ...]
    strategies: tuple[CollectiveStrategy, ...]
    names: tuple[str, ...]

    @property
    def lossless(self) -> np.ndarray:
        """Which strategies leave numbers as they are `[S]`; of alternatives the first does."""
        if not self.strategies:
            return np.arange(len(self.names)) == 0
        return np.array([strategy.lossless for strategy in self.strategies])


def as_sent(sites: Sequence[Site]) -> list[Site]:
    """What a group sends: each site for itself, but gradients as one vector, as compilers combine them."""
    if sites[0].direction != "gradient":
        return list(sites)
    return [replace(sites[0], shape=(sum(prod(site.shape) for site in sites),))]


def checked_strategies(
    strategies: Mapping[str, Sequence[CollectiveStrategy]],
) -> dict[str, tuple[CollectiveStrategy, ...]]:
    """A user's strategies by direction; raises as `CommunicationSpace`."""
    for direction, listed in strategies.items():
        if direction not in DEFAULT:
            raise ValueError(f"`strategies` has a direction {direction!r}; directions are {tuple(DEFAULT)}.")
        if words := [strategy for strategy in listed if isinstance(strategy, str)]:
            raise ValueError(
                f"`strategies[{direction!r}]` has {words}; give strategies, as Exact() and Encode(INT8) of "
                f"`search_spaces.communication`."
            )
        names = [strategy.name for strategy in listed]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"`strategies[{direction!r}]` must be at least one, each with its own name, got {names}.")
        kept = [strategy.name for strategy in listed if strategy.keeps_residual]
        if kept and direction != "gradient":
            raise ValueError(f"`strategies[{direction!r}]` has {kept}, which keep residuals: for gradients only.")
    return {direction: tuple(listed) for direction, listed in strategies.items()}


def group_sites(
    sites: Sequence[Site], strategies: Mapping[str, tuple[CollectiveStrategy, ...]], tie: Literal["type"] | None
) -> tuple[Group, ...]:
    """Sites by type, mesh axes and type of data (or every site by itself), with what is worth choosing.

    Sites of a type in several branches of alternatives share a strategy: one of the branches runs, so no choice is
    lost, and the damage that is measured in the first one stands for all.
    """
    members: dict[Any, list[int]] = {}
    for s, site in enumerate(sites):
        members.setdefault((site.type, site.axes, site.labels, site.dtype) if tie else s, []).append(s)
    groups: list[Group] = []
    num_of_name: Counter[str] = Counter()
    for numbers in members.values():
        first = sites[numbers[0]]
        listed = () if first.kind == "alternatives" else _worthwhile([sites[s] for s in numbers], strategies)
        names = first.labels or tuple(strategy.name for strategy in listed)
        name = first.type if tie else first.name
        num_of_name[name] += 1
        number = f" {num_of_name[name]}" if num_of_name[name] > 1 else ""
        groups.append(Group(f"{name}{number}", tuple(numbers), listed, names))
    return tuple(groups)


def _worthwhile(
    sites: Sequence[Site], strategies: Mapping[str, tuple[CollectiveStrategy, ...]]
) -> tuple[CollectiveStrategy, ...]:
    """Strategies without lossy ones that send as much as a lossless one, or that are for floating-point numbers."""
    listed, sites = strategies[sites[0].direction], as_sent(sites)
    lossless = [strategy for strategy in listed if strategy.lossless]
    if not lossless:
        return listed
    if not jnp.issubdtype(sites[0].dtype, jnp.floating):
        return tuple(lossless)
    least = min(sum(site_bytes(site, strategy) for site in sites) for strategy in lossless)
    return tuple(
        strategy
        for strategy in listed
        if strategy.lossless or sum(site_bytes(site, strategy) for site in sites) < least
    )

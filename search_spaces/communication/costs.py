"""What a choice of strategies costs, in seconds and in bytes: of a site, of a group, and of every part of a choice.

A stage of a collective takes the seconds of the α–β model; encoding and decoding take what kernels were measured to
take, or else what the roofline allows. Costs of different sites add up: nothing overlaps, except that the last
step's gradients may be summed while this step computes. What a site costs inside a branch of alternatives depends on
two choices, so it stands in a matrix for a pair of groups: an edge of the problem.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from importlib import resources
from math import prod
from typing import NamedTuple

import numpy as np

from cost.base import Hardware
from cost.collectives import collective_s
from search_spaces.base import Part, Traffic
from search_spaces.communication.base import CollectiveStrategy, Group, Precision, Site, Stage

_DATA = "encoding_seconds.json"


class GroupCosts(NamedTuple):
    """The costs of all groups, in seconds or in bytes.

    Attributes:
      nodes: for each group `[S]`: the sites outside of alternatives.
      edges: for a pair of groups `[S, S']`: sites of the second one that lie in branches of the first one.
    """

    nodes: list[np.ndarray]
    edges: dict[tuple[int, int], np.ndarray]

    def of_choice(self, choice: Sequence[int]) -> list[float]:
        """Returns what each group costs, `[V]`; an edge counts for its second group."""
        totals = [float(node[strategy]) for node, strategy in zip(self.nodes, choice, strict=True)]
        for (u, v), edge in self.edges.items():
            totals[v] += float(edge[choice[u], choice[v]])
        return totals


def group_costs(
    sites: Sequence[Site], groups: Sequence[Group], site_cost: Callable[[Site, CollectiveStrategy], float]
) -> GroupCosts:
    """Returns the costs of all groups, with `site_cost` the cost of one site with a strategy."""
    group_at = {sites[s].place: g for g, group in enumerate(groups) for s in group.sites if group.is_alternatives}
    nodes = [np.zeros(len(group.names)) for group in groups]
    edges: dict[tuple[int, int], np.ndarray] = {}
    for v, group in enumerate(groups):
        for site in as_sent([sites[s] for s in group.sites]) if not group.is_alternatives else ():
            costs = np.array([site_cost(site, strategy) for strategy in group.strategies])
            if site.branch is None:
                nodes[v] += costs
            else:
                place, branch = site.branch
                u = group_at[place]
                edge = edges.setdefault((u, v), np.zeros((len(groups[u].names), len(costs))))
                edge[branch] += costs
    return GroupCosts(nodes, edges)


def group_seconds(sites: Sequence[Site], groups: Sequence[Group], hardware: Hardware) -> GroupCosts:
    """Returns the seconds of all groups in an average step."""
    gradient_bytes = sum(_operand_bytes(site) for site in sites if site.direction == "gradient")
    return group_costs(sites, groups, partial(_site_seconds, hardware=hardware, gradient_bytes=gradient_bytes))


def explain(
    sites: Sequence[Site], groups: Sequence[Group], choice: Sequence[int], seconds: GroupCosts, sent_bytes: GroupCosts
) -> tuple[Part, ...]:
    """Returns one part for each group: its seconds in one step and what its sites send."""
    runs, parts = sites_that_run(sites, groups, choice), []
    costs = zip(groups, seconds.of_choice(choice), sent_bytes.of_choice(choice), strict=True)
    for v, (group, group_seconds, group_bytes) in enumerate(costs):
        first = sites[group.sites[0]]
        active_sites = [sites[s] for s in group.sites if runs[s]]
        count = sum(site.trips for site in as_sent(active_sites)) if active_sites else 0
        traffic = Traffic(first.direction, first.kind, first.axes, count, group_bytes)
        parts.append(Part(group.name, first.kind, v, group_seconds, traffic))
    return tuple(parts)


def sites_that_run(sites: Sequence[Site], groups: Sequence[Group], choice: Sequence[int]) -> list[bool]:
    """Returns for each site whether all alternatives around it run the branch that it lies in."""
    strategy_at = {s: strategy for group, strategy in zip(groups, choice, strict=True) for s in group.sites}
    runs: list[bool] = []
    running_branch: dict[int | None, int | None] = {}  # by the place of alternatives; None where they do not run
    for s, site in enumerate(sites):  # alternatives come before the sites in their branches
        runs.append(site.branch is None or running_branch[site.branch[0]] == site.branch[1])
        if site.is_alternatives:
            running_branch[site.place] = strategy_at[s] if runs[s] else None
    return runs


def as_sent(sites: Sequence[Site]) -> list[Site]:
    """Returns the sites of a group as they are sent: gradients as one vector, others each by itself.

    Compilers combine the all-reduces of gradients in the same way.
    """
    if sites[0].direction != "gradient":
        return list(sites)
    return [replace(sites[0], shape=(sum(prod(site.shape) for site in sites),))]


def site_bytes(site: Site, strategy: CollectiveStrategy) -> float:
    """Returns the bytes that each device sends for a site in an average step."""
    assert site.collective is not None
    return site.trips * sum(stage.sent_bytes for stage in strategy.stages(site.collective, site.shape, site.dtype))


def _site_seconds(site: Site, strategy: CollectiveStrategy, hardware: Hardware, gradient_bytes: float) -> float:
    """Returns the seconds of a site in an average step: latency and transfer of each stage, encoding and decoding.

    What is sent while the device computes counts with the seconds that remain after the site's share of the computing,
    which is its share of `gradient_bytes`, those of all gradients. So no second of computing hides two transfers.
    """
    assert site.collective is not None
    stages = strategy.stages(site.collective, site.shape, site.dtype)
    share = _operand_bytes(site) / gradient_bytes if site.direction == "gradient" else 0.0
    return site.trips * sum(stage.count * _stage_seconds(stage, hardware, share) for stage in stages)


def _operand_bytes(site: Site) -> float:
    """Returns the bytes of a site's operand on one device."""
    return prod(site.shape) * float(np.dtype(site.dtype).itemsize)


def _stage_seconds(stage: Stage, hardware: Hardware, share: float) -> float:
    seconds = float(collective_s(stage.kind, stage.num_bytes, stage.num_devices, hardware.link(stage.axis)))
    coding = 0.0 if stage.precision is None else stage.num_coded * coding_s(stage.precision, hardware)
    return max(0.0, seconds - share * stage.hidden_s) + coding


def coding_s(precision: Precision, hardware: Hardware) -> float:
    """Returns the seconds to encode or decode one element.

    They were measured for some kinds of devices; for others they are what the memory needs to read a float32 and write
    its code, or the reverse.
    """
    for kind, seconds in encoding_seconds()["seconds_per_element"].items():
        if hardware.name.lower().startswith(kind) and precision.name in seconds:
            return seconds[precision.name]
    return (4 + precision.bits / 8) / hardware.memory_bytes_per_s


@cache
def encoding_seconds() -> dict:
    """Returns the measured seconds for each element, by kind of device and precision, with date and versions.

    `python -m experiments.encoding_seconds` measures them.
    """
    return json.loads(resources.files("search_spaces.communication").joinpath(_DATA).read_text())

"""A plan of the bilevel search: one discrete choice, what it costs and what it does to the loss."""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, NamedTuple

import numpy as np
import optax

from cost.base import Hardware, Problem, num_strategies
from cost.evaluation import chosen_costs
from diffshard.bilevel_search.proof import Proof
from diffshard.bilevel_search.space import Choice, node_names, reference_choice
from diffshard.bilevel_search.training import Training, training
from search_spaces.communication.base import Group
from search_spaces.communication.costs import as_sent
from search_spaces.communication.space import CommunicationSpace


class Traffic(NamedTuple):
    """What the sites of a group send in one step.

    Attributes:
      direction: of values ("forward"), cotangents ("backward") or parameter gradients ("gradient").
      kind: of the collectives, or "alternatives", which send nothing themselves.
      axes: the mesh axes over which they go.
      times: executions in one step as chosen, none in a branch that is not; gradients that travel as one vector count
        once.
      sent_bytes: by each device, as chosen.
      exact_sent_bytes: by each device, as the exact choice.
    """

    direction: str
    kind: str
    axes: tuple[str, ...]
    times: int
    sent_bytes: float
    exact_sent_bytes: float


class GroupPlan(NamedTuple):
    """What was chosen for one node: a group of sites that share a strategy.

    Attributes:
      name: of the group, or the node's number.
      strategy: what was chosen.
      exact_strategy: what the exact choice has there.
      seconds: of a step, as chosen; the cost of an edge counts with its second node, devices' loads with none.
      exact_seconds: likewise of the exact choice.
      traffic: what its sites send; None where the space has no sites.
    """

    name: str
    strategy: str
    exact_strategy: str
    seconds: float
    exact_seconds: float
    traffic: Traffic | None = None


class BilevelPlan(NamedTuple):
    """A discrete choice, priced exactly: `print` shows it, `training` runs it.

    Attributes:
      choice: V strategy indices, in the space that was searched.
      groups: V records of what was chosen for what.
      mesh_axes: devices along each mesh axis; none where the space has no mesh.
      hardware: what the seconds are for, or None.
      seconds: the exact cost of a step; of a schedule the mean over training.
      cost_ratio: to the exact choice's, or to the mean strategies' where the loss is the same for all.
      loss_increase: over the exact choice, in units of the loss: predicted by the mean slopes of the search, or
        measured by training where there is a proof.
      feasible: whether the increase is within the bound, if there is one, and the problem's own limits are kept.
      message: what is not feasible and by how much, and what the search could not tell; empty where all is well.
      exact_share: share of training that runs the exact choice first, 0 unless a schedule won.
      proof: the table of candidates that were trained, or None.
      max_loss_increase: the bound, or None.
      lossless: whether the loss is the same for every choice, and so every choice exact.
      notes: of the space, on collectives whose bytes are not counted, say.
    """

    choice: Choice
    groups: tuple[GroupPlan, ...]
    mesh_axes: Mapping[str, int]
    hardware: Hardware | None
    seconds: float
    cost_ratio: float
    loss_increase: float
    feasible: bool
    message: str = ""
    exact_share: float = 0.0
    proof: Proof | None = None
    max_loss_increase: float | None = None
    lossless: bool = False
    notes: tuple[str, ...] = ()

    @property
    def nodes(self) -> tuple[str, ...]:
        """V names of what was chosen for."""
        return tuple(group.name for group in self.groups)

    @property
    def strategies(self) -> tuple[str, ...]:
        """V names of what was chosen."""
        return tuple(group.strategy for group in self.groups)

    @property
    def exact_seconds(self) -> float:
        """What `cost_ratio` is formed with: of a step with the exact choice, or the mean strategies' without any."""
        return self.seconds / self.cost_ratio if self.cost_ratio else sum(g.exact_seconds for g in self.groups)

    @property
    def sent_bytes(self) -> float:
        """By each device in one step, of a schedule in the mean; 0 where the space has no sites."""
        chosen = sum(group.traffic.sent_bytes for group in self.groups if group.traffic)
        return self.exact_share * self.exact_sent_bytes + (1 - self.exact_share) * chosen

    @property
    def exact_sent_bytes(self) -> float:
        """Likewise with the exact choice."""
        return sum(group.traffic.exact_sent_bytes for group in self.groups if group.traffic)

    def __str__(self) -> str:
        from diffshard.bilevel_search.plan_text import format_plan

        return format_plan(self)

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the plan with its proof as JSON; the file is replaced whole or not at all."""
        from diffshard.bilevel_search.plan_file import save

        save(self, path)

    @staticmethod
    def load(path: str | PathLike[str]) -> "BilevelPlan":
        """Reads a plan back.

        Raises:
          PlanError: the file is no plan of `bilevel`, damaged, or newer than this version.
          OSError: it cannot be read.
        """
        from diffshard.bilevel_search.plan_file import load

        return load(path)

    def training(self, space: Any, optimizer: optax.GradientTransformation, num_steps: int | None = None) -> Training:
        """How a model trains with this plan: two pure functions, the step to be jitted or searched like any other.

        >>> init, step = plan.training(space.on_mesh(mesh), optax.adamw(3e-4))
        >>> state = init(params, key)
        >>> step = diffshard.search(step, mesh)
        >>> state, loss = step(state, batch)

        Strategies are found by name, so that the space may be built anew and list others, in another order.

        Args:
          space: of the plan's groups; it emulates the mesh on one device, unless it comes from `space.on_mesh(mesh)`.
          optimizer: of the parameters.
          num_steps: of the whole training; needed where it runs the exact choice for a share of it.

        Raises:
          PlanError: the space is for another mesh, or has other groups or not their strategies; names the first.
          ValueError: the space has no loss, `optimizer` is none of optax's, or `num_steps` is missing; of `init`: `key`
            is no random key; of `init` and `step`: arrays of other shapes or types than the space was built for.
        """
        return training(self, space, optimizer, num_steps)


def groups_of(space: Any, problem: Problem, choice: Choice) -> tuple[GroupPlan, ...]:
    """A record of each node of a space with a choice in it."""
    exact, sizes = reference_choice(space, problem), num_strategies(problem)
    names = getattr(space, "strategy_names", lambda v: [str(s) for s in range(int(sizes[v]))])
    seconds, exact_seconds = _node_seconds(problem, choice), _node_seconds(problem, exact)
    traffic: list[Traffic | None] = [None] * len(choice)
    if isinstance(space, CommunicationSpace):
        running = _running(space, choice)
        sent = zip(space.groups, space.group_bytes(choice), space.group_bytes(exact), strict=True)
        traffic = [_traffic(space, running, *one) for one in sent]
    return tuple(
        GroupPlan(node, names(v)[choice[v]], names(v)[exact[v]], seconds[v], exact_seconds[v], traffic[v])
        for v, node in enumerate(node_names(space, problem))
    )


def _running(space: CommunicationSpace, choice: Choice) -> list[bool]:
    """For each site whether it runs: whether all alternatives around it, which come before it, run its branch."""
    chosen = {s: strategy for group, strategy in zip(space.groups, choice, strict=True) for s in group.sites}
    branch_at: dict[int, int | None] = {}  # that runs, by the place of alternatives; None where they do not
    running = []
    for s, site in enumerate(space.sites):
        running.append(site.branch is None or branch_at[site.branch[0]] == site.branch[1])
        if site.kind == "alternatives":
            branch_at[site.place] = chosen[s] if running[s] else None
    return running


def _traffic(
    space: CommunicationSpace, running: Sequence[bool], group: Group, sent_bytes: float, exact_sent_bytes: float
) -> Traffic:
    first = space.sites[group.sites[0]]
    ran = [space.sites[s] for s in group.sites if running[s]]
    times = sum(site.trips for site in as_sent(ran)) if ran else 0
    return Traffic(first.direction, first.kind, first.axes, times, sent_bytes, exact_sent_bytes)


def _node_seconds(problem: Problem, choice: Choice) -> list[float]:
    seconds, edge_s = chosen_costs(problem, choice)
    np.add.at(seconds, np.asarray(problem.edge_nodes, int).reshape(-1, 2)[:, 1], edge_s)
    return seconds.tolist()

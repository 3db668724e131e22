"""The plan that a search ends with: it shows, saves and loads itself, and makes a training step.

It is either the plan that the search's mean slopes speak for, or that of the candidate that trained best.
"""

from collections.abc import Sequence
from os import PathLike
from typing import Any, NamedTuple

import numpy as np
import optax

from diffshard.bilevel_search.base import BilevelState, LossPrediction, Objective
from diffshard.bilevel_search.plans.base import BilevelPlanData, NodePlan, Proof
from diffshard.bilevel_search.plans.file import load, save
from diffshard.bilevel_search.plans.page import format_page
from diffshard.bilevel_search.plans.text import format_plan
from diffshard.bilevel_search.plans.training import Training, training
from diffshard.bilevel_search.relaxation import (
    RoundedChoice,
    best_of,
    dominates,
    exact_cost,
    first_allowed,
    mean_cost,
    proposals,
)
from diffshard.plans.page_elements import framed
from search_spaces.base import Choice, LossySpace, Part, SearchSpace, Traffic


class BilevelPlan(BilevelPlanData):
    """A discrete choice, priced exactly: `print` shows it, `training` runs it.

    Its fields are those of `diffshard.bilevel_search.plans.base.BilevelPlanData`.
    """

    __slots__ = ()

    def __str__(self) -> str:
        return format_plan(self)

    def html(self) -> str:
        """Returns the plan as a self-contained page for a browser; in a notebook a plan shows itself as this page."""
        return format_page(self)

    def _repr_html_(self) -> str:
        return framed(self.html())

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the plan with its proof as JSON; the file is replaced whole or not at all."""
        save(self, path)

    @staticmethod
    def load(path: str | PathLike[str]) -> "BilevelPlan":
        """Reads a plan back.

        Raises:
          PlanError: the file is not a plan of `bilevel`, is damaged, or is newer than this version.
          OSError: it cannot be read.
        """
        return load(path, BilevelPlan)

    def training(
        self, space: SearchSpace[Any], optimizer: optax.GradientTransformation, num_steps: int | None = None
    ) -> Training:
        """Returns how a model trains with this plan: two pure functions, the step to be jitted or searched.

        >>> init, step = plan.training(space.on_mesh(mesh), optax.adamw(3e-4))
        >>> state = init(params, key)
        >>> step = diffshard.search(step, mesh)
        >>> state, loss = step(state, batch)

        Strategies are found by name, so that the space may be built anew and list others, in another order.

        Args:
          space: the space that the plan was made for, or one that has its nodes and strategies. It emulates the mesh on
            one device, unless it comes from `space.on_mesh(mesh)`.
          optimizer: of the parameters.
          num_steps: of the whole training; needed where it runs the exact choice for a share of it.

        Raises:
          PlanError: the space is for another mesh, or has other nodes or lacks their strategies; names the first.
          ValueError: the space has no loss, `optimizer` is not one of optax's, or `num_steps` is missing; from `init`:
            `key` is not a random key; from `init` and `step`: arrays of other shapes or types than the space was built
            for.
        """
        return training(self, space, optimizer, num_steps)


class Outcome(NamedTuple):
    """The end of a search.

    Attributes:
      relaxed_choice: its relaxed choice, V arrays `[S_v]`.
      batch_shapes: shapes of batches that the search was made with, if any are known.
    """

    state: BilevelState
    relaxed_choice: list[np.ndarray]
    objective: Objective
    batch_shapes: Sequence[Any]


def mean_prediction(state: BilevelState, exact: Choice) -> LossPrediction:
    """Returns the mean slopes as a prediction under which the exact choice adds nothing."""
    mean = LossPrediction(float(state.offset), [np.asarray(slope, float) for slope in state.slopes])
    return mean._replace(offset=mean.offset - mean.increase(exact))


def proposed_plan(space: LossySpace, exact: Choice, outcome: Outcome) -> BilevelPlan:
    """Returns the plan that a search stands for, without training any candidate."""
    state, problem, limit, note = outcome.state, space.problem, outcome.objective.limit, ""
    increases = {exact: 0.0}
    if int(state.step):
        proposed_choices = proposals(problem, outcome.relaxed_choice, mean_prediction(state, exact), exact, limit)
        if all(dominates(problem, exact, *pair) for pair in proposed_choices.items()):
            note = "what the search proposed costs no less than the exact choice and loses no less; this is exact"
        else:
            increases = proposed_choices
    else:
        num_refused = int(state.num_refused)
        note = f"nothing was learnt: 0 updates were accepted, {num_refused} refused; this is the exact choice"
    plan = lossy_plan(space, best_of(problem, increases, limit), limit, note)
    if nodes := _unmeasured_nodes(plan, exact, state):
        note = f"not measured: the estimator's loss does not depend on {', '.join(nodes)}; training can tell (`prove`)"
        plan = plan._replace(message="; ".join(filter(None, (plan.message, note))))
    return plan


def proved_plan(space: LossySpace, exact_seconds: float, proof: Proof, limit: float | None) -> BilevelPlan:
    """Returns the plan of the candidate that won a proof.

    Args:
      exact_seconds: of a step with the exact choice.
      limit: the bound on the increase of the loss, or None.
    """
    winner = proof.winner
    plan = lossy_plan(space, best_of(space.problem, {winner.choice: winner.loss_increase}, limit), limit)
    return plan._replace(
        seconds=winner.seconds,
        cost_ratio=winner.seconds / exact_seconds,
        exact_share=winner.exact_share,
        proof=proof,
    )


def lossy_plan(space: LossySpace, rounded_choice: RoundedChoice, limit: float | None, note: str = "") -> BilevelPlan:
    """Returns the plan of a choice in a space whose strategies change the loss.

    Args:
      limit: the bound on the increase of the loss, or None.
    """
    exact, seconds = tuple(int(s) for s in space.exact_choice()), float(rounded_choice.evaluation.cost)
    return BilevelPlan(
        choice=rounded_choice.choice,
        nodes=_nodes(space, rounded_choice.choice, exact),
        seconds=seconds,
        cost_ratio=seconds / exact_cost(space.problem, exact),
        loss_increase=rounded_choice.increase,
        feasible=not rounded_choice.message,
        message="; ".join(filter(None, (rounded_choice.message, note))),
        max_loss_increase=limit,
        mesh_axes=dict(space.mesh_axes),
        hardware=space.hardware,
        notes=tuple(space.notes),
    )


def exact_plan(space: SearchSpace[Any], rounded_choice: RoundedChoice) -> BilevelPlan:
    """Returns the plan of a choice in a space where every choice has the same loss."""
    seconds = float(rounded_choice.evaluation.cost)
    return BilevelPlan(
        choice=rounded_choice.choice,
        nodes=_nodes(space, rounded_choice.choice, first_allowed(space.problem)),
        mesh_axes={},
        hardware=None,
        seconds=seconds,
        cost_ratio=seconds / mean_cost(space.problem),
        loss_increase=0.0,
        feasible=not rounded_choice.message,
        message=rounded_choice.message,
        all_exact=True,
    )


def _nodes(space: SearchSpace[Any], choice: Choice, exact: Choice) -> tuple[NodePlan, ...]:
    """Returns a record of each node of a space with a choice in it."""
    nodes = range(len(choice))
    parts, exact_parts = (
        [[part for part in explanation if part.node == v] for v in nodes]
        for explanation in (space.explain(choice), space.explain(exact))
    )
    records = []
    for v in nodes:
        names, exact_traffic = space.strategy_names(v), _traffic(exact_parts[v])
        records.append(
            NodePlan(
                name=space.node_names[v],
                strategy=names[choice[v]],
                exact_strategy=names[exact[v]],
                seconds=sum(part.seconds for part in parts[v]),
                exact_seconds=sum(part.seconds for part in exact_parts[v]),
                traffic=_traffic(parts[v]),
                exact_sent_bytes=exact_traffic.sent_bytes if exact_traffic else 0.0,
            )
        )
    return tuple(records)


def _traffic(parts: Sequence[Part]) -> Traffic | None:
    """Returns what the parts of one node send together; None where the space does not tell."""
    traffic = [part.traffic for part in parts if part.traffic]
    if not traffic:
        return None
    return Traffic(
        direction=traffic[0].direction,
        kind=" and ".join(dict.fromkeys(one.kind for one in traffic)),
        axes=tuple(dict.fromkeys(axis for one in traffic for axis in one.axes)),
        count=sum(one.count for one in traffic),
        sent_bytes=sum(one.sent_bytes for one in traffic),
    )


def _unmeasured_nodes(plan: BilevelPlan, exact: Choice, state: BilevelState) -> list[str]:
    """Returns the names of nodes where the plan is not exact and all slopes are equal: the loss tells nothing."""
    nodes = zip(plan.node_names, plan.choice, exact, state.slopes, strict=True)
    return [node for node, s, exact_s, slopes in nodes if s != exact_s and np.ptp(np.asarray(slopes)) == 0]

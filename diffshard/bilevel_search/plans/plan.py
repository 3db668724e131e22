"""The plan that a search ends with: it shows, saves and loads itself, and makes a training step.

It is either the plan that the search's mean slopes speak for, or that of the candidate that trained best.
"""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import optax

from diffshard.bilevel_search.base import BilevelState, LossPrediction, Objective
from diffshard.bilevel_search.inputs import as_real
from diffshard.bilevel_search.plans.base import FILE, BilevelPlanData, NodePlan, Point, ValidationRuns
from diffshard.bilevel_search.plans.training import Training, training
from diffshard.bilevel_search.plans.views import format_page, format_plan
from diffshard.bilevel_search.relaxation import (
    RoundedChoice,
    best_of,
    dominates,
    exact_cost,
    first_allowed,
    mean_cost,
    proposals,
)
from diffshard.plans.plan_record import FileRecord
from search_spaces.base import Choice, LossySpace, Part, SearchSpace, Traffic


class BilevelPlan(BilevelPlanData, FileRecord):
    """A discrete choice, priced exactly: `print` shows it, `training` runs it.

    Its fields are those of `diffshard.bilevel_search.plans.base.BilevelPlanData`.
    """

    __slots__ = ()
    _file = FILE

    def __str__(self) -> str:
        return format_plan(self)

    def html(self) -> str:
        """Returns the plan as a self-contained page for a browser; in a notebook a plan shows itself as this page."""
        return format_page(self)

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
          space: the space that the plan was made for, or one that has its nodes and strategies. It simulates the mesh
            on one device, unless it comes from `space.on_mesh(mesh)`.
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
        note = (
            f"not measured: the estimator's loss does not depend on {', '.join(nodes)}; training can tell (`validate`)"
        )
        plan = plan._replace(message="; ".join(filter(None, (plan.message, note))))
    return plan


def validated_plan(
    space: LossySpace, exact_seconds: float, validation: ValidationRuns, limit: float | None
) -> BilevelPlan:
    """Returns the plan of the candidate that won its validation runs.

    Args:
      exact_seconds: of a step with the exact choice.
      limit: the bound on the increase of the loss, or None.
    """
    winner = validation.winner
    plan = lossy_plan(space, best_of(space.problem, {winner.choice: winner.loss_increase}, limit), limit)
    return plan._replace(
        seconds=winner.seconds,
        cost_ratio=winner.seconds / exact_seconds,
        exact_share=winner.exact_share,
        validation=validation,
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
    """Returns the total traffic of the parts of one node; None where the space does not tell."""
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


_SUFFIXES = (".png", ".svg", ".pdf")


class Pareto(NamedTuple):
    """Points and the ones among them that none beats.

    Attributes:
      points: all, as they were given.
      front: those that no other point beats in one and equals in the other, by rising seconds. Points whose loss is not
        finite are never in it.
    """

    points: tuple[Point, ...]
    front: tuple[Point, ...]

    def draw(self, path: str | Path, *, title: str = "") -> None:
        """Writes a drawing, .png, .svg or .pdf by the name's suffix.

        Raises:
          ValueError: another suffix, or matplotlib is not installed.
        """
        if Path(path).suffix not in _SUFFIXES:
            raise ValueError(f"`path` must end in {', '.join(_SUFFIXES)}; got {str(path)!r}.")
        try:
            from matplotlib.figure import Figure
        except ModuleNotFoundError:
            raise ValueError("`draw` needs matplotlib: `pip install '.[plot]'` in a clone of diffshard") from None
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.add_subplot()
        finite_points = [point for point in self.points if math.isfinite(point.loss)]
        at = [1e3 * p.seconds for p in finite_points], [p.loss for p in finite_points]
        axes.scatter(*at, s=18, color="0.6", label="candidates")
        axes.step([1e3 * p.seconds for p in self.front], [p.loss for p in self.front], where="post", label="best")
        for point in finite_points:
            color = "black" if point in self.front else "0.5"
            at = (1e3 * point.seconds, point.loss)
            axes.annotate(point.name, at, (4, 4), textcoords="offset points", fontsize=8, color=color)
        if chosen_points := [point for point in finite_points if point.chosen]:
            at = [1e3 * p.seconds for p in chosen_points], [p.loss for p in chosen_points]
            axes.scatter(*at, s=90, marker="*", color="#d9822b", zorder=3, label="chosen")
        axes.margins(x=0.15, y=0.1)
        axes.set(xlabel="step time / ms", ylabel="loss", title=title)
        axes.legend()
        figure.savefig(path)


def pareto(points: Sequence[Point | tuple[str, float, float]]) -> Pareto:
    """Returns the points that no other point beats in both time and loss.

    >>> [p.name for p in pareto([("exact", 2.0, 1.0), ("int8", 1.0, 1.1), ("int4", 1.5, 1.2)]).front]
    ['int8', 'exact']

    Raises:
      ValueError: there are no points, an entry is not (name, seconds, loss), or seconds are negative or not finite.
    """
    if not isinstance(points, Iterable) or isinstance(points, str):
        raise ValueError(f"`points` must be a sequence of (name, seconds, loss), got {points!r}.")
    all_points = tuple(_point(i, point) for i, point in enumerate(points))
    if not all_points:
        raise ValueError("`points` must hold at least one (name, seconds, loss), got none.")
    for point in all_points:
        if not 0 <= point.seconds < math.inf:
            raise ValueError(f"`points` must have finite seconds from 0 on; {point.name!r} has {point.seconds}.")
    front: list[Point] = []
    for point in sorted(all_points, key=lambda p: (p.seconds, p.loss)):
        if math.isfinite(point.loss) and (not front or point.loss < front[-1].loss):
            front.append(point)
    return Pareto(all_points, tuple(front))


def _point(number: int, point: Any) -> Point:
    fields = tuple(point) if isinstance(point, tuple | list) else ()
    numbers = [as_real(field) for field in fields[1:3]]
    if len(fields) not in (3, 4) or None in numbers:
        raise ValueError(f"`points[{number}]` must be (name, seconds, loss), got {point!r}.")
    return point if isinstance(point, Point) else Point(*fields)

"""The data of a plan of the bilevel search: what was chosen for each node, and the candidates that were trained."""

import itertools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from cost.base import Hardware
from cost.real_numbers import Amount, Count, FiniteNumber, Index, PositiveAmount, Share
from diffshard.base import printable
from diffshard.plans.documents import BILEVEL, RecordFile
from diffshard.successive_halving import HalvingRecord
from search_spaces.base import Choice, Traffic


class Measurement(NamedTuple):
    """The loss of a choice as training measured it.

    Attributes:
      choice: V strategy indices.
      increase: of the loss over the exact choice.
      share: of the whole training after which it was measured.
    """

    choice: Choice
    increase: float
    share: float = 1.0


class Candidate(NamedTuple):
    """A choice to be trained, or a schedule: the exact choice for a share of training, then this one."""

    name: str
    choice: Choice
    exact_share: float = 0.0


class TrainedCandidate(NamedTuple):
    """A candidate after its training.

    Attributes:
      name: the candidate's.
      choice: V strategy indices.
      exact_share: share of training that runs the exact choice first.
      seconds: mean step time of the whole training.
      loss: on `test_batches` after its last rung.
      loss_increase: over the exact choice after as many steps.
      record: scores and steps of the halving.
    """

    name: str
    choice: Choice
    exact_share: Share
    seconds: Amount
    loss: float
    loss_increase: float
    record: HalvingRecord


class Point(NamedTuple):
    """A choice's name, step time in seconds, loss, and whether it is the one that was taken."""

    name: str
    seconds: float
    loss: float
    chosen: bool = False


class ValidationRuns(NamedTuple):
    """The table of all candidates that were trained from the start.

    Attributes:
      table: all candidates, the best of the last rung first, then by how far they came.
      exact_losses: of the exact choice, after each rung.
      steps: of training in all, those of the exact choice included.
    """

    table: tuple[TrainedCandidate, ...]
    exact_losses: tuple[FiniteNumber, ...]
    steps: Index

    def __str__(self) -> str:
        lines = [f"{self.steps} steps of training; seconds, loss, increase over the exact choice, steps:"]
        lines += [
            f"  {t.seconds:.4g}  {t.loss:.4f}  {t.loss_increase:+.4f}  {t.record.steps:>5}  {t.name}"
            for t in self.table
        ]
        return printable("\n".join(lines))

    @property
    def winner(self) -> TrainedCandidate:
        """The best of the last rung."""
        return self.table[0]

    @property
    def finalists(self) -> tuple[TrainedCandidate, ...]:
        """The candidates that were trained to the end, first in the table: only their losses can be compared."""
        return tuple(candidate for candidate in self.table if len(candidate.record.scores) == len(self.exact_losses))

    def points(self) -> list[Point]:
        """Returns loss against step time of the finalists, for `pareto`; the winner is the one that is chosen."""
        return [Point(t.name, t.seconds, t.loss, t is self.winner) for t in self.finalists]


class NodePlan(NamedTuple):
    """A node of a plan: the strategy that was chosen for it, its seconds and its traffic.

    Attributes:
      name: of the node; in a communication space a group of operations that share a strategy.
      strategy: the name of the chosen strategy.
      exact_strategy: the name of the exact choice's strategy.
      seconds: of a step with the plan's choice, as the space explains it; what all nodes share counts with none.
      exact_seconds: the same with the exact choice.
      traffic: what the node sends with the plan's choice; None where the space does not tell.
      exact_sent_bytes: by each device with the exact choice; 0 where the space does not tell.
    """

    name: str
    strategy: str
    exact_strategy: str
    seconds: Amount
    exact_seconds: Amount
    traffic: Traffic | None = None
    exact_sent_bytes: Amount = 0.0


class BilevelPlanData(NamedTuple):
    """A discrete choice, priced exactly, with what it does to the loss.

    Attributes:
      choice: V strategy indices, in the space that was searched.
      nodes: V records, one for each node of the space.
      mesh_axes: devices along each mesh axis; none where the space has no mesh.
      hardware: what the seconds are for, or None.
      seconds: the exact cost of a step; of a schedule the mean over training.
      cost_ratio: to the exact choice's, or to the mean strategies' where the loss is the same for all.
      loss_increase: over the exact choice, in units of the loss: predicted by the mean slopes of the search, or
        measured by training where there are validation runs.
      feasible: whether the increase is within the bound, if there is one, and the problem's own limits are kept.
      message: what is not feasible and by how much, and what the search could not tell; empty where all is well.
      exact_share: share of training that runs the exact choice first, 0 unless a schedule won.
      validation: the table of candidates that were trained, or None.
      max_loss_increase: the bound, or None.
      all_exact: whether the loss is the same for every choice.
      notes: of the space, such as collectives whose bytes are not counted.
    """

    choice: Choice
    nodes: tuple[NodePlan, ...]
    mesh_axes: Mapping[str, Count]
    hardware: Hardware | None
    seconds: Amount
    cost_ratio: Amount
    loss_increase: float
    feasible: bool
    message: str = ""
    exact_share: Share = 0.0
    validation: ValidationRuns | None = None
    max_loss_increase: PositiveAmount | None = None
    all_exact: bool = False
    notes: tuple[str, ...] = ()

    @property
    def node_names(self) -> tuple[str, ...]:
        """The names of the nodes, `[V]`."""
        return tuple(node.name for node in self.nodes)

    @property
    def strategies(self) -> tuple[str, ...]:
        """The names of the chosen strategies, `[V]`."""
        return tuple(node.strategy for node in self.nodes)

    @property
    def baseline_seconds(self) -> float:
        """Seconds that `cost_ratio` is formed with: of the exact choice's step, or of the mean strategies'."""
        return self.seconds / self.cost_ratio if self.cost_ratio else sum(node.exact_seconds for node in self.nodes)

    @property
    def sent_bytes(self) -> float:
        """Bytes that each device sends in one step, of a schedule in the mean; 0 where the space does not tell."""
        chosen_bytes = sum(node.traffic.sent_bytes for node in self.nodes if node.traffic)
        return self.exact_share * self.exact_sent_bytes + (1 - self.exact_share) * chosen_bytes

    @property
    def exact_sent_bytes(self) -> float:
        """Bytes that each device sends in one step with the exact choice."""
        return sum(node.exact_sent_bytes for node in self.nodes)


_DIRECTIONS = ("forward", "backward", "gradient", "")
"""The directions that traffic may have; the empty one is of spaces that do not tell directions apart."""
_MOST_DEVICES = 2**31  # of a mesh: more than JAX can count
_MOST_STRATEGIES = 2**31  # of a node: more than any space can list


def check_bilevel_plan(plan: BilevelPlanData) -> None:
    """Checks that the fields of a plan fit each other; that they have the right types is known."""
    if not plan.nodes:
        raise ValueError("it has no `nodes`")
    _check_choice("", plan.choice, len(plan.nodes))
    axes = plan.mesh_axes
    if math.prod(axes.values()) >= _MOST_DEVICES:
        raise ValueError(f"`mesh_axes` is {dict(axes)}, not axes with their numbers of devices")
    if plan.exact_share == 1:
        raise ValueError(f"`exact_share` is {plan.exact_share}, not from 0 to below 1")
    if not plan.feasible and not plan.message:
        raise ValueError("`feasible` is False, but `message` does not say why")
    for node in plan.nodes:
        _check_node(node, axes)
    if plan.validation is not None:
        _check_validation(plan.validation, len(plan.nodes))
        _check_winner(plan, plan.validation.winner)


def _check_node(node: NodePlan, axes: Mapping[str, int]) -> None:
    where = f" of node {node.name!r}"
    if (traffic := node.traffic) is None:
        return
    if traffic.direction not in _DIRECTIONS:
        raise ValueError(f"`direction`{where} is {traffic.direction!r}, none of {', '.join(_DIRECTIONS[:-1])}")
    for axis in traffic.axes:
        if axes and axis not in axes:
            raise ValueError(f"`axes`{where} has {axis!r}, which is no axis of `mesh_axes`, {tuple(axes)}")


def _check_validation(validation: ValidationRuns, num_nodes: int) -> None:
    """Checks that each candidate can be, and that they are in order: the longest trained first."""
    if not validation.finalists:
        raise ValueError("no candidate of `validation` was trained to the end")
    for candidate in validation.table:
        _check_candidate(candidate, num_nodes, len(validation.exact_losses))
    for before, after in itertools.pairwise(validation.table):
        if len(before.record.scores) < len(after.record.scores):
            raise ValueError(
                f"`table` of `validation` has candidate {before.name!r} with {len(before.record.scores)} `scores` "
                f"before {after.name!r} with {len(after.record.scores)}, though the longest trained come first"
            )
    taken_steps = sum(candidate.record.steps for candidate in validation.table)
    if validation.steps < taken_steps:
        raise ValueError(
            f"`steps` of `validation` is {validation.steps}, fewer than the {taken_steps} of its candidates"
        )


def _check_candidate(candidate: TrainedCandidate, num_nodes: int, num_rungs: int) -> None:
    where = f" of candidate {candidate.name!r}"
    _check_choice(where, candidate.choice, num_nodes)
    scores = candidate.record.scores
    if not 1 <= len(scores) <= num_rungs:
        raise ValueError(f"`scores`{where} are {len(scores)}, not from 1 to the {num_rungs} of `exact_losses`")
    for score in scores:
        if not all(map(_is_number, score if isinstance(score, tuple) and score else (score,))):
            raise ValueError(f"`scores`{where} has {score!r}, which is no number and no list of numbers")


def _check_winner(plan: BilevelPlanData, winner: TrainedCandidate) -> None:
    """Checks that the plan is that of the candidate that won."""
    if plan.choice != winner.choice:
        raise ValueError(f"`choice` is {plan.choice}, but candidate {winner.name!r}, which won, has {winner.choice}")
    for name in ("seconds", "exact_share", "loss_increase"):
        value, won = getattr(plan, name), getattr(winner, name)
        if not (math.isclose(value, won, rel_tol=1e-6) or (math.isnan(value) and math.isnan(won))):
            raise ValueError(f"`{name}` is {value}, but candidate {winner.name!r}, which won, has {won}")


def _check_choice(where: str, choice: Choice, num_nodes: int) -> None:
    if len(choice) != num_nodes:
        raise ValueError(f"`choice`{where} has {len(choice)} numbers for {num_nodes} nodes")
    if min(choice) < 0:
        raise ValueError(f"`choice`{where} is {choice}, with a number below 0")
    if max(choice) >= _MOST_STRATEGIES:
        raise ValueError(f"`choice`{where} has {max(choice)}, which is no strategy that a node could have")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# Without its validation runs, what was measured would pass for a prediction.
FILE = RecordFile(BILEVEL, 4, check_bilevel_plan, needed=("validation",))
to_json, from_json = FILE.to_json, FILE.from_json

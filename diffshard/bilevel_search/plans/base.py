"""The data of a plan of the bilevel search: what was chosen for each node, and the candidates that were trained."""

from collections.abc import Mapping
from typing import NamedTuple

from cost.base import Hardware
from cost.number_ranges import Amount, Count, FiniteNumber, Index, PositiveAmount, Share
from diffshard.base import printable
from diffshard.successive_halving import HalvingRecord
from search_spaces.base import Choice, Traffic


class Measurement(NamedTuple):
    """What training measured of a choice.

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


class Proof(NamedTuple):
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
      name: of the node; in a communication space a group of sites that share a strategy.
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
        measured by training where there is a proof.
      feasible: whether the increase is within the bound, if there is one, and the problem's own limits are kept.
      message: what is not feasible and by how much, and what the search could not tell; empty where all is well.
      exact_share: share of training that runs the exact choice first, 0 unless a schedule won.
      proof: the table of candidates that were trained, or None.
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
    proof: Proof | None = None
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

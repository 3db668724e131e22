"""The vocabulary of the bilevel search: its state and metrics, estimators and objectives, candidates, proofs and plans.

Letters for sizes: V nodes of the space's problem, S_v strategies of node v.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import jax
import numpy as np
import optax

from cost.base import Hardware
from diffshard.successive_halving import HalvingRecord
from search_spaces.base import Batch, LossySpace, Params, RelaxedChoice, Residuals, Selection, Traffic

LossFn = Callable[[Params, Batch], jax.Array]
"""`loss_fn(params, batch)`: the loss of a model, a scalar."""
StrategyIndices = tuple[int, ...]
"""A choice that can be hashed, `[V]`."""


class LossAndGradients(NamedTuple):
    """What one training step computes before its optimiser: the loss, its gradients, and the next step's residuals."""

    loss: jax.Array
    gradients: Params
    residuals: Residuals


class TrainingProgress(NamedTuple):
    """How far training has come when an estimator looks at it.

    Attributes:
      step: how many steps were taken, an integer scalar.
      step_sizes: as `params`: how far a unit of each gradient moves its parameter in all.
    """

    step: jax.Array
    step_sizes: Params


Increase = Callable[[LossySpace, Params, Batch, RelaxedChoice, jax.Array, TrainingProgress], jax.Array]
"""`increase(space, params, batch, relaxed, key, progress)`: by how much the relaxed choice raises the loss over the
exact choice, a scalar. It is differentiated with respect to `relaxed`, and with `order=2` to `params`."""


class Estimator(NamedTuple):
    """How training runs during the search, and how the loss depends on the relaxed choice.

    Attributes:
      increase: see `Increase`.
      selection: what training runs, made of the relaxed choice and a key; None is the exact choice.
      weights: the same as weights that can be differentiated with respect to the relaxed choice, for `order=2`; None
        where training does not depend on the choice.
    """

    increase: Increase
    selection: Callable[[RelaxedChoice, jax.Array], Selection] | None = None
    weights: Callable[[RelaxedChoice, jax.Array], RelaxedChoice] | None = None


class ObjectiveWeights(NamedTuple):
    """What the slopes of the loss (in its own unit) and of the cost ratio are multiplied by; scalars."""

    loss: jax.Array
    cost: jax.Array


class Objective(Protocol):
    """Weighs a loss increase against a cost ratio; the multiplier `[]` is kept in the search's state."""

    def weights(self, multiplier: jax.Array, increase: jax.Array, step: jax.Array) -> ObjectiveWeights:
        """Returns the weights of one step."""
        ...

    def next_multiplier(self, multiplier: jax.Array, increase: jax.Array) -> jax.Array:
        """Returns the multiplier of the next step."""
        ...


class BilevelState(NamedTuple):
    """What a search carries from step to step; a pytree of arrays, so it can be checkpointed.

    Attributes:
      params: θ, trained as they are searched with.
      weights_state: of the optimiser of θ.
      residuals: what the exact choice's strategies carry.
      logits: A, V arrays `[S_v]`; the relaxed choice is their softmax.
      choice_state: of the optimiser of A.
      multiplier: of the bound on the loss, 0 without one.
      offset: running mean of the loss increase less ⟨slopes, relaxed choice⟩.
      slopes: V arrays `[S_v]`, running mean of the increase's slope: what a strategy adds to the loss.
      step: how many steps were taken.
      num_refused: how many were refused.
      key: consumed by every step.
    """

    params: Params
    weights_state: optax.OptState
    residuals: Residuals
    logits: RelaxedChoice
    choice_state: optax.OptState
    multiplier: jax.Array
    offset: jax.Array
    slopes: RelaxedChoice
    step: jax.Array
    num_refused: jax.Array
    key: jax.Array


class BilevelMetrics(NamedTuple):
    """What one step measured; scalars.

    Attributes:
      train_loss: of θ before the step, as training runs under the estimator.
      loss_increase: what the relaxed choice adds to the loss of this validation batch, by the estimator; 0 where the
        loss does not depend on the choice. In steps that leave A as it is: by the mean slopes.
      cost_ratio: relaxed cost as a ratio to the exact choice's.
      multiplier: of the bound on the loss.
      loss_slope: norm of the weighed slope of the loss in A; 0 in steps that leave A as it is, as is `cost_slope`.
      cost_slope: norm of the weighed slope of the cost: beside `loss_slope` it tells which of the two decides.
      entropy: mean over nodes, as a share of uniform weights': 1 is undecided, 0 is decided.
      undershoot: share of the allowed loss increase that the mean of late steps does not use, negative above it; 0
        without a bound.
      collapsed: the relaxed choice is decided, so that no gradient moves it, with over half of the allowed loss unused
        although there is a cheaper choice.
      refused: the step gave a number that is not finite; the state stayed what it was, but for its key.
    """

    train_loss: jax.Array
    loss_increase: jax.Array
    cost_ratio: jax.Array
    multiplier: jax.Array
    loss_slope: jax.Array
    cost_slope: jax.Array
    entropy: jax.Array
    undershoot: jax.Array
    collapsed: jax.Array
    refused: jax.Array


class Prediction(NamedTuple):
    """The mean loss increase that a search measured, as a linear function of the relaxed choice, in units of the loss.

    Attributes:
      offset: at weights of zero; 0 where the estimator itself is linear.
      slopes: V arrays `[S_v]`.
    """

    offset: float
    slopes: Sequence[np.ndarray]

    def increase(self, choice: Sequence[int]) -> float:
        """Returns what a choice is predicted to add to the loss."""
        return self.offset + float(sum(row[s] for row, s in zip(self.slopes, choice, strict=True)))


class Measurement(NamedTuple):
    """What training measured of a choice.

    Attributes:
      choice: V strategy indices.
      increase: of the loss over the exact choice.
      share: of the whole training after which it was measured.
    """

    choice: StrategyIndices
    increase: float
    share: float = 1.0


class Candidate(NamedTuple):
    """A choice to be trained, or a schedule: the exact choice for a share of training, then this one."""

    name: str
    choice: StrategyIndices
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
    choice: StrategyIndices
    exact_share: float
    seconds: float
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
    exact_losses: tuple[float, ...]
    steps: int

    def __str__(self) -> str:
        lines = [f"{self.steps} steps of training; seconds, loss, increase over the exact choice, steps:"]
        lines += [
            f"  {t.seconds:.4g}  {t.loss:.4f}  {t.loss_increase:+.4f}  {t.record.steps:>5}  {t.name}"
            for t in self.table
        ]
        return "\n".join(lines)

    @property
    def winner(self) -> TrainedCandidate:
        """The best of the last rung."""
        return self.table[0]

    @property
    def finalists(self) -> tuple[TrainedCandidate, ...]:
        """The candidates that were trained to the end, first in the table: only their losses can be compared."""
        return tuple(trained for trained in self.table if len(trained.record.scores) == len(self.exact_losses))

    def points(self) -> list[Point]:
        """Loss against step time of the finalists, for `pareto`; the winner is the one that is chosen."""
        return [Point(t.name, t.seconds, t.loss, t is self.winner) for t in self.finalists]


class GroupPlan(NamedTuple):
    """What was chosen for one node: a group of sites that share a strategy.

    Attributes:
      name: of the node.
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
    seconds: float
    exact_seconds: float
    traffic: Traffic | None = None
    exact_sent_bytes: float = 0.0


class BilevelPlanData(NamedTuple):
    """A discrete choice, priced exactly, with what it does to the loss.

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
      all_exact: whether the loss is the same for every choice.
      notes: of the space, such as collectives whose bytes are not counted.
    """

    choice: StrategyIndices
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
    all_exact: bool = False
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
        """Seconds that `cost_ratio` is formed with: of the exact choice's step, or of the mean strategies'."""
        return self.seconds / self.cost_ratio if self.cost_ratio else sum(g.exact_seconds for g in self.groups)

    @property
    def sent_bytes(self) -> float:
        """Bytes that each device sends in one step, of a schedule in the mean; 0 where the space does not tell."""
        chosen = sum(group.traffic.sent_bytes for group in self.groups if group.traffic)
        return self.exact_share * self.exact_sent_bytes + (1 - self.exact_share) * chosen

    @property
    def exact_sent_bytes(self) -> float:
        """Bytes that each device sends in one step with the exact choice."""
        return sum(group.exact_sent_bytes for group in self.groups)

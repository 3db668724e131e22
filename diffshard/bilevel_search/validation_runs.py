"""Candidates train from the start beside the exact choice, because increases measured after the fact mislead."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from cost.evaluation import Evaluator
from diffshard.bilevel_search.base import BilevelState, LossPrediction, Objective
from diffshard.bilevel_search.candidates import refined_candidates
from diffshard.bilevel_search.inputs import as_whole, batch_shapes, check_key, check_known, shapes_of
from diffshard.bilevel_search.plans.base import Candidate, Measurement, TrainedCandidate, ValidationRuns
from diffshard.bilevel_search.plans.training import TrainingState, gradients_of, next_state
from diffshard.successive_halving import HalvingRecord, check_rungs, each, halving
from search_spaces.base import Batch, Choice, LossySpace, Params


@dataclass(frozen=True)
class CandidatesData:
    """Data and settings to train candidates with, apart from the search's data and from those of the last test.

    Attributes:
      params: where every candidate starts: as the model is initialised.
      train_batches: a sequence of batches, one for each step; every candidate sees the same.
      test_batches: batches that losses are measured on.
      key: of the strategies' noise; the same for every candidate.
      rungs: steps of each rung of successive halving; there must be as many `train_batches` as steps in all.
      keep: share that goes on after each rung.
      num_candidates: at most; the exact choice and the cheapest come on top.
      num_repeats: trainings of each candidate, which see the same batches in another order and other noise; losses are
        their means. One training's loss is off by what chance does to it: several tell smaller increases apart.
      num_refinements: how often, after the halving, the predictions are corrected by what was measured and what they
        then propose is trained through all rungs.
    """

    params: Params
    train_batches: Sequence[Batch]
    test_batches: Sequence[Batch]
    key: jax.Array
    rungs: tuple[int, ...] = (50, 50, 100)
    keep: float = 0.5
    num_candidates: int = 24
    num_repeats: int = 1
    num_refinements: int = 3

    def __post_init__(self):
        check_rungs(self.rungs, self.keep)
        for name, batches in (("train_batches", self.train_batches), ("test_batches", self.test_batches)):
            if not isinstance(batches, Sequence):
                got = type(batches).__name__
                raise ValueError(f"`{name}` must be a sequence, which every candidate sees anew, as a list; got {got}.")
        if len(self.train_batches) < sum(self.rungs):
            raise ValueError(
                f"`train_batches` must be one for each of the {sum(self.rungs)} steps of `rungs`, "
                f"got {len(self.train_batches)}."
            )
        if not len(self.test_batches):
            raise ValueError("`test_batches` must hold at least one batch, got none.")
        for name, count, least_count in (
            ("num_candidates", self.num_candidates, 1),
            ("num_repeats", self.num_repeats, 1),
            ("num_refinements", self.num_refinements, 0),
        ):
            whole_count = as_whole(count)
            if whole_count is None or whole_count < least_count:
                raise ValueError(f"`{name}` must be a whole number of at least {least_count}, got {count!r}.")
        check_key(self.key)


def check_data(data: CandidatesData, state: BilevelState, known_shapes: Sequence[Any]) -> None:
    """Checks that candidates' data have the shapes that a search was made with.

    Args:
      data: to train candidates on.
      state: of the search.
      known_shapes: shapes of batches that `init` got; where there are none, nothing is known.

    Raises:
      ValueError: names the first that differs.
    """
    params, shapes = (shapes_of(tree) for tree in (data.params, state.params))
    if params != shapes:
        raise ValueError(f"`candidates_data.params` must have the shapes of the search's, {shapes}; got {params}.")
    for name, batches in (("train_batches", data.train_batches), ("test_batches", data.test_batches)):
        for i, batch in enumerate(batches):
            check_known(f"{name}[{i}]", batch_shapes(f"{name}[{i}]", batch), known_shapes)


def validate(
    space: LossySpace,
    candidates: Sequence[Candidate],
    data: CandidatesData,
    *,
    optimizer: optax.GradientTransformation,
    objective: Objective,
    prediction: LossPrediction | None = None,
) -> ValidationRuns:
    """Trains the exact choice and the candidates, then what measurements make of the predictions; the best one wins.

    The exact choice goes through all rungs, candidates by successive halving. After it the predictions are calibrated
    on all that was measured, and the choices that they then propose go through all rungs too, `num_refinements` times.

    Under a bound on the loss a candidate's score is (increase beyond the bound, mean step time), compared in this
    order; under a weight of the cost it is increase + weight · cost ratio. Every candidate sees the same batches, noise
    and initial parameters.

    Args:
      space: strategies that change the loss.
      candidates: to be tried, the exact choice aside.
      data: batches, key and rungs.
      optimizer: of the parameters.
      objective: what decides.
      prediction: of the loss, to be refined; None leaves it at the candidates.

    Raises:
      ValueError: the exact choice's own loss is not finite, so that there is nothing to compare with.
    """
    trials = _Trials(space, data, optimizer, objective)
    trained_candidates = trials.train_by_halving(candidates)
    for _ in range(data.num_refinements):
        measurements, noise = trials.measurements(trained_candidates), trials.noise
        new = [] if prediction is None else refined_candidates(space, prediction, measurements, objective, noise=noise)
        if not new:
            break
        for candidate in new:
            trained_candidates += trials.train_by_halving([candidate])  # alone it goes through all rungs
    table = sorted(
        [trials.trained_exact_candidate(), *trained_candidates],
        key=lambda t: (-len(t.record.scores), t.record.scores[-1]),
    )
    return ValidationRuns(tuple(table), trials.exact.losses, data.num_repeats * sum(t.record.steps for t in table))


class _CandidateTraining(NamedTuple):
    """A candidate in training."""

    candidate: Candidate
    states: tuple[TrainingState, ...]
    step: int
    losses: tuple[float, ...]


class _Trials:
    """Trainings of candidates beside that of the exact choice, which is done first."""

    def __init__(
        self,
        space: LossySpace,
        data: CandidatesData,
        optimizer: optax.GradientTransformation,
        objective: Objective,
    ):
        self._space, self._data = space, data
        self._exact_choice = tuple(int(strategy) for strategy in space.exact_choice())
        self._num_steps = sum(data.rungs)
        self._optimizer, self._objective = optimizer, objective
        self._take_step, self._test = _steps(space, optimizer, data)
        self._keys = [data.key, *(jax.random.fold_in(data.key, 2**31 - r) for r in range(1, data.num_repeats))]
        self._evaluator = Evaluator(space.problem)
        self._exact_seconds = float(self._evaluator(self._exact_choice).cost)
        self.exact = self._start(Candidate("exact", self._exact_choice))
        for steps in data.rungs:
            self.exact = self._train(self.exact, steps)
            if not math.isfinite(self.exact.losses[-1]):
                raise ValueError(
                    f"`candidates_data`: the exact choice's loss is {self.exact.losses[-1]} after {self.exact.step} "
                    f"steps, so nothing can be compared with it; look for batches that are not finite, or lower the "
                    f"rate of training."
                )

    @property
    def noise(self) -> float:
        """The standard deviation of a measured increase near 0, in units of the loss."""
        return self._objective.noise(abs(self.exact.losses[-1])) / self._data.num_repeats**0.5

    def train_by_halving(self, candidates: Sequence[Candidate]) -> list[TrainedCandidate]:
        """Trains candidates by successive halving."""
        starts, names = [self._start(candidate) for candidate in candidates], [c.name for c in candidates]
        data = self._data
        result = halving(starts, each(self._train_and_score), rungs=data.rungs, keep=data.keep, names=names)
        pairs = zip(result.trained, result.table, strict=True)
        return [self._trained_candidate(training, record) for training, record in pairs]

    def measurements(self, trained_candidates: Sequence[TrainedCandidate]) -> list[Measurement]:
        """Returns the measurements of the candidates that trained with one choice from the start."""
        return [
            Measurement(t.choice, t.loss_increase, t.record.steps / self._num_steps)
            for t in trained_candidates
            if not t.exact_share
        ]

    def trained_exact_candidate(self) -> TrainedCandidate:
        """Returns the exact choice as a row of the table."""
        scores = (self._score(self.exact.candidate, 0.0),) * len(self._data.rungs)
        return self._trained_candidate(self.exact, HalvingRecord("exact", scores, self.exact.step))

    def _start(self, candidate: Candidate) -> _CandidateTraining:
        params, first = self._data.params, jnp.zeros((), jnp.int32)
        states = self._optimizer.init(params), self._space.init_residuals(params)
        return _CandidateTraining(
            candidate, tuple(TrainingState(params, *states, key, first) for key in self._keys), 0, ()
        )

    def _choice_at(self, candidate: Candidate, step: int) -> Choice:
        return self._exact_choice if step < candidate.exact_share * self._num_steps else candidate.choice

    def _train(self, training: _CandidateTraining, num_steps: int) -> _CandidateTraining:
        candidate, states, begin, losses = training
        end, batches = begin + num_steps, self._data.train_batches
        new_states, repeat_losses = [], []
        for repeat, state in enumerate(states):
            shift = repeat * len(batches) // len(states)
            for step in range(begin, end):
                choice, batch = _traced_choice(self._choice_at(candidate, step)), batches[(step + shift) % len(batches)]
                state = self._take_step(choice, state, batch)
            new_states.append(state)
            # Tested as it was trained last: an increase that was never trained with would mislead.
            repeat_losses.append(self._test(self._choice_at(candidate, end - 1), state.params, jnp.int32(end)))
        return _CandidateTraining(candidate, tuple(new_states), end, (*losses, float(np.mean(repeat_losses))))

    def _train_and_score(self, training: _CandidateTraining, num_steps: int) -> tuple[_CandidateTraining, Any]:
        longer = self._train(training, num_steps)
        return longer, self._score(longer.candidate, self._increase(longer))

    def _increase(self, training: _CandidateTraining) -> float:
        return training.losses[-1] - self.exact.losses[len(training.losses) - 1]

    def _score(self, candidate: Candidate, increase: float) -> Any:
        finite = increase if math.isfinite(increase) else math.inf  # a training that diverges has lost
        return self._objective.score(finite, self._seconds(candidate), self._exact_seconds)

    def _seconds(self, candidate: Candidate) -> float:
        share, seconds = candidate.exact_share, float(self._evaluator(candidate.choice).cost)
        return share * self._exact_seconds + (1 - share) * seconds

    def _trained_candidate(self, training: _CandidateTraining, record: HalvingRecord) -> TrainedCandidate:
        candidate = training.candidate
        losses = training.losses[-1], self._increase(training)
        return TrainedCandidate(*candidate, self._seconds(candidate), *losses, record)


def _steps(space: LossySpace, optimizer: optax.GradientTransformation, data: CandidatesData) -> tuple[Any, Any]:
    """Returns a jitted training step and a test, compiled once for all choices."""

    @jax.jit
    def take_step(choice, state, batch):
        return next_state(optimizer, state, gradients_of(space, state, batch, choice))

    @jax.jit
    def loss(choice, params, batch, step):
        return space.loss(params, batch, choice, data.key, step)

    def test(choice: Choice, params: Params, step: jax.Array) -> float:
        return float(np.mean([float(loss(_traced_choice(choice), params, batch, step)) for batch in data.test_batches]))

    return take_step, test


def _traced_choice(choice: Choice) -> list[jax.Array]:
    return [jnp.int32(strategy) for strategy in choice]

"""Candidates trained from the start, beside the exact choice: damage measured after the fact misleads."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from diffshard.bilevel_search.calibration import Measured
from diffshard.bilevel_search.candidates import Candidate
from diffshard.bilevel_search.objective import MaxLossIncrease, Objective
from diffshard.bilevel_search.proof import Proof, Tried
from diffshard.bilevel_search.refinement import refined
from diffshard.bilevel_search.rounding import Prediction
from diffshard.bilevel_search.scalars import as_whole
from diffshard.bilevel_search.space import Batch, Choice, Params, Space, check_key
from diffshard.bilevel_search.training import TrainingState, gradients_of, stepped
from diffshard.successive_halving import Row, check_rungs, each, halving


@dataclass(frozen=True)
class CandidatesData:
    """What candidates are trained on and with; apart from the search's data, and from the data of the last test.

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
        for name in ("train_batches", "test_batches"):
            if not isinstance(getattr(self, name), Sequence):
                got = type(getattr(self, name)).__name__
                raise ValueError(f"`{name}` must be a sequence, which every candidate sees anew, as a list; got {got}.")
        if len(self.train_batches) < sum(self.rungs):
            raise ValueError(
                f"`train_batches` must be one for each of the {sum(self.rungs)} steps of `rungs`, "
                f"got {len(self.train_batches)}."
            )
        if not len(self.test_batches):
            raise ValueError("`test_batches` must hold at least one batch, got none.")
        for name, least in (("num_candidates", 1), ("num_repeats", 1), ("num_refinements", 0)):
            number = as_whole(getattr(self, name))
            if number is None or number < least:
                raise ValueError(f"`{name}` must be a whole number of at least {least}, got {getattr(self, name)!r}.")
        check_key(self.key)


class _Training(NamedTuple):
    """A candidate on its way: its trainings, steps of each, and mean losses after each rung."""

    candidate: Candidate
    runs: tuple[TrainingState, ...]
    step: int
    losses: tuple[float, ...]


def prove(
    space: Space,
    candidates: Sequence[Candidate],
    reference: Choice,
    data: CandidatesData,
    *,
    optimizer: optax.GradientTransformation,
    objective: Objective,
    prediction: Prediction | None = None,
) -> Proof:
    """Trains the exact choice and the candidates, then what measurements make of the predictions; the best one wins.

    The exact choice goes through all rungs, candidates by successive halving. After it the predictions are calibrated
    on all that was measured, and the choices that they then propose go through all rungs too, `num_refinements` times.

    Under a bound on the loss a candidate's score is (increase beyond the bound, mean step time), compared in this
    order; under a weight of the cost it is increase + weight · cost ratio. Every candidate sees the same batches, noise
    and initial parameters.

    Args:
      space: strategies that change the loss.
      candidates: to be tried, the exact choice aside.
      reference: the exact choice.
      data: batches, key and rungs.
      optimizer: of the parameters.
      objective: what decides.
      prediction: of the loss, to be refined; None leaves it at the candidates.

    Raises:
      ValueError: the exact choice's own loss is not finite, so that there is nothing to compare with.
    """
    trials = _Trials(space, reference, data, optimizer, objective)
    tried = trials.halved(candidates)
    for _ in range(data.num_refinements):
        found, noise = trials.measured(tried), trials.noise
        new = [] if prediction is None else refined(space, reference, prediction, found, objective, noise=noise)
        if not new:
            break
        for candidate in new:
            tried += trials.halved([candidate])  # alone it goes through all rungs
    table = sorted([trials.exact_tried(), *tried], key=lambda t: (-len(t.row.scores), t.row.scores[-1]))
    return Proof(tuple(table), trials.exact.losses, data.num_repeats * sum(t.row.steps for t in table))


class _Trials:
    """Trainings of candidates beside that of the exact choice, which is done first."""

    def __init__(
        self,
        space: Space,
        reference: Choice,
        data: CandidatesData,
        optimizer: optax.GradientTransformation,
        objective: Objective,
    ):
        self._space, self._reference, self._data = space, reference, data
        self._num_steps = sum(data.rungs)
        self._optimizer, self._objective = optimizer, objective
        self._take_step, self._test = _steps(space, optimizer, data)
        self._keys = [data.key, *(jax.random.fold_in(data.key, 2**31 - r) for r in range(1, data.num_repeats))]
        self._exact_seconds = float(space.seconds(reference))
        self.exact = self._start(Candidate("exact", reference))
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
        """Of a measured increase that is near 0: a quarter of the bound, or a thousandth of the loss without one."""
        objective, loss = self._objective, abs(self.exact.losses[-1])
        once = objective.most / 4 if isinstance(objective, MaxLossIncrease) else max(loss / 1000, 1e-12)
        return once / self._data.num_repeats**0.5

    def halved(self, candidates: Sequence[Candidate]) -> list[Tried]:
        """Candidates by successive halving."""
        field, names = [self._start(candidate) for candidate in candidates], [c.name for c in candidates]
        found = halving(field, each(self._train_and_score), rungs=self._data.rungs, keep=self._data.keep, names=names)
        return [self._tried(training, row) for training, row in zip(found.trained, found.table, strict=True)]

    def measured(self, tried: Sequence[Tried]) -> list[Measured]:
        """What training said of those that ran one choice from the start."""
        return [Measured(t.choice, t.loss_increase, t.row.steps / self._num_steps) for t in tried if not t.exact_share]

    def exact_tried(self) -> Tried:
        """The exact choice."""
        scores = (self._score(self.exact.candidate, 0.0),) * len(self._data.rungs)
        return self._tried(self.exact, Row("exact", scores, self.exact.step))

    def _start(self, candidate: Candidate) -> _Training:
        params, first = self._data.params, jnp.zeros((), jnp.int32)
        carried = self._optimizer.init(params), self._space.state(params)
        return _Training(candidate, tuple(TrainingState(params, *carried, key, first) for key in self._keys), 0, ())

    def _choice_at(self, candidate: Candidate, step: int) -> Choice:
        return self._reference if step < candidate.exact_share * self._num_steps else candidate.choice

    def _train(self, training: _Training, num_steps: int) -> _Training:
        candidate, runs, begin, losses = training
        end, batches = begin + num_steps, self._data.train_batches
        after, found = [], []
        for repeat, run in enumerate(runs):
            ahead = repeat * len(batches) // len(runs)
            for step in range(begin, end):
                choice, batch = _traced(self._choice_at(candidate, step)), batches[(step + ahead) % len(batches)]
                run = self._take_step(choice, run, batch)
            after.append(run)
            # Tested as it was trained last: damage that was never trained with would mislead.
            found.append(self._test(self._choice_at(candidate, end - 1), run.params, jnp.int32(end)))
        return _Training(candidate, tuple(after), end, (*losses, float(np.mean(found))))

    def _train_and_score(self, training: _Training, num_steps: int) -> tuple[_Training, Any]:
        after = self._train(training, num_steps)
        return after, self._score(after.candidate, self._increase(after))

    def _increase(self, training: _Training) -> float:
        return training.losses[-1] - self.exact.losses[len(training.losses) - 1]

    def _score(self, candidate: Candidate, increase: float) -> Any:
        return _score(self._objective, increase, self._seconds(candidate), self._exact_seconds)

    def _seconds(self, candidate: Candidate) -> float:
        share = candidate.exact_share
        return share * self._exact_seconds + (1 - share) * float(self._space.seconds(candidate.choice))

    def _tried(self, training: _Training, row: Row) -> Tried:
        candidate = training.candidate
        return Tried(*candidate, self._seconds(candidate), training.losses[-1], self._increase(training), row)


def _score(objective: Objective, increase: float, seconds: float, exact_seconds: float) -> Any:
    increase = increase if math.isfinite(increase) else math.inf  # whoever diverges has lost
    if isinstance(objective, MaxLossIncrease):
        return (max(increase - objective.most, 0.0), seconds)
    weights = objective.weights(jnp.zeros(()), jnp.float32(increase), jnp.int32(0))
    return increase + float(weights.cost) * seconds / exact_seconds


def _steps(space: Space, optimizer: optax.GradientTransformation, data: CandidatesData) -> tuple[Any, Any]:
    """A jitted training step and a test, compiled once for all choices."""

    @jax.jit
    def take_step(choice, run, batch):
        return stepped(optimizer, run, gradients_of(space, run, batch, choice))

    @jax.jit
    def loss(choice, params, batch, step):
        return space.loss(params, batch, choice, data.key, step)

    def test(choice: Choice, params: Params, step: jax.Array) -> float:
        return float(np.mean([float(loss(_traced(choice), params, batch, step)) for batch in data.test_batches]))

    return take_step, test


def _traced(choice: Choice) -> list[jax.Array]:
    return [jnp.int32(strategy) for strategy in choice]

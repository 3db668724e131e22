"""Candidates trained from the start, beside the exact choice: damage measured after the fact misleads."""

import itertools
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from cost.evaluation import evaluate
from cost.problem import Problem, is_forbidden, num_strategies
from diffshard.bilevel.calibration import Measured, calibrated
from diffshard.bilevel.objective import MaxLossIncrease, Objective
from diffshard.bilevel.pareto import Point
from diffshard.bilevel.plan import Choice
from diffshard.bilevel.rounding import Prediction, weighed, within
from diffshard.bilevel.space import Batch, Params, Space, node_names
from diffshard.bilevel.training import TrainingState, gradients_of, stepped
from diffshard.halving import Row, check_rungs, each, halving

_MOST_COMBINATIONS = 4096
_MOST_DESCRIBED = 3  # nodes in the name of a candidate
_SHARES = (1.0, 0.7, 0.4)
"""Of the bound, that refinements are proposed for: what was measured is noisy."""


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
      num_candidates: at most; the exact choice comes on top.
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
            number = getattr(self, name)
            if not isinstance(number, int) or number < least:
                raise ValueError(f"`{name}` must be a whole number of at least {least}, got {number!r}.")
        if not (isinstance(self.key, jax.Array) and jnp.issubdtype(self.key.dtype, jax.dtypes.prng_key)):
            raise ValueError(f"`key` must be a random key, as `jax.random.key(0)` is; got {self.key!r}.")


class Candidate(NamedTuple):
    """A choice, or a schedule: the exact choice for a share of training, then this one."""

    name: str
    choice: Choice
    exact_share: float = 0.0


class Tried(NamedTuple):
    """A candidate that was trained.

    Attributes:
      name: the candidate's.
      choice: V strategy indices.
      exact_share: share of training that runs the exact choice first.
      seconds: mean step time of the whole training.
      loss: on `test_batches` after its last rung.
      loss_increase: over the exact choice after as many steps.
      row: scores and steps of the halving.
    """

    name: str
    choice: Choice
    exact_share: float
    seconds: float
    loss: float
    loss_increase: float
    row: Row


class Proof(NamedTuple):
    """What training said.

    Attributes:
      winner: the best of the last rung.
      table: all candidates, the winner first, then by how far they came.
      exact_losses: of the exact choice, after each rung.
      steps: of training in all, those of the exact choice included.
    """

    winner: Tried
    table: tuple[Tried, ...]
    exact_losses: tuple[float, ...]
    steps: int

    def __str__(self) -> str:
        lines = [f"{self.steps} steps of training; seconds, loss, increase over the exact choice, steps:"]
        lines += [
            f"  {t.seconds:.4g}  {t.loss:.4f}  {t.loss_increase:+.4f}  {t.row.steps:>5}  {t.name}" for t in self.table
        ]
        return "\n".join(lines)

    @property
    def finalists(self) -> tuple[Tried, ...]:
        """The candidates that saw the last rung, first in the table: only their losses can be compared."""
        return tuple(tried for tried in self.table if len(tried.row.scores) == len(self.exact_losses))

    def points(self) -> list[Point]:
        """Loss against step time of the finalists, for `pareto`."""
        return [Point(tried.name, tried.seconds, tried.loss) for tried in self.finalists]


class _Training(NamedTuple):
    """A candidate on its way: its trainings, steps of each, and mean losses after each rung."""

    candidate: Candidate
    runs: tuple[TrainingState, ...]
    step: int
    losses: tuple[float, ...]


def propose(
    space: Space,
    problem: Problem,
    proposal: Choice,
    prediction: Prediction,
    reference: Choice,
    *,
    most: int,
) -> list[Candidate]:
    """The search's proposal, every uniform choice, choices by type, and the proposal and uniform ones as schedules.

    Choices by type are all combinations over nodes (whose sites share a type), or, where these are too many, those that
    take one strategy at all nodes of a kind (that choose from the same names), and those that differ from the exact
    choice in one or two nodes. Those that another is predicted to beat in loss and time go last, and so do uniform ones
    of a name that not every node knows.

    Args:
      space: names the strategies.
      problem: of the space.
      proposal: of the search.
      prediction: of the loss.
      reference: the exact choice.
      most: how many, at most, in this order.
    """
    proposed, (uniform, partly) = Candidate("found", proposal), _uniform(space, reference)
    seen = {reference, proposal, *(candidate.choice for candidate in (*uniform, *partly))}
    by_type = [choice for choice in _combinations(space, problem, reference) if choice not in seen]
    points = np.array([(prediction.increase(choice), space.seconds(choice)) for choice in by_type]).reshape(-1, 2)
    named = [Candidate(_described(space, problem, choice, reference), choice) for choice in by_type]
    layer = _layers(points)
    best = [named[i] for i in np.flatnonzero(layer == 0)]
    rest = [named[i] for i in np.argsort(layer, kind="stable") if layer[i]]
    found = [proposed, *uniform, _late(proposed), *best, *partly, *map(_late, uniform), *rest]
    distinct: dict[tuple[Choice, float], Candidate] = {}
    for candidate in found:
        at = candidate.choice, candidate.exact_share
        if candidate.choice != reference and at not in distinct and _possible(problem, candidate.choice):
            distinct[at] = candidate
            if len(distinct) == most:
                break
    return list(distinct.values())


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
    if prediction is not None:
        for _ in range(data.num_refinements):
            new = _refined(space, trials, tried, prediction, objective)
            if not new:
                break
            tried += trials.all_through(new)
    table = sorted([trials.exact_tried(), *tried], key=lambda t: (-len(t.row.scores), t.row.scores[-1]))
    return Proof(table[0], tuple(table), trials.exact.losses, data.num_repeats * sum(t.row.steps for t in table))


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
        self._space, self.reference, self._data = space, reference, data
        self.num_steps = sum(data.rungs)
        self._optimizer, self._objective = optimizer, objective
        self._take_step, self._test = _steps(space, optimizer, data)
        self._keys = [data.key, *(jax.random.fold_in(data.key, 2**31 - r) for r in range(1, data.num_repeats))]
        self.exact_seconds = float(space.seconds(reference))
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

    def all_through(self, candidates: Sequence[Candidate]) -> list[Tried]:
        """Candidates through all rungs."""
        tried = []
        for candidate in candidates:
            training, scores = self._start(candidate), []
            for steps in self._data.rungs:
                training, score = self._train_and_score(training, steps)
                scores.append(score)
            tried.append(self._tried(training, Row(candidate.name, tuple(scores), training.step)))
        return tried

    def exact_tried(self) -> Tried:
        """The exact choice."""
        scores = (self._score(self.exact.candidate, 0.0),) * len(self._data.rungs)
        return self._tried(self.exact, Row("exact", scores, self.exact.step))

    def _start(self, candidate: Candidate) -> _Training:
        params, first = self._data.params, jnp.zeros((), jnp.int32)
        carried = self._optimizer.init(params), self._space.state(params)
        return _Training(candidate, tuple(TrainingState(params, *carried, key, first) for key in self._keys), 0, ())

    def _choice_at(self, candidate: Candidate, step: int) -> Choice:
        return self.reference if step < candidate.exact_share * self.num_steps else candidate.choice

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
        return _score(self._objective, increase, self._seconds(candidate), self.exact_seconds)

    def _seconds(self, candidate: Candidate) -> float:
        share = candidate.exact_share
        return share * self.exact_seconds + (1 - share) * float(self._space.seconds(candidate.choice))

    def _tried(self, training: _Training, row: Row) -> Tried:
        candidate = training.candidate
        return Tried(*candidate, self._seconds(candidate), training.losses[-1], self._increase(training), row)


def _refined(
    space: Space, trials: _Trials, tried: Sequence[Tried], prediction: Prediction, objective: Objective
) -> list[Candidate]:
    """What the prediction proposes, corrected by what was measured, and was not tried yet.

    Under a bound the cheapest choice within it, and within shares of it.
    """
    problem, reference = space.problem(), trials.reference
    names = [space.names(v) for v in range(len(reference))]
    measured = [Measured(t.choice, t.loss_increase, t.row.steps / trials.num_steps) for t in tried if not t.exact_share]
    fitted = calibrated(prediction, names, reference, measured, trials.noise)
    if isinstance(objective, MaxLossIncrease):
        choices = [within(problem, fitted, share * objective.most) for share in _SHARES]
    else:
        weight = float(objective.weights(jnp.zeros(()), jnp.zeros(()), jnp.int32(0)).cost)
        choices = [weighed(problem, fitted, trials.exact_seconds / weight)] if weight else []
    seen = {reference, *(found.choice for found in measured)}
    return [
        Candidate(f"refined, {_described(space, problem, choice, reference)}", choice)
        for choice in dict.fromkeys(choices)
        if choice not in seen
    ]


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


def _possible(problem: Problem, choice: Choice) -> bool:
    """Whether a choice keeps the problem's own limits and takes nothing that is forbidden."""
    found = evaluate(problem, choice)
    return bool(found.feasible) and not is_forbidden(np.asarray(found.cost))


def _late(candidate: Candidate) -> Candidate:
    return Candidate(f"{candidate.name}, second half", candidate.choice, 0.5)


def _uniform(space: Space, reference: Choice) -> tuple[list[Candidate], list[Candidate]]:
    """For each strategy's name the choice that takes it wherever it can be had.

    Names that begin with it serve as well, as "int4 with error feedback" does for "int4".

    Returns:
      Those of names that every node knows, and the others, which are exact elsewhere.
    """
    names = [list(space.names(v)) for v in range(len(reference))]
    everywhere, partly = [], []
    for name in dict.fromkeys(name for row in names for name in row):
        alike = [[s for s, other in enumerate(row) if f"{other} ".startswith(f"{name} ")] for row in names]
        exactly = [[row.index(name)] if name in row else found for row, found in zip(names, alike, strict=True)]
        choice = tuple(found[0] if found else r for found, r in zip(exactly, reference, strict=True))
        (everywhere if all(exactly) else partly).append(Candidate(f"all {name}", choice))
    return everywhere, partly


def _combinations(space: Space, problem: Problem, reference: Choice) -> list[Choice]:
    sizes = num_strategies(problem).tolist()
    if np.prod(sizes, dtype=float) <= _MOST_COMBINATIONS:
        return list(itertools.product(*map(range, sizes)))
    kinds: dict[tuple[str, ...], int] = {}
    kind_of = [kinds.setdefault(tuple(space.names(v)), len(kinds)) for v in range(len(sizes))]
    found: dict[Choice, None] = {}
    if np.prod([len(names) for names in kinds], dtype=float) <= _MOST_COMBINATIONS:
        for taken in itertools.product(*(range(len(names)) for names in kinds)):
            found[tuple(taken[kind] for kind in kind_of)] = None
    for first, second in itertools.combinations_with_replacement(range(len(sizes)), 2):
        for s, t in itertools.product(range(sizes[first]), range(sizes[second])):
            choice = list(reference)
            choice[first], choice[second] = s, t
            found[tuple(choice)] = None
            if len(found) >= 2 * _MOST_COMBINATIONS:
                return list(found)
    return list(found)


def _layers(at: np.ndarray) -> np.ndarray:
    """`[n]`: 0 for the points `[n, 2]` that none beats in both, 1 for those that none of the rest beats, and so on."""
    points, place = np.unique(at, axis=0, return_inverse=True)
    least: list[float] = []  # second coordinate so far in each layer: it rises from layer to layer
    layer = np.zeros(len(points), int)
    for i, second in enumerate(points[:, 1].tolist()):
        layer[i] = bisect_right(least, second)
        least[layer[i] : layer[i] + 1] = [second]
    return layer[place.ravel()]


def _described(space: Space, problem: Problem, choice: Choice, reference: Choice) -> str:
    """Where a choice is not exact; of many nodes only how many take what."""
    nodes = node_names(space, problem)
    different = [v for v, (s, r) in enumerate(zip(choice, reference, strict=True)) if s != r]
    if len(different) <= _MOST_DESCRIBED:
        return ", ".join(f"{nodes[v]}: {space.names(v)[choice[v]]}" for v in different)
    counts = Counter(space.names(v)[choice[v]] for v in different)
    return ", ".join(f"{count}x {name}" for name, count in counts.items())

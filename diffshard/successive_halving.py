"""Successive halving: many candidates get a little training, the better half more, until one remains.

Source: Jamieson and Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter Optimization" (AISTATS 2016),
algorithm 1.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from cost.real_numbers import Index

C = TypeVar("C")

Train = Callable[[Sequence[C], int], tuple[Sequence[C], Sequence[Any]]]
"""`train(candidates, num_steps)`: the candidates after that many more steps, and their scores: anything that can be
compared, less is better. A number that is NaN counts as infinite."""


class HalvingRecord(NamedTuple):
    """The training of one candidate.

    Attributes:
      name: the candidate's.
      scores: after each rung that it took part in.
      steps: of training that it got.
    """

    name: str
    scores: tuple[Any, ...]
    steps: Index


class Halving(NamedTuple, Generic[C]):
    """The outcome.

    Attributes:
      winner: the best candidate of the last rung, trained.
      position: its place among the candidates that were given.
      table: a record for each candidate, the winner first, then by how far they came and how they scored there.
      trained: the candidates after their training, in the order of the table.
      steps: of training in all.
    """

    winner: C
    position: int
    table: tuple[HalvingRecord, ...]
    trained: tuple[C, ...]
    steps: int


def halving(
    candidates: Sequence[C],
    train: Train[C],
    *,
    rungs: Sequence[int],
    keep: float = 0.5,
    names: Sequence[str] | None = None,
) -> Halving[C]:
    """Trains all candidates for `rungs[0]` steps, the better share for `rungs[1]` more, and so on.

    Args:
      candidates: anything that `train` takes and gives back.
      train: trains several candidates; `each` makes one of a function that trains a single candidate.
      rungs: steps of each rung.
      keep: share of candidates, rounded up, that goes on after each rung but the last.
      names: of the candidates, for the table; None numbers them.

    Raises:
      ValueError: no candidates, no or empty rungs, a share that is not between 0 and 1, names of another number, or a
        `train` that gives no candidates and scores, not one for each, or a rung without any score that is a number.
    """
    if not len(candidates):
        raise ValueError("`candidates` must hold at least one candidate, got none.")
    check_rungs(rungs, keep)
    if names is not None and len(names) != len(candidates):
        raise ValueError(f"`names` must be one for each of the {len(candidates)} candidates, got {len(names)}.")
    trained, alive = list(candidates), list(range(len(candidates)))
    scores: list[list[Any]] = [[] for _ in candidates]
    for steps in rungs:
        longer, new_scores = _pair(train([trained[i] for i in alive], steps), len(alive))
        if all(map(_has_nan, new_scores)):
            raise ValueError(f"`train` gave only scores that are NaN for all {len(alive)} candidates; none can win.")
        for i, candidate, score in zip(alive, longer, new_scores, strict=True):
            trained[i] = candidate
            scores[i].append(_comparable(score))
        alive.sort(key=lambda i: scores[i][-1])
        alive = alive[: max(1, math.ceil(keep * len(alive)))]
    order = sorted(range(len(candidates)), key=lambda i: (-len(scores[i]), scores[i][-1]))
    steps = [sum(rungs[: len(row)]) for row in scores]
    table = tuple(HalvingRecord(str(i) if names is None else names[i], tuple(scores[i]), steps[i]) for i in order)
    ranking = tuple(trained[i] for i in order)
    return Halving(ranking[0], order[0], table, ranking, sum(steps))


def check_rungs(rungs: Any, keep: Any) -> None:
    """Checks that `rungs` and `keep` are valid for `halving`.

    Raises:
      ValueError: `rungs` are not positive whole numbers of steps, or `keep` is not between 0 and 1.
    """
    numbers = list(rungs) if isinstance(rungs, Iterable) and not isinstance(rungs, str) else []
    if not numbers or not all(isinstance(steps, int | np.integer) and steps > 0 for steps in numbers):
        raise ValueError(f"`rungs` must be a sequence of positive whole numbers of steps, as (50, 100); got {rungs!r}.")
    if not isinstance(keep, int | float | np.number) or not 0 < keep < 1:
        raise ValueError(f"`keep` must be a share between 0 and 1, got {keep!r}.")


def each(train_one: Callable[[C, int], tuple[C, Any]]) -> Train[C]:
    """Returns a `train` for `halving` that trains one candidate after the other."""

    def train(candidates: Sequence[C], num_steps: int) -> tuple[Sequence[C], Sequence[Any]]:
        pairs = [_pair(train_one(candidate, num_steps)) for candidate in candidates]
        return [candidate for candidate, _ in pairs], [score for _, score in pairs]

    return train


def _pair(result: Any, num_candidates: int | None = None) -> Any:
    """Returns the result of `train`, if it is candidates and scores; of one candidate where no number is given."""
    what = "candidate and score" if num_candidates is None else "candidates and scores"
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise ValueError(f"`train` must return a pair, {what}; got {type(result).__name__}.")
    if num_candidates is not None and {len(part) for part in result} != {num_candidates}:
        raise ValueError(
            f"`train` must return one candidate and one score for each of {num_candidates} candidates; "
            f"got {len(result[0])} and {len(result[1])}."
        )
    return result


def _has_nan(score: Any) -> bool:
    return any(map(_has_nan, score)) if isinstance(score, tuple) else math.isnan(score)


def _comparable(score: Any) -> Any:
    """Turns NaN into infinity: NaN is neither less nor more than anything, so no order would hold."""
    if isinstance(score, tuple):
        return tuple(_comparable(part) for part in score)
    return math.inf if math.isnan(score) else score

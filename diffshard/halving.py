"""Successive halving: many candidates get a little training, the better half more, until one is left.

Source: Jamieson and Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter Optimization" (AISTATS 2016),
algorithm 1.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

C = TypeVar("C")

Train = Callable[[Sequence[C], int], tuple[Sequence[C], Sequence[Any]]]
"""`train(candidates, num_steps)`: the candidates after that many more steps, and their scores: anything that can be
compared, less is better. A number that is NaN counts as infinite."""


class Row(NamedTuple):
    """What one candidate went through.

    Attributes:
      name: the candidate's.
      scores: after each rung that it took part in.
      steps: of training that it got.
    """

    name: str
    scores: tuple[Any, ...]
    steps: int


class Halving(NamedTuple, Generic[C]):
    """The outcome.

    Attributes:
      winner: the best candidate of the last rung, trained.
      position: its place among the candidates that were given.
      table: a row for each candidate, the winner first, then by how far they came and how they scored there.
      trained: the candidates as they were left, in the order of the table.
      steps: of training in all.
    """

    winner: C
    position: int
    table: tuple[Row, ...]
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
      ValueError: no candidates, no or empty rungs, a share that is not between 0 and 1, or names of another number.
    """
    if not candidates:
        raise ValueError("`candidates` must hold at least one candidate, got none.")
    if not rungs or any(int(steps) != steps or steps < 1 for steps in rungs):
        raise ValueError(f"`rungs` must be positive numbers of steps, at least one; got {list(rungs)}.")
    if not 0 < keep < 1:
        raise ValueError(f"`keep` must be a share between 0 and 1, got {keep}.")
    if names is not None and len(names) != len(candidates):
        raise ValueError(f"`names` must be one for each of the {len(candidates)} candidates, got {len(names)}.")
    trained, alive = list(candidates), list(range(len(candidates)))
    scores: list[list[Any]] = [[] for _ in candidates]
    for steps in rungs:
        after, found = train([trained[i] for i in alive], steps)
        for i, candidate, score in zip(alive, after, found, strict=True):
            trained[i] = candidate
            scores[i].append(_comparable(score))
        alive.sort(key=lambda i: scores[i][-1])
        alive = alive[: max(1, math.ceil(keep * len(alive)))]
    order = sorted(range(len(candidates)), key=lambda i: (-len(scores[i]), scores[i][-1]))
    steps = [sum(rungs[: len(row)]) for row in scores]
    table = tuple(Row(str(i) if names is None else names[i], tuple(scores[i]), steps[i]) for i in order)
    left = tuple(trained[i] for i in order)
    return Halving(left[0], order[0], table, left, sum(steps))


def each(train_one: Callable[[C, int], tuple[C, Any]]) -> Train[C]:
    """`train` for `halving`, one candidate after the other."""

    def train(candidates: Sequence[C], num_steps: int) -> tuple[Sequence[C], Sequence[Any]]:
        pairs = [train_one(candidate, num_steps) for candidate in candidates]
        return [candidate for candidate, _ in pairs], [score for _, score in pairs]

    return train


def _comparable(score: Any) -> Any:
    """NaN is neither less nor more than anything, so no order would hold."""
    if isinstance(score, tuple):
        return tuple(_comparable(part) for part in score)
    return math.inf if math.isnan(score) else score

"""What training said of candidates."""

from typing import NamedTuple

from diffshard.bilevel_search.pareto import Point
from diffshard.bilevel_search.space import Choice
from diffshard.successive_halving import Row


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
      table: all candidates, the best of the last rung first, then by how far they came.
      exact_losses: of the exact choice, after each rung.
      steps: of training in all, those of the exact choice included.
    """

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
    def winner(self) -> Tried:
        """The best of the last rung."""
        return self.table[0]

    @property
    def finalists(self) -> tuple[Tried, ...]:
        """The candidates that saw the last rung, first in the table: only their losses can be compared."""
        return tuple(tried for tried in self.table if len(tried.row.scores) == len(self.exact_losses))

    def points(self) -> list[Point]:
        """Loss against step time of the finalists, for `pareto`; the winner is the one that is chosen."""
        return [Point(t.name, t.seconds, t.loss, t is self.winner) for t in self.finalists]

"""The outer search: each candidate is a search of its own, and all share one deadline, one cut-off and one bound.

A candidate is what the choice outside of a problem fixes: a shape of the mesh, what is computed again, micro-batches
with a schedule, a number of groups. To search over something new, write down what its candidates are: a bound that is
known beforehand, and a function that solves one. They may be made one by one, from what became of those before.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from diffshard.base import Deadline, InfeasibleError

ResultT = TypeVar("ResultT")


class CutOffError(Exception):
    """A bound shows that a candidate has nothing below the cut-off; has the bound, in the unit of the costs."""

    def __init__(self, lower_bound: float):
        super().__init__(lower_bound)
        self.lower_bound = lower_bound


class Outcome(NamedTuple, Generic[ResultT]):
    """The best result of a candidate.

    Attributes:
      cost: of the result, in seconds or any other unit.
      lower_bound: nothing that the candidate allows costs less; -inf where the solver says nothing.
    """

    result: ResultT
    cost: float
    lower_bound: float = -math.inf
    status: str = "finished"


class Candidate(NamedTuple, Generic[ResultT]):
    """An outer choice, such as a shape of the mesh, that is solved by a search of its own.

    Attributes:
      name: what is fixed, for the table of what was tried.
      lower_bound: nothing that it allows costs less, as is known before it is solved.
      solve: `solve(deadline, cut_off)`: finds the best within the deadline; only a cost below the cut-off is wanted.
        Raises `InfeasibleError` where nothing is allowed or found, and `CutOffError` where nothing is below the
        cut-off.
    """

    name: Any
    lower_bound: float
    solve: Callable[[Deadline, float], Outcome[ResultT]]


class Tried(NamedTuple):
    """The record of a candidate that was tried.

    Attributes:
      cost: of the best that was found; None where nothing was.
      lower_bound: nothing that the candidate allows costs less; inf where it is proven that it allows nothing.
      search_s: wall-clock seconds that it took.
      status: how its solver ended, as `Solution.status`; "cut off" where its bound is not below the cut-off,
        "infeasible" where it is proven that nothing is allowed, "no plan" where nothing was found, and "not tried"
        where the time was over.
    """

    name: Any
    cost: float | None
    lower_bound: float
    search_s: float
    status: str


@dataclass
class OuterSearch(Generic[ResultT]):
    """The best of some candidates; mutable.

    Attributes:
      least_gain: the share by which another candidate has to be cheaper than the best one to be wanted.
      last_share: the share of the time after which no further candidate is begun, unless nothing was found yet.
      best: the cheapest outcome so far; None where there is none.
      tried: what became of each candidate, in order.
      errors: of candidates for which nothing was found.
      is_interrupted: whether Ctrl-C ended the search of a candidate, after which no other one is begun.
    """

    deadline: Deadline
    least_gain: float = 0.0
    last_share: float = 1.0
    best: Outcome[ResultT] | None = None
    tried: list[Tried] = field(default_factory=list)
    errors: list[InfeasibleError] = field(default_factory=list)
    is_interrupted: bool = False

    @property
    def cut_off(self) -> float:
        """The cost that a candidate has to stay below to be wanted; inf where nothing was found yet."""
        return math.inf if self.best is None else self.best.cost - self.least_gain * abs(self.best.cost)

    @property
    def lower_bound(self) -> float:
        """Nothing that any of the candidates tried so far allows costs less; inf where none was tried."""
        return min((tried.lower_bound for tried in self.tried), default=math.inf)

    @property
    def is_over(self) -> bool:
        """Whether no further candidate is begun."""
        return self.best is not None and (self.is_interrupted or self.deadline.is_over(self.last_share))

    def run(self, candidates: Iterable[Candidate[ResultT]]) -> None:
        """Tries candidates one after the other; what could not be better than the best one is left out.

        Args:
          candidates: the most promising ones first. Those of a sequence have equal parts of the time that is left;
            those that are made one by one have all of it.
        """
        if isinstance(candidates, Sequence):
            for number, candidate in enumerate(candidates):
                self._try(candidate, self.deadline.part(1 / (len(candidates) - number)))
        else:
            for candidate in candidates:
                self._try(candidate, self.deadline)

    def _try(self, candidate: Candidate[ResultT], deadline: Deadline) -> None:
        begin_s = time.perf_counter()
        cost, bound = None, candidate.lower_bound
        if self.is_over:
            status = "not tried"
        elif bound >= self.cut_off:
            status = "cut off"
        else:
            try:
                outcome = candidate.solve(deadline, self.cut_off)
            except CutOffError as error:
                status, bound = "cut off", max(bound, error.lower_bound)
            except InfeasibleError as error:
                self.errors.append(error)
                status, bound = ("infeasible", math.inf) if error.is_proven else ("no plan", bound)
            else:
                status, cost, bound = outcome.status, outcome.cost, max(bound, outcome.lower_bound)
                self.is_interrupted |= status == "interrupted"
                if self.best is None or cost < self.best.cost:
                    self.best = outcome
        self.tried.append(Tried(candidate.name, cost, bound, time.perf_counter() - begin_s, status))

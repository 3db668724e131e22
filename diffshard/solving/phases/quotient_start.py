"""One more start: the problem in which equal layers take equal strategies, which is small and is solved first.

A good plan of a repeated model is mostly the same in each layer, but single moves and forests change one layer at a
time and pay for the difference to its neighbours. The quotient changes all of them at once.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import jax
import numpy as np

from cost.base import Problem, is_forbidden
from diffshard.base import Solver
from diffshard.solving.loop import run_solver
from diffshard.solving.phases.base import NO_BOUND, Search
from diffshard.solving.quotient import quotient_by_equality


@dataclass(frozen=True)
class QuotientStart:
    """Forest moves from the best choice that treats equal nodes alike.

    Attributes:
      solver: finds this choice on the quotient of the problem.
      time_share: of the time limit, for the quotient; chosen by hand on the contest's instances.
      num_moves: forest moves from the choice; chosen by hand on the same.
    """

    solver: Solver
    time_share: float = 0.1
    num_moves: int = 60

    def __call__(self, search: Search) -> Iterator[float]:
        """Solves the quotient and goes on from its choice; has no bound, since the quotient's says nothing here."""
        yield NO_BOUND  # the rounding may be the optimum already
        limit_s = search.clock.time_limit_s
        quotient_limit_s = None if limit_s is None else self.time_share * limit_s
        choice = best_equal_choice(search.problem, self.solver, search.key, quotient_limit_s)
        if choice is None:
            return
        search.polish.begin(choice, search.ascent.best[1].memory)
        for _ in range(self.num_moves):
            search.polish.anneal(0.0, 0.1)
            yield NO_BOUND


def best_equal_choice(
    problem: Problem, solver: Solver, key: jax.Array, time_limit_s: float | None
) -> np.ndarray | None:
    """Returns a choice `[V]` in which equal nodes take equal strategies, as good as the solver finds one.

    Args:
      problem: the whole.
      solver: for the quotient.
      key: a JAX random key.
      time_limit_s: seconds for the quotient; None lets the solver end by its own rule.

    Returns:
      The choice, which may exceed the memory: a start to be improved. None where few nodes are equal, or where the
      members of a class exclude each other's strategies.

    Raises:
      KeyboardInterrupt: Ctrl-C was pressed while the quotient was solved; it means to stop the whole search.
    """
    quotient = quotient_by_equality(problem)
    if quotient is None:
        return None
    solution = run_solver(quotient.problem, solver, time_limit_s=time_limit_s, key=key)
    if solution.status == "interrupted":
        raise KeyboardInterrupt
    return None if is_forbidden(np.asarray(solution.cost)) else quotient.expand(solution.choice)

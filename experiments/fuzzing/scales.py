"""Badly scaled problems for `exact`: costs of 1e-12 to 1e17 and usages up to 2^63 side by side, and near ties.

HiGHS has absolute tolerances, so that such problems are where a bound or a proof could be false. Nothing is presolved,
because presolve alone solves most problems of this size. The kind "no-greedy" gives `exact` no first
choice: the objective is many windows large then, and its bounds are lowered by more.
"""

import functools
import warnings
from collections.abc import Callable, Iterator

import jax
import numpy as np

from cost.base import Problem
from diffshard.base import Proposal
from diffshard.solving.form import identity
from diffshard.solving.solve import solve
from diffshard.solving.solvers import exact, greedy
from diffshard.solving.solvers._mixed_integer_program import MixedIntegerProgram
from diffshard.solving.solvers.exact import Answer, HighsProcess
from experiments.fuzzing.outcomes import HELD, error_outcome
from experiments.fuzzing.problems import false_claim, random_problem

_NUMBERS = ("mixed", "mixed signs", "near ties", "large", "fractions")


class SharedProcess(HighsProcess):
    """One HiGHS for many cases, which saves the time of starting it; every program is solved to its end."""

    def __exit__(self, *error: object) -> None:
        pass

    def answers(self, program: MixedIntegerProgram, options: dict) -> list[Answer]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns all answers."""
        return list(super().answers(program, options))

    def end(self) -> None:
        """Ends the process."""
        super().__exit__(None, None, None)


def problem_of(seed: int) -> Problem:
    """Returns the problem of a seed."""
    rng = np.random.default_rng(seed)
    return random_problem(rng, numbers=_NUMBERS[seed % len(_NUMBERS)], memory_share=0.6)


def no_choices(problem: Problem, *, key: jax.Array) -> Iterator[Proposal]:
    """Yields nothing, as a solver that finds no choice."""
    del problem, key
    return iter(())


def outcome(seed: int, process: HighsProcess, first_choices: Callable[..., Iterator[Proposal]] = greedy.solve) -> str:
    """Returns `HELD` if all that `exact` says about a case is true, else what is not, or the error."""
    problem = problem_of(seed)
    solver = functools.partial(exact.solve, start_highs=lambda: process, first_choices=first_choices)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            solution = solve(problem, solver=solver, reduce=identity)
    except Exception as error:  # whatever it is, it is counted
        return error_outcome(error, seed)
    wrong = false_claim(problem, solution)
    return HELD if wrong is None else f"{wrong}, seed {seed}"

"""Proven optima by HiGHS, on a mixed-integer program whose linear relaxation is tight. Needs the extra `exact`.

HiGHS computes with absolute tolerances. So `_mixed_integer_program.py` counts costs from the least of each node and
edge and leaves out what no choice takes that is cheaper than the best known one; a bound of HiGHS's is lowered by the
most that its tolerances can make of that. Where this is too much, a better choice makes the program smaller and its
numbers finer, and HiGHS solves it again.

HiGHS runs in a process of its own, an iterator of answers that can be left at any moment.
"""

import contextlib
import importlib.util
import math
import pickle
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np

from cost.base import Problem, num_strategies
from cost.evaluation import Evaluator
from diffshard.base import OPTIMAL_GAP, Proposal
from diffshard.child_processes import python_command, python_environment
from diffshard.solving.examples import coupled_ring
from diffshard.solving.loop import Rounding
from diffshard.solving.solvers import greedy
from diffshard.solving.solvers._mixed_integer_program import MixedIntegerProgram, Window, window

POLL_INTERVAL_S = 0.05
"""Seconds between two looks at HiGHS's answers; chosen by hand."""
Answer = tuple[np.ndarray | None, float]


class HighsProcess:
    """A process that solves one program after the other; it starts at once, while programs are built."""

    def __init__(self):
        command = python_command(str(Path(__file__).with_name("_highs.py")))
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=python_environment())
        self._told: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        for thread in self._threads:
            thread.join()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        self._process.wait()

    def answers(self, program: MixedIntegerProgram, options: dict[str, Any]) -> Generator[Answer]:
        """Yields HiGHS's answers, values and a bound, until it ends; (None, -inf) while there is none."""
        rows = program.rows.indptr, program.rows.indices, program.rows.data
        message = program._asdict() | {"rows": rows, "options": options}
        thread = threading.Thread(target=self._talk, args=(message,))
        self._threads.append(thread)
        thread.start()
        while True:
            try:
                answer = self._told.get(timeout=POLL_INTERVAL_S)
            except queue.Empty:
                yield None, -math.inf
                continue
            if answer is None:
                break
            yield answer
        thread.join()
        if code := self._process.poll():
            raise RuntimeError(f"HiGHS ended with exit code {code}; take 'gradient', or a smaller problem.")

    def _talk(self, message: dict[str, Any]) -> None:
        """Sends a program, and puts the answers into the queue; the last one is None."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            pickle.dump(message, stdin)
            stdin.flush()
            while (answer := pickle.load(stdout)) is not None:
                self._told.put(answer)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=1.0)  # so that its exit code is there
        self._told.put(None)


_RELATIVE_GAP = 1e-9  # at which HiGHS stops; far below `OPTIMAL_GAP`
_WHOLE_TOLERANCE = (
    1e-9  # within which HiGHS takes a number for whole where the objective is many windows large; its least
)
_HIGHS_TIME_SHARE = 0.95  # of the time limit: if HiGHS ends by itself, it gives its last bound; chosen by hand
_LEAST_TIME_S = 0.1  # that HiGHS is given
_MOST_WINDOWS = 5  # solved one after the other; each is at most half as wide as the one before
_NARROWER = 0.5  # a window that is solved again is at most this share of the one before


def solve(
    problem: Problem,
    *,
    time_limit_s: float | None = None,
    key: jax.Array | None = None,
    start_highs: Callable[[], HighsProcess] = HighsProcess,
    first_choices: Callable[..., Iterator[Proposal]] = greedy.solve,
) -> Iterator[Proposal]:
    """Yields HiGHS's choices and bounds as they improve, until it has proven its optimum or the time is over.

    While HiGHS starts, a first choice is made beside it, which makes the program smaller if it is feasible.

    Args:
      problem: see `diffshard.base.Solver`.
      time_limit_s: the same.
      key: not used: HiGHS and the first greedy order are not random.
      start_highs: starts the process.
      first_choices: a solver, whose first choice is where HiGHS begins.

    Raises:
      ModuleNotFoundError: `highspy` is not installed.
    """
    if importlib.util.find_spec("highspy") is None:
        raise ModuleNotFoundError(
            "`solver` 'exact' needs HiGHS, which is not installed: pip install highspy (the extra `exact`), "
            "or take 'gradient'."
        )
    del key
    start = time.perf_counter()
    with start_highs() as highs:  # imports while we build
        search = _Search(problem)
        yield from search.first_choice(first_choices)
        for _ in range(_MOST_WINDOWS):
            options = {"output_flag": False, "mip_rel_gap": _RELATIVE_GAP, "mip_abs_gap": 0.0}
            here = window(problem, search.least_cost)
            if here is None:
                return
            if math.isinf(search.least_cost):  # with its own tolerance HiGHS's presolve has lost an optimum
                options["mip_feasibility_tolerance"] = _WHOLE_TOLERANCE
            if time_limit_s is not None:
                rest_s = _HIGHS_TIME_SHARE * time_limit_s - (time.perf_counter() - start)
                options["time_limit"] = max(rest_s, _LEAST_TIME_S)
            yield Proposal()
            for values, objective_bound in highs.answers(here.program, options):
                yield search.proposal(values, here.bound(objective_bound))
            if time_limit_s is not None and time.perf_counter() - start > _HIGHS_TIME_SHARE * time_limit_s:
                break
            if search.is_closed() or not search.has_narrower_window_than(here):
                break
        while time_limit_s is not None and _HIGHS_TIME_SHARE < (time.perf_counter() - start) / time_limit_s < 1:
            time.sleep(POLL_INTERVAL_S)  # HiGHS ended by its own limit; the loop says so when ours is over
            yield Proposal()


class _Search:
    """The best choice and bound so far."""

    def __init__(self, problem: Problem):
        self.least_cost, self._bound = math.inf, -math.inf
        self._problem, self._evaluate, self._rounding = problem, Evaluator(problem), Rounding(problem)
        self._ends = np.cumsum(num_strategies(problem))[:-1]

    def first_choice(self, first_choices: Callable[..., Iterator[Proposal]]) -> Iterator[Proposal]:
        for proposal in first_choices(self._problem, key=jax.random.key(0)):
            if proposal.choice is not None:
                self._price(proposal.choice)
            yield proposal
            if proposal.choice is not None:
                return

    def proposal(self, values: np.ndarray | None, bound: float) -> Proposal:
        """Returns a proposal of HiGHS's values `[N]`, if any, and a bound."""
        self._bound = max(self._bound, bound)
        if values is None:
            return Proposal(None, bound)
        choice = np.array([np.argmax(row) for row in np.split(values, self._ends)], np.int64)
        self._price(choice)
        return Proposal(choice, bound)

    def is_closed(self) -> bool:
        """Returns whether the loop will say that the best choice is optimal."""
        bound = self._rounding.safe_bound(self._bound)
        return self.least_cost - bound <= OPTIMAL_GAP * abs(self.least_cost)

    def has_narrower_window_than(self, here: Window) -> bool:
        """Returns whether a better choice has made the window much smaller."""
        return self.least_cost - here.least < _NARROWER * here.width

    def _price(self, choice: np.ndarray) -> None:
        evaluation = self._evaluate(choice)
        if evaluation.feasible:
            self.least_cost = min(self.least_cost, float(evaluation.cost))


EXAMPLE = coupled_ring

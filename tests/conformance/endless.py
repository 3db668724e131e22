"""A solver that never ends fails its test with a sentence, in place of hanging the suite."""

import contextlib
import signal
from collections.abc import Iterable, Iterator

import pytest

from diffshard.base import Proposal, Solver

MOST_PROPOSALS = 100_000
"""Proposals for one small problem: a hundred times as many as any solver of the package makes."""
MOST_S = 600.0
"""Seconds for one small problem, compiling included: the slowest solver takes a few, on a busy machine tens."""


def ending(solver: Solver, most: int = MOST_PROPOSALS) -> Solver:
    """The solver, which fails its test where it goes on proposing without a time limit."""

    def run(problem, *, time_limit_s, key) -> Iterator[Proposal]:
        proposed = solver(problem, time_limit_s=time_limit_s, key=key)
        return counted(proposed, time_limit_s) if isinstance(proposed, Iterable) else proposed  # which is refused

    def counted(proposed: Iterable[Proposal], time_limit_s: float | None) -> Iterator[Proposal]:
        for count, proposal in enumerate(proposed):
            if time_limit_s is None and count >= most:
                pytest.fail(f"The solver goes on after {most:,} proposals: without a time limit it must end by itself.")
            yield proposal

    return run


@contextlib.contextmanager
def time_budget(seconds: float = MOST_S) -> Iterator[None]:
    """Fails the test where what is inside takes longer, though it should be done long before."""

    def fail(*_) -> None:
        pytest.fail(
            f"The solver has neither ended nor proposed for {seconds:g} s: without a time limit it must end by itself, "
            "with one it must yield often enough to be stopped."
        )

    before = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

"""The course of a search for a pipeline: how much time it has left, and what it tells a terminal."""

import math
import time

from diffshard.base import Deadline
from diffshard.live_progress import LiveLine
from diffshard.pipelines.options import STAGE_TIME_LIMIT_S
from diffshard.plans.formats import format_count, format_s

SEARCH_SHARE = 0.6
"""The share of the time limit for finding stages; what is left is for bounds, shardings of stages and programs."""
_PROOF_SHARE = 0.75
"""The share of the time limit after which no stage is solved for the sake of a bound."""
_PATIENCE_S = 10.0
"""How long a search may look for a first pipeline that fits when its time is over."""
_MOST_LOAD = 50.0
"""Wall seconds of a busy machine that count as one second of this process at most, so that a search ends."""
_LEAST_TIME_S = 0.1
"""What a solver is given for one stage or program at least."""


class Course:
    """What a search for a pipeline has done so far.

    Args:
      time_limit_s: for all of the search; None ends by its own rule.

    Attributes:
      is_interrupted: whether Ctrl-C ended a part of it, after which no other is begun that can be left out.
    """

    def __init__(self, line: LiveLine, time_limit_s: float | None):
        self._line, self.deadline, self.is_interrupted = line, Deadline.from_now(time_limit_s), False
        self._start_process_s = time.process_time()
        self._now, self._num_solved, self._best_s, self._bound_s = "", 0, math.inf, -math.inf

    @property
    def seconds(self) -> float:
        """Seconds since the search began."""
        return self.deadline.elapsed_s

    # Time.

    def is_search_over(self) -> bool:
        """Tells whether no further stages are looked for; those of a first pipeline have more time."""
        limit_s = self.deadline.limit_s
        if limit_s is None or math.isfinite(self._best_s):
            was_ended = self.is_interrupted and math.isfinite(self._best_s)
            return was_ended or self.deadline.is_over(SEARCH_SHARE)
        return self.seconds >= SEARCH_SHARE * limit_s + _PATIENCE_S

    def is_proof_over(self) -> bool:
        """Tells whether no further stages are solved for a bound."""
        return self.is_interrupted or self.deadline.is_over(_PROOF_SHARE)

    def stage_limit_s(self, num_left: int = 1) -> float:
        """Returns the solver's time limit for a stage or program, of which some are left to plan.

        Without a limit for the search it is about the same time of the processor on a busy machine as on a quiet one,
        so that the same search finds the same.
        """
        rest_s = self.deadline.remaining_s(1 / num_left)
        if rest_s is None:
            process_s = time.process_time() - self._start_process_s
            load = self.seconds / process_s if process_s > 0 else 1.0
            return STAGE_TIME_LIMIT_S * min(max(load, 1.0), _MOST_LOAD)
        return min(STAGE_TIME_LIMIT_S, max(rest_s, _LEAST_TIME_S))

    # Progress.

    def tries(self, num_microbatches: int, schedule: str, number: int, count: int) -> None:
        """Notes which number of micro-batches and schedule is tried now, the one with a number from 1 of some."""
        batches = f"{num_microbatches} micro-batch{'es' if num_microbatches > 1 else ''}"
        self._say(f"{batches}, {schedule} ({number} of {count})")

    def step(self, name: str) -> None:
        """Notes what the search does now."""
        self._say(name)

    def solved(self) -> None:
        """Notes that a stage was solved."""
        self._num_solved += 1
        self._say(self._now)

    def found(self, seconds: float) -> None:
        """Notes the seconds of a step as a pipeline that was found."""
        self._best_s = min(self._best_s, seconds)
        self._say(self._now)

    def bounded(self, bound_s: float) -> None:
        """Notes the seconds that no pipeline is below."""
        self._bound_s = bound_s
        self._say(self._now)

    def _say(self, now: str) -> None:
        self._now = now
        solved = f"{format_count(self._num_solved, 'stage')} solved" if self._num_solved else ""
        best = f"best {format_s(self._best_s)}" if math.isfinite(self._best_s) else ""
        bound = f"bound {format_s(self._bound_s)}" if math.isfinite(self._bound_s) else ""
        self._line.step(", ".join(part for part in (f"{self.seconds:.1f} s, {now}", solved, best, bound) if part))

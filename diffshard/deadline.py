"""The time limit of a search, which all of its parts share."""

import time
from typing import Any, NamedTuple

from cost.real_numbers import real_number

_LEAST_TIME_S = 1e-3
"""Seconds that a solver is given where those before it have used them all, so that its limit stays positive."""


class Deadline(NamedTuple):
    """When a search has to end.

    Attributes:
      limit_s: wall-clock seconds that it may take; None lets it end by its own rule.
    """

    limit_s: float | None
    begin_s: float

    @classmethod
    def from_now(cls, limit_s: Any) -> "Deadline":
        """Returns the deadline of a search that begins now; the limit is a positive number or None."""
        return cls(real_number(limit_s), time.perf_counter())

    @property
    def elapsed_s(self) -> float:
        """Seconds since the search began."""
        return time.perf_counter() - self.begin_s

    def remaining_s(self, share: float = 1.0) -> float | None:
        """Returns a share of the seconds that are left, a millisecond at least; None without a limit."""
        return None if self.limit_s is None else max(share * (self.limit_s - self.elapsed_s), _LEAST_TIME_S)

    def part(self, share: float) -> "Deadline":
        """Returns the deadline of a part that begins now and has a share of the seconds that are left."""
        return Deadline(self.remaining_s(share), time.perf_counter())

    def is_over(self, share: float = 1.0) -> bool:
        """Returns whether a share of the time limit has passed."""
        return self.limit_s is not None and self.elapsed_s >= share * self.limit_s - _LEAST_TIME_S

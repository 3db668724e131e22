"""What to change about a step so that it takes less time or memory, as a plan says it."""

from typing import NamedTuple

from cost.number_ranges import Amount

MOST_LINES = 5
"""Lines of advice of a plan: a reader acts on the first one or two, and then plans again."""
LEAST_SHARE = 0.01
"""The share of the step's seconds, or of the memory's peak, that a change has to save to be listed."""


class Advice(NamedTuple):
    """A change that makes a step faster or smaller.

    Attributes:
      words: what to change, what that gains and how this is known, in a sentence.
      seconds: of the predicted step that it saves.
      num_bytes: of a device's peak that it saves.
    """

    words: str
    seconds: Amount = 0.0
    num_bytes: Amount = 0.0

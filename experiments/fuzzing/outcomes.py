"""What a case can end in, how errors are told apart, and how long computing takes."""

import os
import time
import traceback

HELD = "held"
"""All that was said is true."""
REFUSED = "refused"
"""A file was refused by a clear error."""
TAKEN = "taken"
"""A file was taken, and could be used."""


def error_outcome(error: BaseException, seed: int) -> str:
    """Describes an error by its type, where it comes from, and the seed of the case."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {frame.filename.rpartition('/')[2]}:{frame.lineno}, seed {seed}"


def computing_s() -> float:
    """Returns the seconds for which this process, and those of its children that have ended, have kept cores busy."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system

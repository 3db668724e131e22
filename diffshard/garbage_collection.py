"""Garbage is looked for less often while a function is traced.

Python looks for objects that only refer to each other after every few hundred new ones, each time among more of the
older ones. A traced function is hundreds of thousands of objects that all stay: looking took a quarter of the time of
JAX's tracing. What can be freed still is, only later.
"""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_THRESHOLDS = (50_000, 20, 100)
"""New objects before a look at the youngest ones, and looks before one at the older ones. With ten times as many, what
remains of the time is too small to measure; those that wait are a few megabytes."""

_lock = threading.Lock()
_before: list[tuple[int, int, int]] = []
"""The thresholds from before for each block that runs now, in the order in which these began."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Lets Python look for garbage less often inside a block, in all threads.

    What was set before holds again when the last of several blocks at the same time ends. Where looking is switched
    off, or rarer already, nothing changes.
    """
    with _lock:
        _before.append(gc.get_threshold())
        gc.set_threshold(*(max(own, more) if own else 0 for own, more in zip(_before[-1], _THRESHOLDS, strict=True)))
    try:
        yield
    finally:
        with _lock:
            first = _before[0]
            _before.pop()
            if not _before:
                gc.set_threshold(*first)

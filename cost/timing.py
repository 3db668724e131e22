"""Seconds as they are measured, where the model's are not enough."""

import statistics
import time
from collections.abc import Callable

import jax


def median_s(call: Callable[[], object], repeats: int) -> float:
    """Median seconds of a call that has been compiled, results awaited; a first one warms up."""
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return statistics.median(times)

"""Seconds of a message as the least of a few lines in its bytes, each of them a way to send it, and fits of such lines.

A communication library sends small messages by a protocol with little latency and large ones by a protocol with much
bandwidth, and takes the faster of them. Such a minimum is monotone and concave in bytes, and so are sums of minima: a
sequence of collectives is again the minimum of a few lines. Combined messages keep the split into a latency that they
share and bytes that each pays: the part s of a group whose members together have b / s bytes costs
s · min(α + β b / s) = min(s α + β b).

Fits minimise relative errors, so that small messages count as much as large ones.

Source: protocols LL, LL128 and Simple of NCCL (github.com/NVIDIA/nccl, src/graph/tuning.cc); one line is the α–β model.
"""

from collections.abc import Iterable, Sequence
from itertools import combinations, pairwise, product
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike


class Line(NamedTuple):
    """One way to send a message: b bytes take `latency_s + b * s_per_byte` seconds.

    Attributes:
      latency_s: seconds of the smallest message.
      s_per_byte: inverse of the bandwidth.
    """

    latency_s: float
    s_per_byte: float


FREE: tuple[Line, ...] = (Line(0.0, 0.0),)


def least_s(lines: Sequence[Line], num_bytes: ArrayLike, latency_share: float = 1.0) -> np.ndarray:
    """Computes the seconds of the fastest line, of the shape of `num_bytes`.

    Args:
      lines: one at least.
      num_bytes: of one message.
      latency_share: the part of the latency that is this message's own, where it is combined with others.
    """
    size = np.asarray(num_bytes, np.float64)
    seconds = [line.latency_s * latency_share + line.s_per_byte * size for line in lines]
    return np.asarray(seconds[0] if len(seconds) == 1 else np.minimum.reduce(seconds))


def fastest_lines(lines: Iterable[Line]) -> tuple[Line, ...]:
    """Returns the lines that are the fastest at some number of bytes, from the smallest messages to the largest."""
    fastest: list[Line] = []
    for line in sorted(lines):
        if fastest and line.s_per_byte >= fastest[-1].s_per_byte:
            continue  # as much latency and no more bandwidth
        while len(fastest) > 1 and _meet(fastest[-2], line) <= _meet(fastest[-2], fastest[-1]):
            fastest.pop()
        fastest.append(line)
    return tuple(fastest)


def added_lines(first: Sequence[Line], second: Sequence[Line]) -> tuple[Line, ...]:
    """Returns the lines of two messages of the same number of bytes that are sent one after the other."""
    sums = [Line(a.latency_s + b.latency_s, a.s_per_byte + b.s_per_byte) for a, b in product(first, second)]
    return tuple(sums) if len(sums) == 1 else fastest_lines(sums)


def _meet(line: Line, steeper: Line) -> float:
    """Returns the bytes at which two lines take equally long."""
    return (steeper.latency_s - line.latency_s) / (line.s_per_byte - steeper.s_per_byte)


MOST_LINES = 3
"""Lines that are fitted to a kind of collective: NCCL has three protocols."""
_SIZES_OF_A_LINE = 3
"""Least different sizes that a line is fitted to; two would be matched exactly, noise included."""
_BETTER = 0.9
"""One line more must reduce the error to this part; chosen so that lines of which two are alike become one."""
_EXACT = 1e-4
"""A mean relative error up to which no further line is looked for; clocks and repeats differ by more."""
_MOST_ITERATIONS = 100
"""Limits the reweighting of a fit; most converge within 20."""


def fit_lines(sent_bytes: np.ndarray, seconds: np.ndarray, most: int = MOST_LINES) -> tuple[Line, ...]:
    """Fits seconds = the fastest of a few lines in bytes, by the least mean absolute relative error.

    Each line is fitted to a range of sizes; all ways to cut the sizes into ranges are tried. Larger messages than any
    that was measured follow the last line, so of several lines the last one's bytes must take at least as long as its
    latency at the largest size: noise could make it flat, and large messages free.

    Args:
      sent_bytes: `[points]`, what one device sends.
      seconds: `[points]`, positive.
      most: lines.

    Returns:
      One line to `most`, from the fastest for small messages to the fastest for large ones.

    Raises:
      ValueError: the arrays are not one-dimensional and equally long, are empty, or have seconds that are not positive.
    """
    x, t = np.asarray(sent_bytes, float), np.asarray(seconds, float)
    if x.ndim != 1 or x.shape != t.shape or not x.size or not (t > 0).all():
        raise ValueError(
            "`sent_bytes` and `seconds` must be equally long lists of numbers with positive seconds, "
            f"not of shapes {x.shape} and {t.shape}; leave out points without a time."
        )
    sizes, place = np.unique(x, return_inverse=True)
    fitted: dict[tuple[int, int], Line] = {}

    def line(first: int, end: int) -> Line:
        if (first, end) not in fitted:
            points = (first <= place) & (place < end)
            fitted[first, end] = Line(*fit_latency_and_slope(x[points], t[points]))
        return fitted[first, end]

    best = (line(0, len(sizes)),)
    best_error = _error(best, x, t)
    for number in range(2, most + 1):
        if best_error < _EXACT:
            break
        candidates = []
        for cuts in combinations(range(_SIZES_OF_A_LINE, len(sizes) - _SIZES_OF_A_LINE + 1), number - 1):
            ends = (0, *cuts, len(sizes))
            if min(np.diff(ends)) >= _SIZES_OF_A_LINE:
                lines = fastest_lines([line(a, b) for a, b in pairwise(ends)])
                if lines[-1].s_per_byte * sizes[-1] >= lines[-1].latency_s:
                    candidates.append((_error(lines, x, t), lines))
        error, lines = min(candidates, default=(np.inf, ()))
        if error < _BETTER * best_error:
            best_error, best = error, lines
    return best


def _error(lines: tuple[Line, ...], x: np.ndarray, t: np.ndarray) -> float:
    return float(np.mean(np.abs(least_s(lines, x) / t - 1)))


def fit_latency_and_slope(sent_bytes: np.ndarray, seconds: np.ndarray) -> tuple[float, float]:
    """Fits seconds = latency + slope · bytes by the least sum of absolute *relative* errors; neither is negative.

    Least squares would fit the largest sizes only: with R² = 0.99999 such a fit is wrong by 15% in the median on V100
    hosts, most of all on the small messages that a training step is full of.

    Source: iteratively reweighted least squares for L1 (Schlossmacher 1973).
    """
    x, t = np.asarray(sent_bytes, float), np.asarray(seconds, float)
    weight = 1 / t
    latency = slope = 0.0
    for _ in range(_MOST_ITERATIONS):
        before = latency, slope
        rows = np.stack([weight, weight * x], axis=1)
        scale = np.linalg.norm(rows, axis=0)
        scale[scale == 0] = 1.0
        latency, slope = np.linalg.lstsq(rows / scale, weight * t, rcond=None)[0] / scale
        if slope < 0:
            latency, slope = np.average(t, weights=weight**2), 0.0
        elif latency < 0:
            latency, slope = 0.0, np.sum(weight**2 * x * t) / np.sum((weight * x) ** 2)
        error = np.abs(latency + slope * x - t) / t
        weight = 1 / (t * np.sqrt(np.maximum(error, 1e-3)))
        if np.allclose(before, (latency, slope), rtol=1e-6, atol=0):
            break
    return float(latency), float(slope)

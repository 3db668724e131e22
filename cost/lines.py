"""Seconds of a message as the least of a few lines in its bytes, each of them a way to send it.

A communication library sends small messages by a protocol with little latency and large ones by a protocol with much
bandwidth, and takes the faster of them. Such a minimum is monotone and concave in bytes, and so are sums of minima: a
sequence of collectives is again the minimum of a few lines. Combined messages keep the split into a latency that they
share and bytes that each pays: the part s of a group whose members together have b / s bytes costs
s · min(α + β b / s) = min(s α + β b).

Source: protocols LL, LL128 and Simple of NCCL (github.com/NVIDIA/nccl, src/graph/tuning.cc); one line is the α–β model.
"""

from collections.abc import Iterable, Sequence
from itertools import product
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

"""When the steps of a program end: one stream for arithmetic and one for each link, each of which does one at a time.

A step starts once all steps that it reads have ended and its streams are free, so every end is a maximum of ends plus
seconds: a recursion in max-plus algebra. `play` finds the order in which streams take their steps; `finish_s` is the
recursion in that order, in JAX and with maxima that may be smoothed. It is convex in the seconds. Its derivative with
respect to those of a step is 1 where the step is on the critical path and 0 elsewhere: what a second of the step costs.

Source: F. Baccelli, G. Cohen, G. J. Olsder, J.-P. Quadrat, "Synchronization and Linearity" (1992), chapter 2.
"""

import heapq
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

COMPUTE = 0
"""The stream of arithmetic; those of links have other numbers."""
_ARITHMETIC = (COMPUTE,)


class Step(NamedTuple):
    """A piece of a device's work; each stream does one at a time.

    Attributes:
      streams: that it takes: `COMPUTE`, or links; empty for a step that only joins what it reads.
      seconds: that it takes them for; arithmetic of 0 seconds is a barrier: no arithmetic passes it.
      reads: the steps that must have ended before it, by their places in the program; all come earlier.
    """

    streams: tuple[int, ...]
    seconds: float
    reads: tuple[int, ...] = ()


class Wait(NamedTuple):
    """A time in which arithmetic waits for a link.

    Attributes:
      step: the step of arithmetic that ends it; None at the end of the program.
      transfer: the step on a link that ended last of what it waits for.
      seconds: how long.
    """

    step: int | None
    transfer: int
    seconds: float


class Played(NamedTuple):
    """When each step of a program runs.

    Attributes:
      start_s, end_s: `[N]` seconds.
      seconds: until all steps have ended.
      waits: in order; with the seconds of arithmetic they are all of `seconds`.
      order: `[N]` the steps in the order in which they start.
    """

    start_s: np.ndarray
    end_s: np.ndarray
    seconds: float
    waits: tuple[Wait, ...]
    order: tuple[int, ...]


def play(steps: Sequence[Step]) -> Played:
    """Returns when each step runs: whenever streams are free, the first in the program of those that are ready starts.

    Arithmetic does not pass a barrier, so that between two barriers it may run in another order than the program's.
    """
    return _Player(steps).run()


def finish_s(seconds: ArrayLike, steps: Sequence[Step], order: Sequence[int], temperature: float = 0.0) -> jax.Array:
    """Returns when a program ends whose streams take their steps in an order, differentiable in the seconds.

    Args:
      seconds: `[N]` of each step, in place of those that the steps have.
      steps: `[N]` the program.
      order: `[N]` of `play`, which may have been for other seconds.
      temperature: t of t · log Σ exp(· / t) in place of each maximum, in seconds; 0 for exact maxima. The smoothed end
        is never before the exact one.
    """
    before = jnp.asarray(_before(steps, order))

    def step(ends: jax.Array, own: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        place, reads, duration = own
        return ends.at[place].set(_maximum(ends[reads], reads >= 0, temperature) + duration), None

    places = jnp.arange(len(steps))
    durations = jnp.asarray(seconds)[jnp.asarray(order, int)]
    ends, _ = jax.lax.scan(step, jnp.zeros_like(durations), (places, before, durations))
    return _maximum(ends, jnp.ones(len(steps), bool), temperature)


def _maximum(ends: jax.Array, is_there: jax.Array, temperature: float) -> jax.Array:
    """Returns the latest of some ends, 0 for none."""
    if not temperature:
        return jnp.max(ends, where=is_there, initial=0.0)
    smooth = temperature * jax.nn.logsumexp(jnp.where(is_there, ends, -jnp.inf) / temperature)
    return jnp.where(is_there.any(), smooth, 0.0)


def _before(steps: Sequence[Step], order: Sequence[int]) -> np.ndarray:
    """Returns the places in the order of what each step starts after, `[N, most]`, -1 for none."""
    place_of = {i: place for place, i in enumerate(order)}
    last: dict[int, int] = {}
    rows = []
    for place, i in enumerate(order):
        rows.append({*(place_of[j] for j in steps[i].reads), *(last[s] for s in steps[i].streams if s in last)})
        last.update(dict.fromkeys(steps[i].streams, place))
    most = max(map(len, rows), default=0)
    return np.array([[*row, *[-1] * (most - len(row))] for row in rows], int).reshape(len(rows), most)


class _Player:
    """A simulation of events: the ends of steps, after which others can start."""

    def __init__(self, steps: Sequence[Step]):
        self.steps = steps
        self.start_s, self.end_s = np.zeros(len(steps)), np.zeros(len(steps))
        self.num_unread = [len(set(step.reads)) for step in steps]
        self.readers: list[list[int]] = [[] for _ in steps]
        for i, step in enumerate(steps):
            for j in set(step.reads):
                self.readers[j].append(i)
        self.segment = _segments(steps)
        self.unrun = np.bincount([k for k in self.segment if k >= 0], minlength=1).tolist()
        self.current = 0  # the segment whose arithmetic runs
        self.ready: dict[tuple[int, ...], list[int]] = defaultdict(list)  # heaps, by streams
        self.busy: set[int] = set()
        self.ends: list[tuple[float, int]] = []  # a heap
        self.order: list[int] = []
        self.waits: list[Wait] = []
        self.now_s, self.computed_until_s = 0.0, 0.0

    def run(self) -> Played:
        self._go_on()
        for i, count in enumerate(self.num_unread):
            if not count:
                self._is_ready(i)
        self._start_all()
        while self.ends:
            self.now_s = self.ends[0][0]
            while self.ends and self.ends[0][0] == self.now_s:
                self._end(heapq.heappop(self.ends)[1])
            self._start_all()
        if self.now_s > self.computed_until_s:
            last = int(np.argmax(self.end_s))
            self.waits.append(Wait(None, self._transfer_before(last), self.now_s - self.computed_until_s))
        return Played(self.start_s, self.end_s, self.now_s, tuple(self.waits), tuple(self.order))

    def _go_on(self) -> None:
        """Goes on to the next segment that has arithmetic to run."""
        while self.current + 1 < len(self.unrun) and not self.unrun[self.current]:
            self.current += 1

    def _is_ready(self, i: int) -> None:
        heapq.heappush(self.ready[self.steps[i].streams], i)

    def _start_all(self) -> None:
        """Starts steps until none of those that are ready has its streams free."""
        while any(self._start_on(streams) for streams in tuple(self.ready)):
            pass

    def _start_on(self, streams: tuple[int, ...]) -> bool:
        """Starts steps that are ready on some streams; tells whether there was one."""
        heap, has_started = self.ready[streams], False
        while heap and self.busy.isdisjoint(streams):
            if streams == _ARITHMETIC and self.segment[heap[0]] > self.current:
                break
            self._start(heapq.heappop(heap))
            has_started = True
        return has_started

    def _start(self, i: int) -> None:
        streams, seconds, _ = self.steps[i]
        self.order.append(i)
        self.start_s[i], self.end_s[i] = self.now_s, self.now_s + seconds
        if streams == _ARITHMETIC:
            if self.now_s > self.computed_until_s:
                self.waits.append(Wait(i, self._transfer_before(i), self.now_s - self.computed_until_s))
            self.computed_until_s = self.end_s[i]
            self.unrun[self.current] -= 1
            self._go_on()
        if self.end_s[i] > self.now_s:
            self.busy.update(streams)
            heapq.heappush(self.ends, (self.end_s[i], i))
        else:
            self._end(i)

    def _end(self, i: int) -> None:
        self.busy.difference_update(self.steps[i].streams)
        for reader in self.readers[i]:
            self.num_unread[reader] -= 1
            if not self.num_unread[reader]:
                self._is_ready(reader)

    def _transfer_before(self, i: int) -> int:
        """Returns the last step on a link among what a step waited for, or the step itself."""
        while self.steps[i].streams in ((), _ARITHMETIC):
            i = max(self.steps[i].reads, key=lambda j: self.end_s[j])
        return i


def _segments(steps: Sequence[Step]) -> list[int]:
    """Returns for each step of arithmetic the number of its stretch between barriers, which are some of their own.

    The others have -1.
    """
    segments, number = [], 0
    for streams, seconds, _ in steps:
        is_barrier = streams == _ARITHMETIC and not seconds
        number += is_barrier
        segments.append(number if streams == _ARITHMETIC else -1)
        number += is_barrier
    return segments

"""When the collectives of a device program start and end: beside the arithmetic that they can run beside.

XLA's scheduler orders a program as it likes, within its dependences. Left alone it gathers the weights of a whole
forward pass before the first product, and computes the gradients of weights at the end, so that collectives are waited
for and memory fills. A schedule adds the dependences that leave it no choice. Every straight run of equations is cut
into windows, and between two windows stands one optimisation barrier, which joins the product that
the next window goes on from with everything that must have ended by then. So

- a weight is gathered in the window before the one that reads it (each collective of its reshard in a window of its
  own), or earlier where the links of that window are busy;
- a product whose result is read much later, such as the gradient of a weight, is computed in its own window;
- anything else that is read much later, such as the gradient of a bias or of a skip connection, is computed there or in
  the next window, because the activations that it is computed from would stay in memory until then;
- the reduction of such a gradient runs in the windows after the product.

Every window's collectives depend on those of the windows before, so that XLA combines only what belongs together; only
what is left of a bias's gradient is reduced when XLA likes.
`scheduling.py` makes a schedule, and `interpreter.py` follows it.

A window ends after a contraction on which others depend: a product whose result the next window goes on from. There a
barrier costs nothing, because the result is written to memory in any case; before a contraction it would keep the
compiler from laying the operands out as the contraction wants them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from search_spaces.partition_specs import IndexedSpec
from search_spaces.replay import REMAT
from search_spaces.sharding.base import ReshardStep
from search_spaces.sharding.graph import Block, Graph, Region, Value, Vertex, is_contraction, leads_to_contraction


class Fetch(NamedTuple):
    """A weight's reshard that starts before its reader.

    Attributes:
      value: the array, which `chain` makes of `root`.
      chain: the operations from the root to the value, in order.
      readers: indices of the vertices that read it so.
      encoded_for: the position of the operand of the first reader, a product in float8, for which it is rounded after
        the chain; None for what is moved as it is.
    """

    value: Value
    root: Value
    chain: tuple[Vertex, ...]
    spec: IndexedSpec
    readers: tuple[int, ...]
    encoded_for: int | None = None


class FetchStage(NamedTuple):
    """A part of a fetch: from the spec `before` along `steps`; the first stage runs the fetch's chain before that."""

    fetch: Fetch
    is_first: bool
    before: IndexedSpec
    steps: tuple[ReshardStep, ...]


@dataclass
class Barrier:
    """The barrier between two windows: the values that it joins, and the operations that run there.

    Attributes:
      arrivals: fetches whose last stage must have ended.
      reductions: vertices whose partial results must be there, and are reduced now.
      operations: those on reduced results, which run now.
    """

    values: list[Value] = field(default_factory=list)
    arrivals: list[Fetch] = field(default_factory=list)
    stages: list[FetchStage] = field(default_factory=list)
    reductions: list[Vertex] = field(default_factory=list)
    operations: list[Vertex] = field(default_factory=list)


@dataclass
class ProgramSchedule:
    """The barriers of a program; without any, the compiler orders it.

    Attributes:
      barriers: by the index of the vertex that they stand before.
      fetches: what a vertex reads as a fetch brings it, by the indices of the vertex and the value.
      late_reductions: indices of vertices whose reduction waits for a barrier.
      late_operations: indices of vertices that wait for a barrier, or whose results only fetches read.
      reduced_values: ids of what is left of partial results that wait, in the form in which it passes a barrier.
      bare_inputs: indices of inputs that are not gathered when they come in: everything that reads them has a fetch.
    """

    barriers: dict[int, Barrier] = field(default_factory=dict)
    fetches: dict[tuple[int, int], Fetch] = field(default_factory=dict)
    late_reductions: set[int] = field(default_factory=set)
    late_operations: set[int] = field(default_factory=set)
    reduced_values: set[int] = field(default_factory=set)
    bare_inputs: set[int] = field(default_factory=set)


Line = Sequence[tuple[Vertex | Region, int]]
"""Steps in order, each with a number that tells the rematerialised regions apart; those are part of the line."""


def straight_lines(block: Block) -> Iterator[Line]:
    """Yields the steps of a block, in which rematerialised regions lie flat, then those of its loops and branches."""
    line: list[tuple[Vertex | Region, int]] = []
    inner: list[Block] = []

    def add(steps: Sequence[Vertex | Region], region: int) -> None:
        for step in steps:
            if isinstance(step, Region) and step.equation.primitive.name in REMAT:
                add(step.blocks[0].steps, len(line) + 1)
                continue
            line.append((step, region))
            if isinstance(step, Region):
                inner.extend(step.blocks)

    add(block.steps, 0)
    yield line
    for other in inner:
        yield from straight_lines(other)


class Windows:
    """A line cut after contractions that others depend on.

    Args:
      compute_s: `[vertices]` seconds of each vertex.
      is_needed: `[vertices]` whether a contraction depends on a vertex.
      least_s: seconds of contractions in a window, at least.

    Attributes:
      start: `[windows]` the place in the line at which each window starts.
      seconds: `[windows]` of each one's contractions.
      of_place: `[len(line)]` the window of each place.
    """

    def __init__(self, line: Line, compute_s: np.ndarray, is_needed: np.ndarray, least_s: float):
        self.line = line
        self.start, self.seconds, self.of_place = [0], [0.0], []
        for place, (step, _) in enumerate(line):
            self.of_place.append(len(self.start) - 1)
            if isinstance(step, Region) or not is_contraction(step):
                continue
            self.seconds[-1] += float(compute_s[step.index])
            can_end = is_needed[step.index] and place + 1 < len(line) and isinstance(line[place + 1][0], Vertex)
            if can_end and self.seconds[-1] >= least_s:
                self.start.append(place + 1)
                self.seconds.append(0.0)

    def __len__(self) -> int:
        """Returns how many windows there are."""
        return len(self.start)


def windows_around(graph: Graph, compute_s: np.ndarray, least_s: float, num_after: int) -> np.ndarray:
    """Returns where the window before that of each vertex starts, and where the ones after it end, `[vertices, 2]`.

    Both are positions. Vertices of a line's first window start, and those of its last one end, at their own position;
    so do those that are no part of a line.

    Args:
      compute_s: `[vertices]` seconds of each vertex.
      least_s: seconds of contractions in a window, at least.
    """
    around = np.array([[vertex.position] * 2 for vertex in graph.vertices], np.int64).reshape(-1, 2)
    is_needed = leads_to_contraction(graph)
    for line in straight_lines(graph.block):
        windows = Windows(line, compute_s, is_needed, least_s)
        for (step, _), window in zip(line, windows.of_place, strict=True):
            if not isinstance(step, Vertex):
                continue
            first = line[windows.start[window - 1]][0] if window else step
            end = min(window + num_after, len(windows) - 1)
            last = line[windows.start[end + 1] - 1 if end + 1 < len(windows) else -1][0] if end > window else step
            if isinstance(first, Vertex):
                around[step.index, 0] = first.position
            if isinstance(last, Vertex):
                around[step.index, 1] = last.position
    return around

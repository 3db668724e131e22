"""Straight runs of equations, cut into windows of about equal arithmetic.

A window ends after a contraction on which others depend: a product whose result the next window goes on from. There a
barrier costs nothing, because the result is written to memory in any case; before a contraction it would keep the
compiler from laying the operands out as the contraction wants them.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from search_spaces.replay import REMAT
from search_spaces.sharding.graph import Block, Graph, Region, Vertex, is_contraction, leads_to_contraction

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

"""When the collectives of a device program start and end: beside the arithmetic that they can run beside.

XLA's scheduler orders a program as it likes, within its dependences. Left alone it gathers the weights of a whole
forward pass before the first product, and computes the gradients of weights at the end, so that collectives are waited
for and memory fills. A schedule adds the dependences that leave it no choice. Every straight run of equations is cut
into windows (`windows.py`), and between two windows the program pauses: one optimisation barrier joins the product that
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
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from search_spaces.partition_specs import IndexedSpec
from search_spaces.sharding.base import ReshardStep
from search_spaces.sharding.graph import Value, Vertex


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
class Pause:
    """What happens between two windows.

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
    """The pauses of a program; without any, the compiler orders it.

    Attributes:
      pauses: by the index of the vertex that they stand before.
      fetches: what a vertex reads as a fetch brings it, by the indices of the vertex and the value.
      late_reductions: indices of vertices whose reduction waits for a pause.
      late_operations: indices of vertices that wait for a pause, or whose results only fetches read.
      reduced_values: ids of what is left of partial results that wait, in the form in which it passes a barrier.
      bare_inputs: indices of inputs that are not gathered when they come in: everything that reads them has a fetch.
    """

    pauses: dict[int, Pause] = field(default_factory=dict)
    fetches: dict[tuple[int, int], Fetch] = field(default_factory=dict)
    late_reductions: set[int] = field(default_factory=set)
    late_operations: set[int] = field(default_factory=set)
    reduced_values: set[int] = field(default_factory=set)
    bare_inputs: set[int] = field(default_factory=set)

"""What goes from the forward pass of a training step to its backward pass, as a plan says it."""

from dataclasses import dataclass
from typing import Literal

from cost.number_ranges import Amount, Index

How = Literal["kept", "recomputed", "offloaded"]
"""What becomes of an array that goes from forward to backward."""


@dataclass(frozen=True)
class Residual:
    """Arrays that go from the forward pass to the backward pass of a step, all made by the same code.

    Attributes:
      name: the modules and the operation that make them; numbers of layers are left out.
      source: the line of the user's code.
      how: "kept" in memory; "recomputed": the operation runs a second time in the backward pass; or "offloaded": it
        waits in the host's memory.
      num_arrays: how many there are; the trips of a loop are counted.
      num_bytes: of all of them together, on each device: what keeping them takes.
      seconds: of one step that running the operation again, or waiting for copies, takes; 0 for what is kept.
    """

    name: str
    source: str
    how: How
    num_arrays: Index
    num_bytes: Amount
    seconds: Amount


@dataclass(frozen=True)
class Rematerialisation:
    """What a search with `remat="search"` has chosen.

    Attributes:
      recomputed: numbers of the steps of the traced function that run again in the backward pass; without any the
        function runs as it was traced.
      residuals: what goes from forward to backward and how, the largest first.
      seconds: of one step that everything that runs again, and waiting for copies, takes, as predicted before the last
        search.
      kept_bytes: of what is kept from forward to backward on each device.
      offloaded: of each array that waits in the host's memory its number, that of the step by which it has left the
        device, and that of the step from which on it comes back; both are 0 in loops.
      host_bytes: of these arrays, for each device.
    """

    recomputed: tuple[Index, ...]
    residuals: tuple[Residual, ...]
    seconds: Amount
    kept_bytes: Amount
    offloaded: tuple[tuple[Index, Index, Index], ...] = ()
    host_bytes: Amount = 0.0

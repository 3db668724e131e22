"""What goes from the forward pass of a training step to its backward pass, as a plan says it."""

from dataclasses import dataclass


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
    how: str
    num_arrays: int
    num_bytes: float
    seconds: float


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

    recomputed: tuple[int, ...]
    residuals: tuple[Residual, ...]
    seconds: float
    kept_bytes: float
    offloaded: tuple[tuple[int, int, int], ...] = ()
    host_bytes: float = 0.0

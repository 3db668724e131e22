"""What goes from the forward pass of a training step to its backward pass, as a plan says it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Residual:
    """Arrays that go from the forward pass to the backward pass of a step, all made by the same code.

    Attributes:
      name: the modules and the operation that make them; numbers of layers are left out.
      source: the line of the user's code.
      how: "kept" in memory, or "recomputed": the operation runs a second time in the backward pass.
      num_arrays: how many there are; the trips of a loop are counted.
      num_bytes: of all of them together, on each device: what keeping them takes.
      seconds: of one step that running the operation again takes; 0 for what is kept.
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
      seconds: of one step that everything that runs again takes, as predicted before the last search.
      kept_bytes: of what is kept from forward to backward on each device.
    """

    recomputed: tuple[int, ...]
    residuals: tuple[Residual, ...]
    seconds: float
    kept_bytes: float

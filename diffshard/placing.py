"""`place`: puts the layers of a chain on devices or pipeline stages, with the same solvers as everything else."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from diffshard.base import Progress, Solution, Solver
from diffshard.solving.solve import solve
from search_spaces.placement import PlacementSpace


class Placement(NamedTuple):
    """Where each layer runs and what that costs, in seconds.

    Attributes:
      assignment: `[L]`, the device of each layer.
      cost: `transfer` + `compute`.
      transfer: between the devices of neighbouring layers.
      compute: of the busiest device; of a pipeline (B - 1) times that of the slowest stage, plus that of all stages
        where layer times depend on the device (where they do not, that sum is the same for every placement).
      device_times: `[D]`, what each device computes: all its layers once.
      feasible: whether the layers fit the memory, run where they can and keep the pipeline's order; if not, this is the
        placement that breaks the rules least, and `solution.excess` says by how many bytes the memory is exceeded.
      solution: the solver's own result: lower bound, gap, feasibility, history, status.
    """

    assignment: np.ndarray
    cost: float
    transfer: float
    compute: float
    device_times: np.ndarray
    feasible: bool
    solution: Solution


def place(
    layer_times: np.ndarray | Sequence,
    transfer: np.ndarray | Sequence,
    *,
    num_microbatches: int | None = None,
    layer_bytes: np.ndarray | Sequence | None = None,
    memory_limit_bytes: float | np.ndarray = np.inf,
    solver: str | Solver = "gradient",
    time_limit_s: float | None = None,
    key: jax.Array | int | None = None,
    progress: Progress | None = None,
) -> Placement:
    """Places the layers of a chain on devices.

    Without `num_microbatches` any layer may go to any device, and the cost is the transfers plus the busiest device's
    time. With it, devices are pipeline stages: contiguous, in order, none empty, and the cost is
    (num_microbatches - 1) · slowest stage + transfers, plus the sum of the stages where it depends on the placement:
    where layer times differ between devices.

    >>> place([3, 3, 3, 2, 4, 4], [[0, 2, 4], [2, 0, 3], [4, 3, 0]]).cost
    12.0

    Args:
      layer_times: seconds, `[L]` where devices are equal or `[L, D]`; inf where a layer cannot run on a device.
      transfer: `[D, D]` seconds from the device of one layer (row) to that of the next (column).
      num_microbatches: B of a pipeline.
      layer_bytes: `[L]`, what each layer holds.
      memory_limit_bytes: of each device, a number or `[D]`.
      solver: as in `solve`.
      time_limit_s: as in `solve`.
      key: as in `solve`.
      progress: as in `solve`.

    Raises:
      ValueError: sizes that do not fit, negative or NaN numbers, a memory limit without `layer_bytes`, fewer
        layers than stages, micro-batches that are not a positive integer, an unknown solver.
    """
    space = PlacementSpace(
        layer_times,
        transfer,
        num_microbatches=num_microbatches,
        layer_bytes=layer_bytes,
        memory_limit_bytes=memory_limit_bytes,
    )
    solution = solve(space.problem, solver=solver, time_limit_s=time_limit_s, key=key, progress=progress)
    placement = space.decode(solution.choice)
    return Placement(
        assignment=placement.assignment,
        cost=float(solution.cost),
        transfer=placement.transfer_s,
        compute=placement.compute_s,
        device_times=placement.device_s,
        feasible=solution.feasible,
        solution=solution,
    )

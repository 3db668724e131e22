"""`place`: puts the layers of a chain on devices, with the solvers of everything else, or on pipeline stages.

Pipelines are divided by the programme that divides functions into stages, with one device for each stage, in order.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from cost.base import Problem
from cost.evaluation import evaluate
from diffshard.base import Progress, Proposal, Solution, Solver
from diffshard.pipelines.slowest_stage import least_sum_and_slowest
from diffshard.pipelines.stage_programme import Submesh
from diffshard.solving.presolve.base import identity
from diffshard.solving.presolve.pipeline import presolve
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
    solver: str | Solver | None = None,
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
      solver: as in `solve`; None is "gradient" without micro-batches, and for pipelines a dynamic programme that is
        exact.
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
    reduce = presolve
    if solver is None and num_microbatches is not None:
        solver, reduce = _programme(space, num_microbatches), identity
    solution = solve(
        space.problem,
        solver="gradient" if solver is None else solver,
        time_limit_s=time_limit_s,
        key=key,
        progress=progress,
        reduce=reduce,
    )
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


def _programme(space: PlacementSpace, num_microbatches: int) -> Solver:
    """Returns the solver that divides the layers of a space into stages by the dynamic programme of pipelines.

    Stages go to the devices in order, so that the number of stages from one to the last says which device it has. All
    devices are used, so that the transfers between them are the same for every division.
    """
    stage_s = space.stage_s()
    num_devices, num_layers = stage_s.shape[:2]

    def run(problem: Problem, *, time_limit_s: float | None, key: jax.Array) -> Iterator[Proposal]:
        del time_limit_s, key
        division = least_sum_and_slowest(
            num_layers,
            [num_devices],
            [Submesh(0, 1)],
            lambda num_stages: stage_s[num_devices - num_stages, ..., None],
            np.zeros((num_layers, 1, 1)),
            num_microbatches - 1,
            max_stages=num_devices,
        )
        if division is None:
            equal = np.arange(num_layers) * num_devices // num_layers
            yield Proposal(equal, np.inf)
            return
        choice = np.repeat(np.arange(num_devices), [stage.end - stage.start for stage in division.stages])
        yield Proposal(choice, evaluate(problem, choice).cost)

    return run

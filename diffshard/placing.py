"""`place`: puts the layers of a chain on devices, with the solvers of everything else, or on pipeline stages.

Pipelines are divided by the dynamic program that divides functions into stages, with one device for each stage, in
order.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import jax
import numpy as np

from cost.base import Problem
from cost.evaluation import evaluate
from cost.real_numbers import Amount, AmountOrInf, AnyNumber, Index
from diffshard.base import Proposal, Solver
from diffshard.pipelines.stage_dynamic_program import Submesh, least_sum_and_slowest
from diffshard.plans.documents import PLACEMENT, RecordFile
from diffshard.plans.plan_record import History, PlanRecord, check_certificate
from diffshard.plans.printing import format_bytes, format_count, format_s, format_table
from diffshard.solving.form import identity
from diffshard.solving.presolve.pipeline import presolve
from diffshard.solving.solve import SolveOptions, checked_solve_options, solve
from search_spaces.placement import PlacementSpace


@dataclass(frozen=True)
class Placement(PlanRecord):
    """Where each layer runs and what that costs. Made by `diffshard.pipelines.place`; `print` shows it.

    Attributes:
      assignment: `[L]`, the device of each layer.
      transfer_s: between the devices of neighbouring layers.
      compute_s: of the busiest device; of a pipeline (B - 1) times that of the slowest stage, plus that of all stages
        where layer times depend on the device (where they do not, that sum is the same for every placement).
      device_s: `[D]`, what each device computes: all its layers once.
      feasible: whether the layers fit the memory, run where they can and keep the pipeline's order; if not, this is the
        placement that breaks the rules least.
      excess_bytes: by how much the memory is exceeded.
      lower_bound_s: no placement that is feasible takes less; -inf where the solver has no bound.
      status: how the search ended, as in `diffshard.solvers.Solution`.
      search_s: seconds of the search.
      history: the improvements of the solver.
    """

    _file = RecordFile(PLACEMENT, 1)

    assignment: tuple[Index, ...]
    transfer_s: AmountOrInf
    compute_s: AmountOrInf
    device_s: tuple[AmountOrInf, ...]
    feasible: bool
    excess_bytes: AmountOrInf
    lower_bound_s: AnyNumber
    status: str
    search_s: Amount
    history: History = ()

    def __post_init__(self):
        if not self.assignment or max(self.assignment) >= len(self.device_s):
            raise ValueError(f"`assignment` must be devices from 0 to {len(self.device_s) - 1}, not {self.assignment}")
        if self.feasible:
            check_certificate(self.certificate)

    @property
    def step_s(self) -> float:
        """Seconds of transfers and of computing."""
        return self.transfer_s + self.compute_s

    def __str__(self) -> str:
        layers = [[layer for layer, device in enumerate(self.assignment) if device == d] for d in self._devices]
        misfit = "" if self.feasible else f", not feasible: {format_bytes(self.excess_bytes)} too much memory at most"
        lines = [
            f"Placement of {format_count(len(self.assignment), 'layer')} on "
            f"{format_count(len(self.device_s), 'device')}",
            "",
            f"  step     {format_s(self.step_s)}: transfers {format_s(self.transfer_s)}, computing "
            f"{format_s(self.compute_s)}{misfit}",
            *self.certificate.lines("other placement"),
            "",
        ]
        rows = [("device", "computes", "layers")]
        rows += [(str(d), format_s(self.device_s[d]), " ".join(map(str, layers[d]))) for d in self._devices]
        return "\n".join([*lines, *format_table(rows, "  ", right=(0, 1), wrap=(2,))])

    @property
    def _devices(self) -> range:
        return range(len(self.device_s))


def place(
    layer_times: np.ndarray | Sequence,
    transfer: np.ndarray | Sequence,
    *,
    num_microbatches: int | None = None,
    layer_bytes: np.ndarray | Sequence | None = None,
    memory_limit_bytes: float | np.ndarray = np.inf,
    **options: Unpack[SolveOptions],
) -> Placement:
    """Places the layers of a chain on devices.

    Without `num_microbatches` any layer may go to any device, and the cost is the transfers plus the busiest device's
    time. With it, devices are pipeline stages: contiguous, in order, none empty, and the cost is
    (num_microbatches - 1) · slowest stage + transfers, plus the sum of the stages where it depends on the placement:
    where layer times differ between devices.

    >>> place([3, 3, 3, 2, 4, 4], [[0, 2, 4], [2, 0, 3], [4, 3, 0]]).step_s
    12.0

    Args:
      layer_times: seconds, `[L]` where devices are equal or `[L, D]`; inf where a layer cannot run on a device.
      transfer: `[D, D]` seconds from the device of one layer (row) to that of the next (column).
      num_microbatches: B of a pipeline.
      layer_bytes: `[L]`, what each layer holds.
      memory_limit_bytes: of each device, a number or `[D]`.
      **options: of the solver; without one it is "gradient" without micro-batches, and for pipelines an exact dynamic
        dynamic program.

    Raises:
      ValueError: sizes that do not fit, negative or NaN numbers, a memory limit without `layer_bytes`, fewer
        layers than stages, micro-batches that are not a positive integer, an unknown solver.
    """
    start_s, options = time.perf_counter(), checked_solve_options(options, place)
    space = PlacementSpace(
        layer_times,
        transfer,
        num_microbatches=num_microbatches,
        layer_bytes=layer_bytes,
        memory_limit_bytes=memory_limit_bytes,
    )
    solver, reduce = options.get("solver"), presolve
    if solver is None and num_microbatches is not None:
        solver, reduce = _dynamic_program(space, num_microbatches), identity
    own: Any = {**options, "solver": "gradient" if solver is None else solver}
    solution = solve(space.problem, **own, reduce=reduce)
    placement = space.decode(solution.choice)
    return Placement(
        assignment=tuple(map(int, placement.assignment)),
        transfer_s=float(placement.transfer_s),
        compute_s=float(placement.compute_s),
        device_s=tuple(map(float, placement.device_s)),
        feasible=bool(solution.feasible),
        excess_bytes=float(solution.excess),
        lower_bound_s=float(solution.lower_bound),
        status=solution.status,
        search_s=time.perf_counter() - start_s,
        history=solution.history,
    )


def _dynamic_program(space: PlacementSpace, num_microbatches: int) -> Solver:
    """Returns the solver that divides the layers of a space into stages by the dynamic program of pipelines.

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

"""`GroupPlan` and `ExpertAssignment`: which workers form groups, which worker holds which expert, and what it costs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from cost.expert_groups import Group
from cost.real_numbers import Amount, Index
from diffshard.base import PlanError, checked_mesh
from diffshard.experts.layout import ExpertLayout
from diffshard.plans.documents import EXPERT_ASSIGNMENT, EXPERT_GROUPS, RecordFile
from diffshard.plans.plan_record import History, PlanRecord, check_certificate, relative_gap
from diffshard.plans.printing import format_count, format_s, format_table

PROVEN_GAP = 1e-5
"""The relative gap up to which a plan is called optimal; the tolerances of HiGHS leave less than this."""
_TOLERANCE = 1e-9  # relative: the rounding of sums


@dataclass(frozen=True)
class ExpertAssignment(PlanRecord):
    """Which worker holds each expert. Made by `diffshard.experts.assign_experts`; `print` shows it.

    Attributes:
      worker: of each expert, `[X]`.
      busy_s: seconds that each worker computes, `[W]`.
      greedy_s: seconds of the published greedy assignment.
      lower_bound_s: no assignment takes fewer seconds.
      status: how the search ended, as in `diffshard.solvers.Solution`.
      search_s: seconds that planning took.
      history: the improvements of the solver; empty where none was needed.
    """

    _file = RecordFile(EXPERT_ASSIGNMENT, 2)

    worker: tuple[Index, ...]
    busy_s: tuple[Amount, ...]
    greedy_s: Amount
    lower_bound_s: Amount
    status: str
    search_s: Amount
    history: History = ()

    def __post_init__(self):
        _check_assignment(self)

    @property
    def step_s(self) -> float:
        """Seconds of the worker that computes longest."""
        return max(self.busy_s)

    @property
    def experts(self) -> tuple[tuple[int, ...], ...]:
        """The experts of each worker, `[W]` tuples."""
        return _held_by(range(len(self.busy_s)), self.worker)

    def layout(self, mesh: Mesh | AbstractMesh, axis: str) -> ExpertLayout:
        """Returns where the experts lie on a mesh whose axis has the workers, in their order.

        Over the other axes of the mesh experts are copied, and each copy works on tokens of its own.

        Raises:
          TypeError: `mesh` is no mesh.
          PlanError: the mesh has no such axis, or it has another number of devices than there are workers.
        """
        checked_mesh(mesh)
        if axis not in mesh.shape or mesh.shape[axis] != len(self.busy_s):
            raise PlanError(
                f"`mesh` must have an axis {axis!r} of {len(self.busy_s)} devices, one for each worker; its axes are "
                f"{dict(mesh.shape)}."
            )
        return ExpertLayout(mesh, axis, (tuple(range(len(self.busy_s))),), self.experts)

    def __str__(self) -> str:
        workers = format_count(len(self.busy_s), "worker")
        lines = [f"Assignment of {format_count(len(self.worker), 'expert')} to {workers}", ""]
        lines += [f"  slowest  {format_s(self.step_s)}; greedy {format_s(self.greedy_s)}"]
        lines += [*self.certificate.lines("other assignment"), ""]
        rows = [("worker", "busy", "experts")]
        rows += [
            (str(w), format_s(ms), " ".join(map(str, experts)))
            for w, (ms, experts) in enumerate(zip(self.busy_s, self.experts, strict=True))
        ]
        return "\n".join([*lines, *format_table(rows, "  ", right=(0, 1), wrap=(2,))])


@dataclass(frozen=True)
class GroupPlan(PlanRecord):
    """Which workers form expert-parallel groups. Made by `diffshard.experts.group_experts`; `print` shows it.

    Attributes:
      groups: the workers of each group, the fastest ones first; each worker is in one.
      expert_workers: for each group, the worker that holds each expert, `[G]` tuples `[X]`.
      computing_s: seconds that each group computes experts, as the formula has it, `[G]`.
      exchanging_s: seconds in which each group exchanges tokens, `[G]`.
      all_reduce_s: seconds of the gradients' all-reduce between groups.
      merging_s: seconds of a step with the groups of the published heuristic.
      lower_bound_s: no division into groups takes fewer seconds.
      status: how the search ended, as in `diffshard.solvers.Solution`.
      search_s: seconds that planning took.
      history: empty: several searches make the groups.
    """

    _file = RecordFile(EXPERT_GROUPS, 2)

    groups: tuple[Group, ...]
    expert_workers: tuple[tuple[Index, ...], ...]
    computing_s: tuple[Amount, ...]
    exchanging_s: tuple[Amount, ...]
    all_reduce_s: Amount
    merging_s: Amount
    lower_bound_s: Amount
    status: str
    search_s: Amount
    history: History = ()

    def __post_init__(self):
        _check_groups(self)

    @property
    def step_s(self) -> float:
        """Predicted seconds of a step: those of the slowest group."""
        slowest = max(sum(times) for times in zip(self.computing_s, self.exchanging_s, strict=True))
        return slowest + self.all_reduce_s

    @property
    def is_rectangular(self) -> bool:
        """Whether the n-th workers of all groups hold the same experts, so that groups are rows of a mesh."""
        places = {
            tuple(group.index(worker) for worker in holders)
            for group, holders in zip(self.groups, self.expert_workers, strict=True)
        }
        return len(places) == 1 and len({len(group) for group in self.groups}) == 1

    def mesh(self, devices: Sequence[Any] | None = None, *, axes: tuple[str, str] = ("data", "expert")) -> Mesh:
        """Returns a mesh of the workers.

        Where groups are equally large and hold their experts alike, it has an axis of groups and an axis of the
        workers of a group. Other groups do not form a rectangle: then it has the second axis only, with all workers of
        the first group, then those of the second one, and so on.

        Args:
          devices: of the workers, in their order; None means the first ones of `jax.devices()`.
          axes: names of the axes.

        Raises:
          PlanError: there is not one device for each worker, or the axes are not two names.
        """
        num_workers = sum(map(len, self.groups))
        if devices is None:
            devices = jax.devices()[:num_workers]
        if not isinstance(devices, Sequence | np.ndarray) or any(not isinstance(d, jax.Device) for d in devices):
            raise PlanError(f"`devices` must be a list of JAX devices, not {devices!r}.")
        if len(set(devices)) < len(devices):
            twice = [device for device in dict.fromkeys(devices) if list(devices).count(device) > 1]
            raise PlanError(f"`devices` must have each device once; {twice} are there several times.")
        if len(devices) != num_workers:
            raise PlanError(
                f"`devices` must be {num_workers}, one for each worker of the plan; there are {len(devices)}."
            )
        if not isinstance(axes, tuple) or len(axes) != 2 or axes[0] == axes[1]:
            raise PlanError(f"`axes` must be a tuple of two different names, got {axes!r}.")
        order = np.concatenate([np.array(group) for group in self.groups])
        ordered = np.array(devices, object)[order]
        if self.is_rectangular:
            return Mesh(ordered.reshape(len(self.groups), -1), axes, axis_types=(AxisType.Auto,) * 2)
        return Mesh(ordered, axes[1:], axis_types=(AxisType.Auto,))

    def layout(
        self, devices: Sequence[Any] | None = None, *, axes: tuple[str, str] = ("data", "expert")
    ) -> ExpertLayout:
        """Returns where the experts lie on the mesh of the workers, which runs layers of experts.

        Args:
          devices: as for `mesh`.
          axes: as for `mesh`.

        Raises:
          PlanError: as `mesh`.
        """
        mesh = self.mesh(devices, axes=axes)
        rows = tuple(map(_held_by, self.groups, self.expert_workers))
        if self.is_rectangular:
            return ExpertLayout(mesh, axes[1], (tuple(range(len(rows[0]))),), rows[0])
        ends = np.cumsum([len(group) for group in self.groups])
        groups = tuple(tuple(range(end - len(row), end)) for row, end in zip(rows, ends.tolist(), strict=True))
        return ExpertLayout(mesh, axes[1], groups, tuple(own for row in rows for own in row))

    def __str__(self) -> str:
        num_workers = sum(map(len, self.groups))
        lines = [
            f"Plan of {format_count(len(self.expert_workers[0]), 'expert')} on {format_count(num_workers, 'worker')} "
            f"in {format_count(len(self.groups), 'group')}",
            "",
            f"  step     {format_s(self.step_s)} predicted, all-reduce "
            f"{format_s(self.all_reduce_s)} of it; merging pairs {format_s(self.merging_s)}",
            *self.certificate.lines("other division into groups"),
            "",
        ]
        rows = [("group", "computing", "exchanging", "experts a worker", "workers")]
        for index, (group, holders) in enumerate(zip(self.groups, self.expert_workers, strict=True)):
            held = [holders.count(worker) for worker in group]
            computing, exchanging = (format_s(times[index]) for times in (self.computing_s, self.exchanging_s))
            counts = f"{min(held)}" if min(held) == max(held) else f"{min(held)} to {max(held)}"
            rows.append((str(index), computing, exchanging, counts, " ".join(map(str, group))))
        return "\n".join([*lines, *format_table(rows, "  ", right=(0, 1, 2, 3), wrap=(4,))])


def _held_by(workers: Iterable[int], holders: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Returns the experts of each worker, where `holders` are the workers of each expert, `[X]`."""
    return tuple(tuple(x for x, holder in enumerate(holders) if holder == worker) for worker in workers)


def status_of(step_s: float, lower_bound_s: float, ended: str) -> str:
    """Returns the status of a plan whose last search ended so: "optimal" where its bound is the step's own time."""
    if relative_gap(step_s, lower_bound_s) <= PROVEN_GAP:
        return "optimal"
    return "finished" if ended in ("optimal", "infeasible") else ended


def _check_assignment(assignment: ExpertAssignment) -> None:
    experts = assignment.experts
    if not assignment.worker or max(assignment.worker) >= len(experts):
        raise ValueError("an expert is on a worker that there is not")
    for worker, (held, busy_s) in enumerate(zip(experts, assignment.busy_s, strict=True)):
        if bool(held) != bool(busy_s):
            raise ValueError(f"worker {worker} has {len(held)} experts, and computes for {busy_s} s")
    if not assignment.step_s <= assignment.greedy_s * (1 + _TOLERANCE):
        raise ValueError(f"`busy_s` has {assignment.step_s!r}, more than the {assignment.greedy_s!r} s of `greedy_s`")
    check_certificate(assignment.certificate)


def _check_groups(plan: GroupPlan) -> None:
    members = sorted(worker for group in plan.groups for worker in group)
    lengths = {len(plan.groups), len(plan.expert_workers), len(plan.computing_s), len(plan.exchanging_s)}
    if not members or members != list(range(len(members))) or len(lengths) != 1:
        raise ValueError("its groups do not divide the workers")
    if len({len(holders) for holders in plan.expert_workers}) != 1 or not plan.expert_workers[0]:
        raise ValueError("its groups do not hold the same number of experts")
    for group, holders in zip(plan.groups, plan.expert_workers, strict=True):
        if not set(holders) <= set(group):
            raise ValueError("an expert is on a worker of another group")
    check_certificate(plan.certificate)

"""`GroupPlan` and `ExpertAssignment`: which workers form groups, which worker holds which expert, and what it costs."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from cost.expert_groups import Group
from cost.number_ranges import Amount, Index
from diffshard.base import PlanError
from diffshard.expert_groups.layout import ExpertLayout
from diffshard.plans.documents import EXPERT_ASSIGNMENT, EXPERT_GROUPS, RecordFile
from diffshard.plans.formats import format_count, format_percent, format_s
from diffshard.plans.text_table import format_table, wrapped

PROVEN_GAP = 1e-5
"""The relative gap up to which a plan is called optimal; the tolerances of HiGHS leave less than this."""
_TOLERANCE = 1e-9  # relative: the rounding of sums


@dataclass(frozen=True)
class ExpertAssignment:
    """Which worker holds each expert. Made by `diffshard.assign_experts`; `print` shows it.

    Attributes:
      worker: of each expert, `[X]`.
      busy_ms: milliseconds that each worker computes, `[W]`.
      greedy_ms: milliseconds of the published greedy assignment.
      lower_bound_ms: no assignment takes fewer milliseconds.
      search_s: seconds that planning took.
    """

    worker: tuple[Index, ...]
    busy_ms: tuple[Amount, ...]
    greedy_ms: Amount
    lower_bound_ms: Amount
    search_s: Amount

    @property
    def makespan_ms(self) -> float:
        """Milliseconds of the worker that computes longest."""
        return max(self.busy_ms)

    @property
    def gap(self) -> float:
        """How much faster any other assignment can be, relative to this one."""
        return relative_gap(self.makespan_ms, self.lower_bound_ms)

    @property
    def experts(self) -> tuple[tuple[int, ...], ...]:
        """The experts of each worker, `[W]` tuples."""
        return tuple(
            tuple(x for x, holder in enumerate(self.worker) if holder == worker) for worker in range(len(self.busy_ms))
        )

    def layout(self, mesh: Mesh | AbstractMesh, axis: str) -> ExpertLayout:
        """Returns where the experts lie on a mesh whose axis has the workers, in their order.

        Over the other axes of the mesh experts are copied, and each copy works on tokens of its own.

        Raises:
          PlanError: the mesh has no such axis, or it has another number of devices than there are workers.
        """
        if not isinstance(mesh, Mesh | AbstractMesh):
            raise PlanError(f"`mesh` must be a `jax.sharding.Mesh` or `AbstractMesh`, not {mesh!r}.")
        if axis not in mesh.shape or mesh.shape[axis] != len(self.busy_ms):
            raise PlanError(
                f"`mesh` must have an axis {axis!r} of {len(self.busy_ms)} devices, one for each worker; its axes are "
                f"{dict(mesh.shape)}."
            )
        return ExpertLayout(mesh, axis, (tuple(range(len(self.busy_ms))),), self.experts)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the assignment as JSON; the file is replaced whole or not at all."""
        _ASSIGNMENT_FILE.save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "ExpertAssignment":
        """Reads an assignment that `save` wrote.

        Raises:
          PlanError: the file is no such assignment, or is damaged.
          OSError: the file cannot be read.
        """
        return _ASSIGNMENT_FILE.load(path, cls)

    def __str__(self) -> str:
        workers = format_count(len(self.busy_ms), "worker")
        lines = [f"Assignment of {format_count(len(self.worker), 'expert')} to {workers}", ""]
        lines += [f"  slowest  {format_s(self.makespan_ms / 1e3)}; greedy {format_s(self.greedy_ms / 1e3)}"]
        lines += [*_bound_lines(self.lower_bound_ms, self.gap, self.search_s), ""]
        rows = [("worker", "busy", "experts")]
        rows += [
            (str(w), format_s(ms / 1e3), " ".join(map(str, experts)))
            for w, (ms, experts) in enumerate(zip(self.busy_ms, self.experts, strict=True))
        ]
        return "\n".join([*lines, *format_table(rows, "  ", right=(0, 1), wrap=(2,))])


@dataclass(frozen=True)
class GroupPlan:
    """Which workers form expert-parallel groups. Made by `diffshard.group_experts`; `print` shows it.

    Attributes:
      groups: the workers of each group, the fastest ones first; each worker is in one.
      expert_workers: for each group, the worker that holds each expert, `[G]` tuples `[X]`.
      computing_ms: milliseconds that each group computes experts, as the formula has it, `[G]`.
      exchanging_ms: milliseconds in which each group exchanges tokens, `[G]`.
      all_reduce_ms: milliseconds of the gradients' all-reduce between groups.
      merging_ms: milliseconds of a step with the groups of the published heuristic.
      lower_bound_ms: no division into groups takes fewer milliseconds.
      search_s: seconds that planning took.
    """

    groups: tuple[Group, ...]
    expert_workers: tuple[tuple[Index, ...], ...]
    computing_ms: tuple[Amount, ...]
    exchanging_ms: tuple[Amount, ...]
    all_reduce_ms: Amount
    merging_ms: Amount
    lower_bound_ms: Amount
    search_s: Amount

    @property
    def step_ms(self) -> float:
        """Predicted milliseconds of a step: those of the slowest group."""
        slowest = max(sum(times) for times in zip(self.computing_ms, self.exchanging_ms, strict=True))
        return slowest + self.all_reduce_ms

    @property
    def gap(self) -> float:
        """How much faster any other division can be predicted to be, relative to this one."""
        return relative_gap(self.step_ms, self.lower_bound_ms)

    @property
    def is_rectangular(self) -> bool:
        """Tells whether the n-th workers of all groups hold the same experts, so that groups are rows of a mesh."""
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
        rows = tuple(
            tuple(tuple(x for x, holder in enumerate(holders) if holder == worker) for worker in group)
            for group, holders in zip(self.groups, self.expert_workers, strict=True)
        )
        if self.is_rectangular:
            return ExpertLayout(mesh, axes[1], (tuple(range(len(rows[0]))),), rows[0])
        ends = np.cumsum([len(group) for group in self.groups])
        groups = tuple(tuple(range(end - len(row), end)) for row, end in zip(rows, ends.tolist(), strict=True))
        return ExpertLayout(mesh, axes[1], groups, tuple(own for row in rows for own in row))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON; the file is replaced whole or not at all."""
        _GROUPS_FILE.save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "GroupPlan":
        """Reads a plan that `save` wrote.

        Raises:
          PlanError: the file is no such plan, or is damaged.
          OSError: the file cannot be read.
        """
        return _GROUPS_FILE.load(path, cls)

    def __str__(self) -> str:
        num_workers = sum(map(len, self.groups))
        lines = [
            f"Plan of {format_count(len(self.expert_workers[0]), 'expert')} on {format_count(num_workers, 'worker')} "
            f"in {format_count(len(self.groups), 'group')}",
            "",
            f"  step     {format_s(self.step_ms / 1e3)} predicted, all-reduce "
            f"{format_s(self.all_reduce_ms / 1e3)} of it; merging pairs {format_s(self.merging_ms / 1e3)}",
            *_bound_lines(self.lower_bound_ms, self.gap, self.search_s),
            "",
        ]
        rows = [("group", "computing", "exchanging", "experts a worker", "workers")]
        for index, (group, holders) in enumerate(zip(self.groups, self.expert_workers, strict=True)):
            held = [holders.count(worker) for worker in group]
            computing, exchanging = (format_s(times[index] / 1e3) for times in (self.computing_ms, self.exchanging_ms))
            counts = f"{min(held)}" if min(held) == max(held) else f"{min(held)} to {max(held)}"
            rows.append((str(index), computing, exchanging, counts, " ".join(map(str, group))))
        return "\n".join([*lines, *format_table(rows, "  ", right=(0, 1, 2, 3), wrap=(4,))])


def _bound_lines(lower_bound_ms: float, gap: float, search_s: float) -> list[str]:
    status = "optimal" if gap <= PROVEN_GAP else "not proven to be optimal"
    text = f"  bound    {format_s(lower_bound_ms / 1e3)}, gap {format_percent(gap)}: no other is faster by more"
    return [*wrapped(text, "", " " * 11), f"  search   {format_s(search_s)}, {status}"]


def relative_gap(ms: float, lower_bound_ms: float) -> float:
    """Returns how much less than a time its lower bound is, relative to it; 0 if it is no less."""
    return max(1 - lower_bound_ms / ms, 0.0) if ms else 0.0


def _check_assignment(assignment: ExpertAssignment) -> None:
    experts = assignment.experts
    if not assignment.worker or max(assignment.worker) >= len(experts):
        raise ValueError("an expert is on a worker that there is not")
    for worker, (held, busy_ms) in enumerate(zip(experts, assignment.busy_ms, strict=True)):
        if bool(held) != bool(busy_ms):
            raise ValueError(f"worker {worker} has {len(held)} experts, and computes for {busy_ms} ms")
    _check_at_most("lower_bound_ms", assignment.lower_bound_ms, "the slowest worker", assignment.makespan_ms)
    _check_at_most("busy_ms", assignment.makespan_ms, "`greedy_ms`", assignment.greedy_ms)


def _check_groups(plan: GroupPlan) -> None:
    members = sorted(worker for group in plan.groups for worker in group)
    lengths = {len(plan.groups), len(plan.expert_workers), len(plan.computing_ms), len(plan.exchanging_ms)}
    if not members or members != list(range(len(members))) or len(lengths) != 1:
        raise ValueError("its groups do not divide the workers")
    if len({len(holders) for holders in plan.expert_workers}) != 1 or not plan.expert_workers[0]:
        raise ValueError("its groups do not hold the same number of experts")
    for group, holders in zip(plan.groups, plan.expert_workers, strict=True):
        if not set(holders) <= set(group):
            raise ValueError("an expert is on a worker of another group")
    _check_at_most("lower_bound_ms", plan.lower_bound_ms, "the step", plan.step_ms)


def _check_at_most(name: str, ms: float, of: str, most_ms: float) -> None:
    if not ms <= most_ms * (1 + _TOLERANCE):
        raise ValueError(f"`{name}` is {ms!r}, more than the {most_ms!r} ms of {of}")


_ASSIGNMENT_FILE = RecordFile(EXPERT_ASSIGNMENT, 1, _check_assignment)
_GROUPS_FILE = RecordFile(EXPERT_GROUPS, 1, _check_groups)

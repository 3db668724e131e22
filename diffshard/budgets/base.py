"""Phases of a job whose devices change, and the plans and moves that were chosen for them."""

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from cost.base import Hardware
from cost.real_numbers import Amount, Count, Index, Limit, PositiveAmount, checked_number, whole_number
from diffshard.base import PlanError, checked_mesh
from diffshard.plans.documents import BUDGET, RecordFile
from diffshard.plans.file import from_json, to_json
from diffshard.plans.json_values import from_json_values
from diffshard.plans.plan_record import History, PlanRecord, check_certificate
from diffshard.plans.printing import (
    format_bytes,
    format_devices,
    format_percent,
    format_s,
    format_table,
    short_name,
    wrapped,
)
from diffshard.resharding import Move
from diffshard.sharding_search.plan import Plan
from diffshard.sharding_search.planned_function import PlannedFunction


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A time in which a job has the same devices.

    Attributes:
      mesh: the devices; an `AbstractMesh` for devices that are not here.
      num_steps: steps that the job does in this phase; or
      duration_s: seconds that the phase lasts, the move into it included.
      hardware: as in `search`.
      memory_limit_bytes: as in `search`.
      device_ids: numbers of the devices, row-major; a device has the same number in all phases. None takes the ids of
        a mesh of devices, and 0, 1, 2, ... for an abstract one: a smaller mesh has the first devices of a larger one.

    Raises:
      TypeError, ValueError: an attribute breaks its rule.
    """

    mesh: Mesh | AbstractMesh
    num_steps: int | None = None
    duration_s: float | None = None
    hardware: Hardware | str | None = None
    memory_limit_bytes: float | None = None
    device_ids: tuple[Index, ...] | None = None

    def __post_init__(self):
        checked_mesh(self.mesh, name="Phase.mesh")
        if (self.num_steps is None) == (self.duration_s is None):
            raise ValueError(
                f"`Phase` takes either `num_steps` or `duration_s`, got {self.num_steps!r} and {self.duration_s!r}."
            )
        if self.num_steps is not None:
            checked_number("Phase.num_steps", self.num_steps, Count)
        if self.duration_s is not None:
            checked_number("Phase.duration_s", self.duration_s, PositiveAmount)
        if self.memory_limit_bytes is not None:
            checked_number("Phase.memory_limit_bytes", self.memory_limit_bytes, Limit, " or None")
        ids = self.device_ids
        if ids is None:
            return
        numbers = [whole_number(i) for i in ids] if isinstance(ids, Iterable) else []
        are_known = all(number is not None and number >= 0 for number in numbers)
        if len(numbers) != self.mesh.size or len(set(numbers)) < len(numbers) or not are_known:
            raise ValueError(
                f"`Phase.device_ids` must be {self.mesh.size} different whole numbers, 0 or more, one for each device "
                f"of the mesh, not {ids!r}."
            )

    @property
    def devices(self) -> tuple[int, ...]:
        """Numbers of the devices, row-major."""
        if self.device_ids is not None:
            return tuple(self.device_ids)
        if isinstance(self.mesh, Mesh):
            return tuple(device.id for device in self.mesh.devices.flat)
        return tuple(range(self.mesh.size))


def _mesh_of_axes(values: Any) -> AbstractMesh:
    axes = from_json_values(Mapping[str, Count], values)
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


class PhasePlans(NamedTuple):
    """Plans for all phases, and the moves between them.

    Attributes:
      plans: one for each phase.
      moves: from each phase into the next, one less.
      num_steps: for each phase, given or, for a duration, what fits into it after the move; not rounded.
    """

    plans: tuple[Plan, ...]
    moves: tuple[Move, ...]
    num_steps: tuple[Amount, ...]

    @property
    def moves_s(self) -> float:
        """Seconds of all moves."""
        return sum(move.seconds for move in self.moves)

    @property
    def total_s(self) -> float:
        """Seconds of all steps and moves."""
        return sum(n * plan.step_s for n, plan in zip(self.num_steps, self.plans, strict=True)) + self.moves_s

    @property
    def total_steps(self) -> float:
        """Steps of all phases."""
        return sum(self.num_steps)


@dataclass(frozen=True)
class Budget(PlanRecord):
    """How a job runs while its devices change. Made by `diffshard.elastic.budget`; `print` shows it.

    Attributes:
      phases: as they were given, with the numbers of their devices.
      chosen: the plans and moves that were chosen together.
      alone: each phase's plan without regard to the others, as `search` finds it, with the moves that it causes.
      lower_bound_s: no plans and moves make the mean step, `step_s`, shorter.
      status: of the solver on the joint problem.
      search_s: seconds that all this took.
      history: empty: several problems are solved.
      fn: the function; not saved.
    """

    phases: tuple[Phase, ...]
    chosen: PhasePlans
    alone: PhasePlans
    lower_bound_s: Amount
    status: str
    search_s: Amount
    history: History = ()
    fn: Callable[..., Any] | None = field(default=None, compare=False)

    _file = RecordFile(
        BUDGET,
        1,
        without=("fn",),
        parts={
            Mesh | AbstractMesh: (lambda mesh: dict(mesh.shape), _mesh_of_axes),
            Plan: (to_json, lambda values: from_json(values, "a plan of a phase", Plan)),
        },
    )

    def __post_init__(self):
        for plans in (self.chosen, self.alone):
            if not len(self.phases) == len(plans.plans) == len(plans.num_steps) == len(plans.moves) + 1 > 1:
                raise ValueError("its phases, plans, steps and moves are not of the same two or more phases")
            given = [phase.num_steps for phase in self.phases]
            if any(n is not None and n != steps for n, steps in zip(given, plans.num_steps, strict=True)):
                raise ValueError(f"its plans run for {plans.num_steps} steps, where its phases have {given}")
            for phase, plan in zip(self.phases, plans.plans, strict=True):
                if list(phase.mesh.shape.items()) != list(plan.mesh_axes.items()):
                    raise ValueError(f"a phase of {dict(phase.mesh.shape)} has a plan for {dict(plan.mesh_axes)}")
        if len({phase.duration_s is None for phase in self.phases}) > 1:
            raise ValueError("its phases must all have `num_steps` or all `duration_s`")
        check_certificate(self.certificate)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        fn: Callable[..., Any] | None = None,
        meshes: Sequence[Mesh | AbstractMesh | None] = (),
    ) -> "Budget":
        """Reads a budget that `save` wrote, for instance in a process that is started for one of its phases.

        >>> step = Budget.load("budget.json", train_step, [None, mesh]).step(1)

        Args:
          path: the file.
          fn: the function that it was made for; None for a budget that is only shown.
          meshes: for each phase its devices, with the axes of the phase; None, or none at all, where they are not here.

        Raises:
          PlanError: the file is no budget, is damaged, or a mesh has other axes than its phase.
          OSError: the file cannot be read.
        """
        budget = cls._file.load(path, cls)
        if meshes and len(meshes) != len(budget.phases):
            raise PlanError(f"`meshes` must be {len(budget.phases)}, one for each phase, not {len(meshes)}.")
        for i, mesh in enumerate(meshes):
            if mesh is not None:
                budget = budget._on(i, mesh)
        return replace(budget, fn=fn)

    def _on(self, phase: int, mesh: Mesh | AbstractMesh) -> "Budget":
        """Returns the budget with another mesh for a phase."""
        checked_mesh(mesh, self.phases[phase].mesh.shape, f"meshes[{phase}]")

        def on_mesh(plans: PhasePlans) -> PhasePlans:
            plan = replace(plans.plans[phase], mesh=mesh)
            return plans._replace(plans=(*plans.plans[:phase], plan, *plans.plans[phase + 1 :]))

        phases = (*self.phases[:phase], replace(self.phases[phase], mesh=mesh), *self.phases[phase + 1 :])
        return replace(self, phases=phases, chosen=on_mesh(self.chosen), alone=on_mesh(self.alone))

    @property
    def plans(self) -> tuple[Plan, ...]:
        """One plan for each phase; they can be saved one by one."""
        return self.chosen.plans

    @property
    def moves(self) -> tuple[Move, ...]:
        """The moves of the state from each phase into the next."""
        return self.chosen.moves

    @property
    def has_durations(self) -> bool:
        """Whether phases last for a time, so that the number of steps counts, not the seconds."""
        return self.phases[0].duration_s is not None

    @property
    def step_s(self) -> float:
        """Predicted seconds of all phases, with the moves, divided by their number of steps."""
        return mean_step_s(self.phases, self.chosen.total_s, self.chosen.total_steps)

    @property
    def bound(self) -> float:
        """Seconds of all steps and moves below which none can be; for durations, steps above which none can be."""
        if not self.has_durations:
            return self.lower_bound_s * self.chosen.total_steps
        return _duration_s(self.phases) / self.lower_bound_s if self.lower_bound_s else math.inf

    def plan(self, phase: int) -> Plan:
        """Returns the plan of one phase.

        Raises:
          ValueError: there is no such phase.
        """
        number = whole_number(phase)
        if number is None or not 0 <= number < len(self.phases):
            raise ValueError(f"`phase` must be a whole number from 0 to {len(self.phases) - 1}, not {phase!r}.")
        return self.plans[number]

    def step(self, phase: int) -> PlannedFunction[Plan]:
        """Returns the function with the plan of one phase, as `Plan.apply` does. `move` brings the state there.

        Raises:
          PlanError: the budget was loaded without its function.
        """
        if self.fn is None:
            raise PlanError("The budget was loaded without its function: `Budget.load(path, fn)`.")
        return self.plan(phase).apply(self.fn)

    def move(self, phase: int, *args: Any, **kwargs: Any) -> Any:
        """Puts arguments of the function where the plan of a phase wants them, as `Plan.shard` does.

        >>> state = budget.move(1, state)

        Raises:
          PlanError: the phase's mesh is abstract, the arguments are not those of the plan, or an array is over several
            processes and the phase has other devices.
        """
        plan = self.plan(phase)
        for array in jax.tree.leaves((args, kwargs)):
            if not getattr(array, "is_fully_addressable", True) and _devices(array.sharding.mesh) != _devices(
                plan.mesh
            ):
                raise PlanError(
                    f"Phase {phase} has other devices than an array that is over several processes, which can be moved "
                    "between meshes of the same devices only. Save a checkpoint and restore it there."
                )
        return plan.shard(*args, **kwargs)

    def __str__(self) -> str:
        name, chosen, alone = short_name(self.plans[0].function), self.chosen, self.alone
        lines = [f"Budget of {name} over {len(self.phases)} phases: {_total(self, chosen)}", ""]
        rows = [("phase", "devices", "hardware", "steps", "step", "alone", "move into it", "sent", "memory")]
        for i, plan in enumerate(chosen.plans):
            move = chosen.moves[i - 1] if i else Move(0.0, 0.0, 0)
            rows.append(
                (
                    str(i), format_devices(plan.mesh_axes), plan.hardware.name, f"{chosen.num_steps[i]:,.6g}",
                    format_s(plan.step_s), format_s(alone.plans[i].step_s), format_s(move.seconds),
                    format_bytes(move.num_bytes), format_bytes(plan.peak_bytes),
                )
            )  # fmt: skip
        lines += format_table(rows, "  ", right=(0, 3, 4, 5, 6, 7, 8), wrap=(1, 2))
        gap = f"gap {format_percent(self.gap)}: no plans and moves are predicted to be better by more"
        lines += [
            "",
            f"  alone    {_total(self, alone)}, with the best plan of each phase",
            *wrapped(f"  bound    {_amount(self, self.bound)}, {gap}", "", " " * 11),
            f"  search   {format_s(self.search_s)}, {self.status}",
        ]
        return "\n".join(lines)


def _devices(mesh: Mesh | AbstractMesh | None) -> set[Any]:
    return set(mesh.devices.flat) if isinstance(mesh, Mesh) else set()


def mean_step_s(phases: Sequence[Phase], total_s: float, total_steps: float) -> float:
    """Returns seconds of a step in the mean over all phases; inf where there are no steps.

    Args:
      total_s: of all steps and moves, which counts where phases have numbers of steps.
    """
    seconds = _duration_s(phases) or total_s
    return seconds / total_steps if total_steps else math.inf


def _duration_s(phases: Sequence[Phase]) -> float:
    return sum(phase.duration_s or 0.0 for phase in phases)


def _total(budget: Budget, plans: PhasePlans) -> str:
    """Returns seconds or steps of plans as text, with the seconds of their moves."""
    amount = plans.total_steps if budget.has_durations else plans.total_s
    return f"{_amount(budget, amount)}, {format_s(plans.moves_s)} of moves"


def _amount(budget: Budget, amount: float) -> str:
    return f"{amount:,.6g} steps" if budget.has_durations else format_s(amount)

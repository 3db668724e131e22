"""Phases of a job whose devices change, and the plans and moves that were chosen for them."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from jax.sharding import AbstractMesh, Mesh

from cost.base import Hardware
from cost.real_numbers import is_positive, whole_number
from diffshard.plans.formats import format_bytes, format_devices, format_percent, format_s, short_name
from diffshard.plans.text_table import format_table, wrapped
from diffshard.resharding.moves import Move
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
    device_ids: tuple[int, ...] | None = None

    def __post_init__(self):
        if not isinstance(self.mesh, Mesh | AbstractMesh):
            raise TypeError(f"`Phase.mesh` must be a Mesh or an AbstractMesh, not {type(self.mesh).__name__}.")
        if (self.num_steps is None) == (self.duration_s is None):
            raise ValueError(
                f"`Phase` takes either `num_steps` or `duration_s`, got {self.num_steps!r} and {self.duration_s!r}."
            )
        if self.num_steps is not None and (whole_number(self.num_steps) or 0) < 1:
            raise ValueError(f"`Phase.num_steps` must be a positive whole number, not {self.num_steps!r}.")
        if self.duration_s is not None and not (is_positive(self.duration_s) and math.isfinite(self.duration_s)):
            raise ValueError(f"`Phase.duration_s` must be a positive, finite number, not {self.duration_s!r}.")
        if self.memory_limit_bytes is not None and not is_positive(self.memory_limit_bytes):
            raise ValueError(
                f"`Phase.memory_limit_bytes` must be a positive number or None, not {self.memory_limit_bytes!r}."
            )
        ids = self.device_ids
        if ids is None:
            return
        if len(ids) != self.mesh.size or len(set(ids)) != len(ids) or any(whole_number(i) is None for i in ids):
            raise ValueError(
                f"`Phase.device_ids` must be {self.mesh.size} different whole numbers, one for each device of the "
                f"mesh, not {ids!r}."
            )

    @property
    def devices(self) -> tuple[int, ...]:
        """Numbers of the devices, row-major."""
        if self.device_ids is not None:
            return tuple(self.device_ids)
        if isinstance(self.mesh, Mesh):
            return tuple(device.id for device in self.mesh.devices.flat)
        return tuple(range(self.mesh.size))


class PhasePlans(NamedTuple):
    """Plans for all phases, and the moves between them.

    Attributes:
      plans: one for each phase.
      moves: from each phase into the next, one less.
      num_steps: for each phase, given or, for a duration, what fits into it after the move; not rounded.
    """

    plans: tuple[Plan, ...]
    moves: tuple[Move, ...]
    num_steps: tuple[float, ...]

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
class Budget:
    """How a job runs while its devices change. Made by `diffshard.budget`; `print` shows it.

    Attributes:
      fn: the function.
      phases: as they were given.
      chosen: the plans and moves that were chosen together.
      alone: each phase's plan without regard to the others, as `search` finds it, with the moves that it causes.
      bound: for phases with numbers of steps, seconds below which no plans and moves can be in total; for phases with
        durations, the number of steps above which none can be.
      status: of the solver on the joint problem.
      search_s: seconds that all this took.
    """

    fn: Callable[..., Any]
    phases: tuple[Phase, ...]
    chosen: PhasePlans
    alone: PhasePlans
    bound: float
    status: str
    search_s: float

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
    def gap(self) -> float:
        """How much better any other plans and moves can be at most, relative to the seconds or steps of these."""
        if self.has_durations:
            return max(self.bound / self.chosen.total_steps - 1, 0.0) if self.chosen.total_steps else math.inf
        return max(1 - self.bound / self.chosen.total_s, 0.0) if self.chosen.total_s else 0.0

    def step(self, phase: int) -> PlannedFunction[Plan]:
        """Returns the function with the plan of one phase, as `Plan.apply` does. `move` brings the state there."""
        return self.plans[self._checked(phase)].apply(self.fn)

    def move(self, phase: int, *args: Any, **kwargs: Any) -> Any:
        """Puts arguments of the function where the plan of a phase wants them, as `Plan.shard` does.

        >>> state = budget.move(1, state)

        Raises:
          PlanError: the phase's mesh is abstract, or the arguments are not those of the plan.
        """
        return self.plans[self._checked(phase)].shard(*args, **kwargs)

    def _checked(self, phase: int) -> int:
        number = whole_number(phase)
        if number is None or not 0 <= number < len(self.phases):
            raise ValueError(f"`phase` must be a whole number from 0 to {len(self.phases) - 1}, not {phase!r}.")
        return number

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


def _total(budget: Budget, plans: PhasePlans) -> str:
    """Returns seconds or steps of plans as text, with the seconds of their moves."""
    amount = plans.total_steps if budget.has_durations else plans.total_s
    return f"{_amount(budget, amount)}, {format_s(plans.moves_s)} of moves"


def _amount(budget: Budget, amount: float) -> str:
    return f"{amount:,.6g} steps" if budget.has_durations else format_s(amount)

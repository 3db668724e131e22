"""What `search` was asked for, checked before anything is traced."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from cost.base import Hardware
from cost.presets import hardware_of, preset_of_mesh
from cost.real_numbers import Limit, checked_number
from diffshard.base import Deadline, Solver, checked_mesh
from diffshard.host_memory import check_host_memory
from diffshard.live_progress import ProgressDisplay
from diffshard.plans.base import Executor, LogicalAxisRules, PlanData
from diffshard.sharding_search.argument_names import (
    argument_names,
    checked_arguments,
    function_name,
    positional_names,
    positions,
    signature_of,
)
from diffshard.sharding_search.mesh_candidates import LevelNames, MeshCandidate
from diffshard.sharding_search.number_formats import Formats, check_formats
from diffshard.sharding_search.step_objective import StepCost
from diffshard.solving.solve import DEFAULT_SOLVER, check_solver_options
from search_spaces.sharding.given import check_open_prefix, check_prefix

Remat = Literal["search", "offload"]
"""What the search may do with what goes from forward to backward: keep it or compute it again, or also offload it."""


_LEAVES_MESH_OPEN = (
    "`devices` leaves the mesh open: its axes are named by levels. Give a PartitionSpec of "
    f"{LevelNames.names[:3]}, or `mesh` instead of `devices`."
)
State = Literal["offload"]
"""What the search may do with the state between steps: also leave it in the host's memory."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of `search`, which explains them. They are checked here.

    `logical_axis_rules` hold for flax's logical names while `fn` is traced; without any those of the context hold.
    By `metadata_rules` arguments with flax's metadata are given; None leaves them free. `judged_by` says which compiler
    judges the plan, and how; "" for none. `checks_numbers` says whether the first call is held against another run.
    `candidates` are meshes to choose from, and `mesh` and `hardware` those of
    one of them until one is chosen. Without candidates the mesh is given. `names_levels` says whether given shardings
    name levels of hosts (`LevelNames`) in place of axes of the mesh, which may still be open.

    Raises:
      TypeError, ValueError: an argument breaks a rule; the error names it and its value.
    """

    fn: Callable[..., Any]
    mesh: Mesh | AbstractMesh
    hardware: Hardware
    memory_limit_bytes: float
    in_shardings: Any = None
    solver: str | Solver = DEFAULT_SOLVER
    time_limit_s: float | None = None
    key: jax.Array | int | None = None
    donate_argnums: tuple[int, ...] = ()
    static_argnums: tuple[int, ...] = ()
    donate_argnames: tuple[str, ...] = ()
    static_argnames: tuple[str, ...] = ()
    executor: Executor | None = None
    logical_axis_rules: LogicalAxisRules = ()
    metadata_rules: LogicalAxisRules | None = None
    start: PlanData | None = None
    progress: ProgressDisplay = "terminal"
    judged_by: str = ""
    checks_numbers: bool = False
    candidates: tuple[MeshCandidate, ...] = ()
    names_levels: bool = False
    remat: Remat | None = None
    state: State | None = None
    objective: StepCost | None = None
    formats: Formats | None = None

    def __post_init__(self):
        if not callable(self.fn):
            raise TypeError(f"`fn` must be a function, not {type(self.fn).__name__}.")
        _check_mesh(self.mesh)
        for name, size in self.mesh.shape.items():
            if size > 1:
                self.hardware.link(str(name))
        limit = checked_number("memory_limit_bytes", self.memory_limit_bytes, Limit, " or None")
        check_solver_options(self.solver, self.time_limit_s, self.key)
        if self.executor is not None and self.executor not in get_args(Executor):
            raise ValueError(f"`executor` must be one of {get_args(Executor)}, not {self.executor!r}.")
        _check_can_run(self.mesh, self.checks_numbers)
        check_remat(self.remat)
        if self.remat == "offload":
            _check_offload("remat", self.hardware, self.mesh, 'Give `remat="search"`, which only computes again.')
        _check_state(self.state, self.hardware, self.mesh)
        _check_objective(self.objective)
        check_formats(self.formats, self.hardware)
        _check_start(self.start)
        if self.progress not in get_args(ProgressDisplay):
            raise ValueError(
                f"`progress` must be one of {get_args(ProgressDisplay)}, not {self.progress!r}. Give a function to "
                "`plan(..., progress=...)` of what the search returns."
            )
        if self.names_levels:
            check_open_prefix(self.in_shardings, LevelNames.names, _LEAVES_MESH_OPEN)
        else:
            check_prefix(self.in_shardings, self.mesh)
        by_kind = {"donate": (self.donate_argnums, self.donate_argnames)}
        by_kind["static"] = self.static_argnums, self.static_argnames
        for kind, named in checked_arguments(self.fn, by_kind).items():
            object.__setattr__(self, f"{kind}_argnums", named.argnums)
            object.__setattr__(self, f"{kind}_argnames", named.argnames)
        object.__setattr__(self, "memory_limit_bytes", limit)

    def deadline(self) -> Deadline:
        """Returns the deadline of a search that begins now."""
        return Deadline.from_now(self.time_limit_s)

    @property
    def function_name(self) -> str:
        """The function's name in plans and messages."""
        return function_name(self.fn)

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Names of the mesh's axes."""
        return tuple(str(name) for name in self.mesh.axis_names)

    @property
    def given_names(self) -> tuple[str, ...]:
        """The names that given shardings may have: the mesh's axes, or levels of hosts."""
        return LevelNames.names if self.names_levels else self.axis_names

    @property
    def axis_sizes(self) -> tuple[int, ...]:
        """Devices along each axis."""
        return tuple(self.mesh.shape[name] for name in self.mesh.axis_names)

    def candidate_with(self, axes: Any) -> MeshCandidate:
        """Returns the candidate that has these axes in order, or else the mesh and hardware as they are."""
        return next((c for c in self.candidates if _is_of_axes(c, axes)), MeshCandidate(self.mesh, self.hardware))

    def on(self, candidate: MeshCandidate) -> "Options":
        """Returns the options with a chosen mesh."""
        return replace(self, mesh=candidate.mesh, hardware=candidate.hardware, candidates=())

    @cached_property
    def signature(self) -> inspect.Signature | None:
        """The function's signature; None for built-in functions, which have none."""
        return signature_of(self.fn)

    @cached_property
    def positional_names(self) -> list[str]:
        """Names of the arguments that have a position, in order."""
        return positional_names(self.signature)

    def is_static_name(self, name: str) -> bool:
        """Returns whether an argument that is given by keyword is static."""
        return name in self.static_argnames or self._has_position(name, self.static_argnums)

    def is_donated_name(self, name: str) -> bool:
        """Returns whether the memory of an argument that is given by keyword may be used for results."""
        return name in self.donate_argnames or self._has_position(name, self.donate_argnums)

    def _has_position(self, name: str, numbers: Sequence[int]) -> bool:
        return name in self.positional_names and self.positional_names.index(name) in numbers


def options_of(
    fn: Callable[..., Any],
    mesh: Mesh | AbstractMesh,
    hardware: Hardware | str | None,
    memory_limit_bytes: float | None,
    **options: Any,
) -> Options:
    """Returns the options that a user's arguments stand for.

    Args:
      hardware: as in `search`; None takes the preset of the mesh's devices.
      memory_limit_bytes: of each device; None takes the memory of the hardware.
      **options: further fields of `Options`. Arguments may be named as in `jax.jit`; None takes the default solver.

    Raises:
      TypeError, ValueError: an argument breaks a rule; the error names it and its value.
    """
    hardware = hardware_for(hardware, mesh)
    limit = hardware.memory_bytes if memory_limit_bytes is None else memory_limit_bytes
    return Options(fn=fn, mesh=mesh, hardware=hardware, memory_limit_bytes=limit, **in_one_form(options))


def in_one_form(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options with arguments named by tuples, and the default solver where None is given."""
    forms: dict[str, Callable[[Any], Any]] = {"solver": lambda solver: DEFAULT_SOLVER if solver is None else solver}
    for kind in ("donate", "static"):
        forms |= {f"{kind}_argnums": positions, f"{kind}_argnames": argument_names}
    return {name: forms[name](value) if name in forms else value for name, value in options.items()}


def hardware_for(hardware: Hardware | str | None, mesh: Mesh | AbstractMesh) -> Hardware:
    """Returns the hardware of a name, or of the mesh's devices if there is none.

    Raises:
      TypeError, ValueError: `hardware` or `mesh` is of another type, or there is no such preset.
    """
    _check_mesh(mesh)
    if hardware is None:
        return hardware_of(mesh)
    if isinstance(hardware, str):
        return preset_of_mesh(hardware, mesh)
    if not isinstance(hardware, Hardware):
        raise TypeError(f"`hardware` must be a Hardware, a preset's name or None, not {type(hardware).__name__}.")
    return hardware


def with_automatic_axes(mesh: Mesh | AbstractMesh) -> Any:
    """Returns the mesh with automatic axes.

    With explicit axes JAX wants shardings in the types of arrays, where a plan does not put them.
    """
    types = (AxisType.Auto,) * len(mesh.axis_names)
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices, mesh.axis_names, axis_types=types)
    return mesh.update(axis_types=types)  # keeps what it knows of the device


def has_explicit_axes(mesh: Mesh | AbstractMesh) -> bool:
    """Returns whether some axis of a mesh is explicit, so that shardings over it are part of an array's type."""
    return AxisType.Explicit in (mesh.axis_types or ())


def _check_can_run(mesh: Mesh | AbstractMesh, checks_numbers: bool) -> None:
    if checks_numbers and not isinstance(mesh, Mesh):
        raise ValueError(
            f'`check` "numbers" holds the first call against another run, and `mesh` {dict(mesh.shape)} is abstract, '
            "so that nothing runs. Give a jax.sharding.Mesh of devices."
        )


def _check_state(state: Any, hardware: Hardware, mesh: Mesh | AbstractMesh) -> None:
    if state is not None and state not in get_args(State):
        raise ValueError(f'`state` must be "offload" or None, not {state!r}.')
    if state == "offload":
        _check_offload("state", hardware, mesh, "Leave it out: the state is then on the devices.")


def _check_objective(objective: Any) -> None:
    if objective is not None and not callable(objective):
        raise TypeError(f"`objective` must be a function of a `RelaxedStep`, not {objective!r}.")


def _check_offload(option: str, hardware: Hardware, mesh: Mesh | AbstractMesh, advice: str) -> None:
    devices = mesh.devices.flat if isinstance(mesh, Mesh) else ()
    check_host_memory(f'`{option}` is "offload"', (hardware,), devices, advice)


def _check_start(start: Any) -> None:
    if start is not None and not isinstance(start, PlanData):
        raise TypeError(
            f"`start` must be a plan or None, not {type(start).__name__}; `Plan.load(path)` reads a saved one."
        )


def check_remat(remat: Any) -> None:
    """Raises `ValueError` unless `remat` is one of its values."""
    if remat is not None and remat not in get_args(Remat):
        raise ValueError(
            f'`remat` must be "search", "offload" or None, not {remat!r}. What is in `jax.checkpoint` stays so.'
        )


def _is_of_axes(candidate: MeshCandidate, axes: Any) -> bool:
    return isinstance(axes, Mapping) and tuple(axes.items()) == tuple(candidate.axes.items())


def _check_mesh(mesh: Any) -> None:
    checked_mesh(mesh)
    for axis, size in mesh.shape.items():
        if size < 1:
            raise ValueError(f"`mesh` must have a device or more along each axis; {axis!r} has {size}.")

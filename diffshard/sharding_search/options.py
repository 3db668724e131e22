"""What `search` was asked for, checked before anything is traced."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from cost.base import Hardware
from cost.presets import hardware_of, preset
from diffshard.base import Solver
from diffshard.plans.plan import automatic
from diffshard.solving.solve import resolve
from search_spaces.sharding.given_arguments import check_prefix


@dataclass(frozen=True)
class Options:
    """The arguments of `search`, checked and completed; see there."""

    fn: Callable[..., Any]
    mesh: Mesh | AbstractMesh
    hardware: Hardware
    memory_limit_bytes: float
    in_shardings: Any
    solver: str | Solver
    time_limit_s: float | None
    key: jax.Array | int | None
    donate_argnums: tuple[int, ...]
    static_argnums: tuple[int, ...]

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Names of the mesh's axes."""
        return tuple(str(name) for name in self.mesh.axis_names)

    @property
    def axis_sizes(self) -> tuple[int, ...]:
        """Devices along each axis."""
        return tuple(self.mesh.shape[name] for name in self.mesh.axis_names)

    def dynamic(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments that are not static."""
        return tuple(a for i, a in enumerate(args) if i not in self.static_argnums)

    def static(self, args: Sequence[Any]) -> list[Any]:
        """The arguments that are."""
        return [args[i] for i in self.static_argnums if i < len(args)]


def checked_options(
    fn: Callable[..., Any],
    mesh: Mesh | AbstractMesh,
    hardware: Hardware | str | None,
    memory_limit_bytes: float | None,
    in_shardings: Any,
    solver: str | Solver | None,
    time_limit_s: float | None,
    key: jax.Array | int | None,
    donate_argnums: int | Sequence[int],
    static_argnums: int | Sequence[int],
) -> Options:
    """The options of `search`.

    Raises:
      TypeError, ValueError: one breaks a rule; it is named, with the value.
    """
    if not callable(fn):
        raise TypeError(f"`fn` must be a function of positional arguments, not {fn!r}.")
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f"`mesh` must be a jax.sharding.Mesh or AbstractMesh, not {type(mesh).__name__}.")
    found = _hardware(hardware, mesh)
    for name, size in mesh.shape.items():
        if size > 1:
            found.link(str(name))
    limit = found.memory_bytes if memory_limit_bytes is None else memory_limit_bytes
    if isinstance(limit, bool) or not isinstance(limit, Real) or not limit > 0:
        raise ValueError(f"`memory_limit_bytes` must be a positive number or None, not {memory_limit_bytes!r}.")
    if time_limit_s is not None and not time_limit_s > 0:
        raise ValueError(f"`time_limit_s` must be a positive number of seconds or None, not {time_limit_s!r}.")
    if not (solver is None or isinstance(solver, str) or callable(solver)):
        raise TypeError(f"`solver` must be a name or a function, not {solver!r}.")
    resolve("gradient" if solver is None else solver)
    check_prefix(in_shardings, mesh)
    donated, static = _argnums("donate_argnums", donate_argnums), _argnums("static_argnums", static_argnums)
    if set(donated) & set(static):
        raise ValueError(f"`donate_argnums` {donated} and `static_argnums` {static} share a position.")
    return Options(
        fn=fn,
        mesh=automatic(mesh),
        hardware=found,
        memory_limit_bytes=float(limit),
        in_shardings=in_shardings,
        solver="gradient" if solver is None else solver,
        time_limit_s=time_limit_s,
        key=key,
        donate_argnums=donated,
        static_argnums=static,
    )


def _hardware(hardware: Hardware | str | None, mesh: Mesh | AbstractMesh) -> Hardware:
    if hardware is None:
        return hardware_of(mesh)
    if isinstance(hardware, str):
        return preset(hardware, dict(mesh.shape))
    if not isinstance(hardware, Hardware):
        raise TypeError(f"`hardware` must be a Hardware, a preset's name or None, not {type(hardware).__name__}.")
    return hardware


def _argnums(name: str, value: int | Sequence[int]) -> tuple[int, ...]:
    numbers = (value,) if isinstance(value, int) else tuple(value)
    for number in numbers:
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise ValueError(f"`{name}` must be positions of arguments, 0 or more, not {value!r}.")
    return numbers

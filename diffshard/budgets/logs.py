"""`phases_of_log` makes the phases of a budget from a log of how many devices a job had.

Times that are too short to be used are given away from the most devices down. A short peak becomes a part of the time
beside it, so that by the turn of a short dip all times with more devices are long enough, and the job waits in it.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from cost.base import Hardware
from cost.real_numbers import FiniteNumber, Index, checked_number
from diffshard.base import checked_mesh
from diffshard.budgets.base import Phase

_PAUSE = 0  # the rank of times without devices; those of meshes begin at 1


class _Span(NamedTuple):
    """A time with the same devices, from `start_s` to `end_s`; a higher rank never has fewer devices."""

    start_s: float
    end_s: float
    rank: int


def phases_of_log(
    times_s: Sequence[float] | np.ndarray,
    num_devices: Sequence[int] | np.ndarray,
    mesh_of: Callable[[int], Mesh | AbstractMesh | None],
    *,
    end_s: float,
    min_duration_s: float = 0.0,
    hardware: Hardware | str | None = None,
    memory_limit_bytes: float | None = None,
) -> tuple[Phase, ...]:
    """Returns the phases, with durations, of a log of how many devices a job had. `budget` plans them.

    >>> phases = diffshard.elastic.phases_of_log([0, 3600, 5400], [8, 4, 8], mesh_of, end_s=9000, min_duration_s=60)

    Neighbours with equal meshes are one phase. Times without devices are pauses: they are no phase, the state stays
    as it is, and what comes before and after them stays two phases. At no time does a phase have more devices than
    the log. Together the phases last as long as the log, without its pauses.

    Of times shorter than `min_duration_s`, those with the most devices come first. Each takes the mesh of the
    neighbour with fewer devices; if both have fewer, of the one with more of them. A pause, and what is before and
    after the log, has none. A time between two neighbours with more devices becomes a pause: the job waits.

    Args:
      times_s: when the number of devices changes, in ascending order, `[N]`; the log begins at the first.
      num_devices: from each of these times until the next, `[N]`; 0 where the job has none.
      mesh_of: `mesh_of(number)` returns a mesh of at most this many devices, or None if the job pauses with so few.
        It is called once for each different number above 0.
      end_s: when the log ends.
      min_duration_s: seconds below which a time cannot be used, such as those of a start and a few steps.
      hardware: of all phases, as in `search`.
      memory_limit_bytes: of all phases, as in `search`.

    Raises:
      TypeError, ValueError: an argument breaks its rule, a mesh has more devices than there are, or no phase is left.
    """
    times, numbers = _checked(times_s, num_devices, end_s, min_duration_s)
    mesh_of_number = {number: _checked_mesh(mesh_of(number), number) for number in sorted(set(numbers) - {0})}
    meshes = dict.fromkeys(mesh for mesh in mesh_of_number.values() if mesh is not None)
    meshes = sorted(meshes, key=lambda mesh: mesh.size)
    rank_of = {mesh: rank for rank, mesh in enumerate(meshes, 1)}
    ranks = [_PAUSE if (mesh := mesh_of_number.get(number)) is None else rank_of[mesh] for number in numbers]
    spans = _merged([_Span(*span) for span in zip(times, times[1:], ranks, strict=False)])
    for rank in range(len(meshes), _PAUSE, -1):
        spans = _merged(_without_short_ones(spans, rank, min_duration_s))
    phases = tuple(
        Phase(
            mesh=meshes[span.rank - 1],
            duration_s=span.end_s - span.start_s,
            hardware=hardware,
            memory_limit_bytes=memory_limit_bytes,
        )
        for span in spans
        if span.rank != _PAUSE
    )
    if not phases:
        raise ValueError(
            f"The log leaves no phase: at no time does the job have devices that `mesh_of` uses for {min_duration_s!r} "
            "seconds or longer. Give a smaller `min_duration_s` or a longer log."
        )
    return phases


def _merged(spans: Sequence[_Span]) -> list[_Span]:
    """Returns the spans with neighbours of the same rank as one."""
    merged: list[_Span] = []
    for span in spans:
        if merged and merged[-1].rank == span.rank:
            merged[-1] = merged[-1]._replace(end_s=span.end_s)
        else:
            merged.append(span)
    return merged


def _without_short_ones(spans: Sequence[_Span], rank: int, min_duration_s: float) -> list[_Span]:
    """Returns the spans, those of one rank that are too short with the rank of a neighbour, or as pauses."""
    ranks = [_PAUSE, *(span.rank for span in spans), _PAUSE]
    changed = list(spans)
    for i, span in enumerate(spans):
        if span.rank == rank and span.end_s - span.start_s < min_duration_s:
            lower = [neighbour for neighbour in (ranks[i], ranks[i + 2]) if neighbour < rank]
            changed[i] = span._replace(rank=max(lower, default=_PAUSE))
    return changed


def _checked(
    times_s: Sequence[float] | np.ndarray, num_devices: Sequence[int] | np.ndarray, end_s: float, min_duration_s: float
) -> tuple[list[float], list[int]]:
    """Returns the times with the end of the log, and the numbers of devices."""
    if len(times_s) == 0:
        raise ValueError("`times_s` is empty; give at least the time at which the log begins.")
    if len(times_s) != len(num_devices):
        raise ValueError(
            f"`num_devices` must have one number for each of the {len(times_s)} times, not {len(num_devices)}."
        )
    times = [_finite(f"times_s[{i}]", time) for i, time in enumerate(times_s)]
    for i in range(1, len(times)):
        if times[i] <= times[i - 1]:
            raise ValueError(
                f"`times_s` must be in ascending order, but times_s[{i}] = {times_s[i]!r} comes after "
                f"{times_s[i - 1]!r}. Sort the log, and keep the last of several entries for one time."
            )
    end = _finite("end_s", end_s)
    if end <= times[-1]:
        raise ValueError(
            f"`end_s` must be later than the last of `times_s`, {times_s[-1]!r}, not {end_s!r}. Leave out what comes "
            "after the end."
        )
    if _finite("min_duration_s", min_duration_s) < 0:
        raise ValueError(f"`min_duration_s` must be 0 or more, not {min_duration_s!r}.")
    return [*times, end], [checked_number(f"num_devices[{i}]", n, Index) for i, n in enumerate(num_devices)]


def _finite(name: str, value: float) -> float:
    return checked_number(name, value, FiniteNumber, " of seconds")


def _checked_mesh(mesh: Mesh | AbstractMesh | None, number: int) -> Mesh | AbstractMesh | None:
    if mesh is None:
        return None
    checked_mesh(mesh, name=f"mesh_of({number})")
    if mesh.size > number:
        raise ValueError(
            f"`mesh_of({number})` must have at most {number} devices, but has {mesh.size}: {dict(mesh.shape)}. Return "
            "a smaller mesh, or None if the job cannot use so few devices."
        )
    return mesh

"""`shard_tables` finds which device holds which part of each embedding table.

Letters for sizes: T tables, D devices.
"""

import dataclasses
import hashlib
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Unpack

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from cost.base import Hardware
from cost.real_numbers import Amount, Count, Index, Limit, checked_number
from diffshard.base import InfeasibleError, PlanError, Solution
from diffshard.host_memory import check_host_memory
from diffshard.plans.plan_record import History
from diffshard.plans.printing import format_bytes
from diffshard.processes import errors_for_all, processes_of
from diffshard.sharding_search.options import hardware_for
from diffshard.solving.solve import SolveOptions, checked_solve_options
from diffshard.tables import learned_annealing
from diffshard.tables.hot_rows import TableStatistics, needed_orders
from diffshard.tables.layout import check_counts, layout_of
from diffshard.tables.learned_cost import LearnedTableCost
from diffshard.tables.plan import TablePlan
from diffshard.tables.solving import solve_space
from search_spaces.embedding_tables.base import EmbeddingTable, TableDevices
from search_spaces.embedding_tables.optimizers import ROWWISE_ADAGRAD
from search_spaces.embedding_tables.prices import piece_bytes
from search_spaces.embedding_tables.space import EmbeddingTableSpace
from search_spaces.embedding_tables.strategies import least_piece

_AXIS = "tables"  # of the mesh that is made of a list of devices
_WHAT = "place embedding tables"  # in errors of several processes


class _Placed(NamedTuple):
    """The result of a search: strategies `[T]`, with the certificate of the plan."""

    choice: tuple[Index, ...]
    lower_bound_s: Amount
    status: str
    history: History


def shard_tables(
    tables: Sequence[EmbeddingTable],
    mesh_or_devices: Mesh | AbstractMesh | Sequence[Any],
    *,
    hardware: Hardware | str | Sequence[Hardware] | None = None,
    memory_limit_bytes: float | Sequence[float] | None = None,
    host_memory_limit_bytes: float | Sequence[float] | None = None,
    access: Mapping[str, Sequence[float]] | None = None,
    statistics: Mapping[str, TableStatistics] | None = None,
    batch_size: int = 65536,
    cost: LearnedTableCost | None = None,
    **options: Unpack[SolveOptions],
) -> TablePlan:
    """Finds which device holds which part of each embedding table, so that a step's lookups take the least time.

    A table is whole on one device, split by columns or by rows, or small enough for a copy on each device. Where the
    mesh's first axes lead from host to host, each host may have a copy, divided among its devices. Of large
    tables with `access`, hot rows may be copied to each device. With `host_memory_limit_bytes` rows may be in pinned
    memory of the hosts, hot ones on the devices. The predicted time is that of the slowest devices, and the plan has a
    lower bound on it.

    >>> tables = [EmbeddingTable("users", 10**7, 64, pooling_factor=1), EmbeddingTable("items", 10**6, 128, 20)]
    >>> plan = shard_tables(tables, mesh, hardware="h100")

    Under `jax.distributed` all processes of the mesh call this alike, and the first one searches for all.

    Args:
      tables: T tables with different names.
      mesh_or_devices: the D devices; tables and batch are spread over all axes of a mesh.
      hardware: as in `search`; or D of them, in row-major order of the mesh, where devices differ.
      memory_limit_bytes: for the tables on a device and their optimiser's state: one number, or D of them, of which the
        smallest counts, as arrays are equally long on all devices. None takes the memory of the hardware.
      host_memory_limit_bytes: for rows in memory of the host, for each device: one number, or D of them. None keeps
        all rows on the devices. It needs `Hardware.host_memory_bytes_per_s`, and devices with pinned memory.
      access: by table, counts of lookups in parts of equally many rows; instead of `EmbeddingTable.access`.
      statistics: by table, what `TableStatistics.measure` counted in a sample of ids; instead of `access` and of
        `EmbeddingTable.pooling_factor`. Where the plan treats hot rows apart, it numbers these tables' rows anew, the
        hot ones first; lookups, updates, `shard` and `unshard` take and give rows by their ids.
      batch_size: examples in a step, of all devices together.
      cost: what `learn_table_cost` measured on devices of this kind; it predicts in place of bytes and bandwidths, by a
        search of its own and without a bound. Devices must be alike.
      **options: of the solver; without one many placements are annealed side by side, with a bound of its own.

    Raises:
      InfeasibleError: the tables do not fit the memory, in arrays as long on each device as on the fullest one; says
        by how many bytes.
      ProcessesError: the processes have different arguments, or one of them has failed.
      TypeError, ValueError: an argument breaks its rule; the error names it and its value.
    """
    start_s = time.perf_counter()
    with errors_for_all(mesh_or_devices, _WHAT):
        tables = _checked_tables(tables, access or {}, statistics or {})
        options = checked_solve_options(options, shard_tables)
        mesh = _checked_mesh(mesh_or_devices)
        devices = _devices(mesh, hardware, memory_limit_bytes, host_memory_limit_bytes, batch_size)
        if cost is not None:  # networks know one link
            slowest = max(devices.s_per_byte, devices.far_s_per_byte)
            devices = dataclasses.replace(devices, s_per_byte=slowest, num_hosts=1, far_s_per_byte=0.0)
        space = EmbeddingTableSpace(tables, devices)
        _check_cost(cost, tables, devices, options)
        _check_memory(space)
        processes = processes_of(mesh)
        processes.check_alike(_WHAT, _facts(space, mesh, statistics or {}))
        placed = processes.shared(_WHAT, lambda: _placed(space, cost, options), kind=_Placed)
        pieces = space.decode(placed.choice).pieces
        try:
            check_counts(layout_of(tables, pieces, devices))
        except PlanError as error:
            raise InfeasibleError(str(error)) from error
    return TablePlan(
        tables=tables,
        devices=devices,
        pieces=pieces,
        mesh_axes=tuple((str(name), int(size)) for name, size in mesh.shape.items()),
        lower_bound_s=placed.lower_bound_s,
        status=placed.status,
        search_s=time.perf_counter() - start_s,
        learned=None if cost is None else cost.prediction(tables, pieces, devices),
        history=placed.history,
        orders=needed_orders(tables, {name: own.hottest for name, own in (statistics or {}).items()}, pieces),
        mesh=mesh,
    )


def _facts(
    space: EmbeddingTableSpace, mesh: Mesh | AbstractMesh, statistics: Mapping[str, TableStatistics]
) -> dict[str, str]:
    """Returns texts by name about what a plan depends on, which are the same in all processes."""
    hottest = {
        name: hashlib.sha256(np.concatenate([own.hottest, own.counts]).tobytes()).hexdigest()[:16]
        for name, own in sorted(statistics.items())
    }
    return {
        "`statistics`": repr({name: (repr(statistics[name]), digest) for name, digest in hottest.items()}),
        "`tables`": repr(space.tables),
        "`mesh`": repr(tuple(mesh.shape.items())),
        "the devices": repr(space.devices),
    }


def _placed(space: EmbeddingTableSpace, cost: LearnedTableCost | None, options: SolveOptions) -> _Placed:
    """Searches a space.

    Raises:
      InfeasibleError: no placement was found that fits.
    """
    if cost is not None:
        own: Any = {name: value for name, value in options.items() if name != "solver"}
        choice = learned_annealing.solve(space, cost, **own)
        if choice is not None:
            return _Placed(tuple(map(int, choice)), 0.0, "finished", ())
    found = solve_space(space, **options)
    _check_feasible(space, found)
    bound_s = max(float(found.lower_bound), 0.0) if cost is None else 0.0
    return _Placed(tuple(map(int, found.choice)), bound_s, found.status, found.history)


def _check_feasible(space: EmbeddingTableSpace, solution: Solution) -> None:
    if not solution.feasible:
        proven = "No placement fits" if solution.status == "infeasible" else "No placement was found that fits"
        raise InfeasibleError(
            f"{proven} the memory: the arrays of the closest one are {math.ceil(solution.excess)} bytes longer than "
            f"{_limit_names(space)}{_smallest_counts(space)}. An array is as long on each device as on the fullest "
            "one. Give more memory or devices, fewer rows, or tables of fewer dtypes."
        )


def _check_cost(cost: Any, tables: tuple[EmbeddingTable, ...], devices: TableDevices, options: SolveOptions) -> None:
    """Raises where a learned cost cannot be used."""
    if cost is None:
        return
    if not isinstance(cost, LearnedTableCost):
        raise TypeError(f"`cost` must be a LearnedTableCost, as `learn_table_cost` makes, or None, not {cost!r}.")
    if len(set(devices.hardware)) > 1:
        raise ValueError("`cost` was learned on devices of one kind, but `hardware` has several. Leave `cost` out.")
    for table in tables:
        if table.optimizer != ROWWISE_ADAGRAD:
            raise ValueError(
                f"`cost` was learned with {ROWWISE_ADAGRAD!r}, but table {table.name!r} has the optimizer "
                f"{table.optimizer!r}. Leave `cost` out."
            )
    if (solver := options.get("solver")) is not None:
        raise ValueError(f"`cost` has a search of its own; leave out `solver`, which is {solver!r}, or `cost`.")


def _checked_tables(
    tables: Any, access: Mapping[str, Any], statistics: Mapping[str, TableStatistics]
) -> tuple[EmbeddingTable, ...]:
    """Returns tables whose lookups are as they were counted or measured."""
    if isinstance(tables, EmbeddingTable | str) or not isinstance(tables, Iterable):
        raise TypeError(f"`tables` must be a list of EmbeddingTable, not {tables!r}; put a single one into a list.")
    tables = tuple(tables)
    for table in tables:
        if not isinstance(table, EmbeddingTable):
            raise TypeError(f"`tables` must hold EmbeddingTable(name, rows, dimension, ...), not {table!r}.")
    rows = {table.name: table.rows for table in tables}
    for argument, given, values in (("access", access, "counts"), ("statistics", statistics, "TableStatistics")):
        if not isinstance(given, Mapping):
            raise TypeError(f"`{argument}` must be {values} by the names of tables, not {given!r}.")
        if unknown := [name for name in given if name not in rows]:
            raise ValueError(f"`{argument}` has {unknown[0]!r}, which is no table; there are {', '.join(rows)}.")
    measured: dict[str, dict[str, Any]] = {name: {"access": counts} for name, counts in access.items()}
    for name, own in statistics.items():
        if not isinstance(own, TableStatistics):
            raise TypeError(f"`statistics[{name!r}]` must be made by `TableStatistics.measure`, not {own!r}.")
        if name in access:
            raise ValueError(f"`access` and `statistics` both have {name!r}; give one of them.")
        if (largest := own.hottest.max()) >= rows[name]:
            raise ValueError(f"`statistics[{name!r}]` has the id {largest}; rows are 0 to {rows[name] - 1}.")
        measured[name] = {"pooling_factor": own.pooling_factor, "access": own.access(rows[name])}
    return tuple(
        dataclasses.replace(table, **measured[table.name]) if table.name in measured else table for table in tables
    )


def _checked_mesh(mesh_or_devices: Any) -> Mesh | AbstractMesh:
    if isinstance(mesh_or_devices, Mesh | AbstractMesh):
        if not mesh_or_devices.shape or 0 in mesh_or_devices.shape.values():
            sizes = dict(mesh_or_devices.shape)
            raise ValueError(f"`mesh_or_devices` must be a mesh with an axis and devices on each axis, not {sizes}.")
        return mesh_or_devices
    devices = list(mesh_or_devices) if isinstance(mesh_or_devices, Sequence) else []
    if not devices or not all(isinstance(device, jax.Device) for device in devices):
        raise TypeError(
            f"`mesh_or_devices` must be a Mesh, an AbstractMesh or a list of JAX devices, not {mesh_or_devices!r}."
        )
    repeated = [device for device in dict.fromkeys(devices) if devices.count(device) > 1]
    if repeated:
        raise ValueError(f"`mesh_or_devices` must have different devices, but {repeated[0]} is there twice.")
    return Mesh(np.array(devices), (_AXIS,), axis_types=(AxisType.Auto,))


def _devices(
    mesh: Mesh | AbstractMesh, hardware: Any, memory_limit_bytes: Any, host_limit_bytes: Any, batch_size: int
) -> TableDevices:
    number = checked_number("batch_size", batch_size, Count)
    if hardware is None or isinstance(hardware, str | Hardware):
        all_hardware = (hardware_for(hardware, mesh),) * mesh.size
    else:
        all_hardware = tuple(hardware)
        for one in all_hardware:
            if not isinstance(one, Hardware):
                raise TypeError(f"`hardware` must be one Hardware, a name, or a list of Hardware, not of {one!r}.")
    if len(all_hardware) != mesh.size:
        raise ValueError(f"`hardware` has {len(all_hardware)} entries for {mesh.size} devices.")
    limits = [one.memory_bytes for one in all_hardware]
    if memory_limit_bytes is not None:
        limits = _limits("memory_limit_bytes", memory_limit_bytes, mesh.size)
    host_limits = _limits("host_memory_limit_bytes", host_limit_bytes, mesh.size)
    if host_limits:
        devices = mesh.devices.flat if isinstance(mesh, Mesh) else ()
        advice = "Leave it out, so that all rows are in memory of the devices."
        check_host_memory("`host_memory_limit_bytes` is given", all_hardware, devices, advice)
    return devices_of_mesh(mesh, all_hardware, tuple(map(float, limits)), number, tuple(host_limits))


def _limits(argument: str, given: Any, num_devices: int) -> list[float]:
    """Returns limits for each device; none where none is given."""
    if given is None:
        return []
    limits = list(given) if np.ndim(given) else [given] * num_devices
    if len(limits) != num_devices:
        raise ValueError(f"`{argument}` has {len(limits)} numbers for {num_devices} devices.")
    return [checked_number(argument, limit, Limit) for limit in limits]


def devices_of_mesh(
    mesh: Mesh | AbstractMesh,
    hardware: tuple[Hardware, ...],
    memory_limit_bytes: tuple[float, ...],
    batch_size: int,
    host_limit_bytes: tuple[float, ...] = (),
) -> TableDevices:
    """Returns the devices of a mesh, with the links of an all-to-all.

    Where the first axes lead from host to host, and all others stay in one, links inside and across are apart; each is
    that of its slowest axis. Otherwise the slowest axis prices all exchanges.

    Args:
      mesh: D devices.
      hardware, memory_limit_bytes, host_limit_bytes: `[D]`, as those of `TableDevices`.
    """
    sizes = {str(axis): int(size) for axis, size in mesh.shape.items() if size > 1}
    kinds = set(hardware)
    hosts = {axis: max(one.link(axis).num_hosts for one in kinds) for axis in sizes}
    s_per_byte = {
        axis: max(min(line.s_per_byte for line in one.link(axis).lines("all_to_all")) for one in kinds)
        for axis in sizes
    }
    across = [axis for axis in sizes if hosts[axis] == sizes[axis]]
    inside = [axis for axis in sizes if hosts[axis] == 1]
    slowest = max(s_per_byte.values(), default=0.0)
    devices = TableDevices(hardware, memory_limit_bytes, slowest, batch_size, host_limit_bytes)
    if not inside or not across or [*across, *inside] != list(sizes):
        return devices
    return dataclasses.replace(
        devices,
        s_per_byte=max(s_per_byte[axis] for axis in inside),
        num_hosts=math.prod(sizes[axis] for axis in across),
        far_s_per_byte=max(s_per_byte[axis] for axis in across),
    )


def _check_memory(space: EmbeddingTableSpace) -> None:
    """Raises `InfeasibleError` where a table's smallest pieces fit no device, or all tables not all devices."""
    devices, limits = space.devices, space.arrays.limit_bytes
    for table in space.tables if not devices.host_limit_bytes else ():
        least = piece_bytes(table, *least_piece(table, devices.num_devices))
        if least > limits[0]:
            raise InfeasibleError(
                f"Table {table.name!r} does not fit: its smallest piece has {format_bytes(least)}, "
                f"{math.ceil(least - limits[0])} bytes more than `memory_limit_bytes`, {format_bytes(limits[0])}"
                f"{_smallest_counts(space)}. Give more devices, so that it can be split further, more memory, or "
                "`host_memory_limit_bytes`."
            )
    needed = sum(piece_bytes(table, table.rows, table.dimension) for table in space.tables)
    room = float(limits.sum()) * devices.num_devices
    if needed > room:
        raise InfeasibleError(
            f"`tables` need at least {format_bytes(needed)}, {math.ceil(needed - room)} bytes more than "
            f"{_limit_names(space)} of all {devices.num_devices} devices together, {format_bytes(room)}"
            f"{_smallest_counts(space)}."
        )


def _limit_names(space: EmbeddingTableSpace) -> str:
    return "`memory_limit_bytes`" + (" and `host_memory_limit_bytes`" if space.devices.host_limit_bytes else "")


def _smallest_counts(space: EmbeddingTableSpace) -> str:
    """Returns a remark for limits that differ."""
    limits = (space.devices.memory_limit_bytes, space.devices.host_limit_bytes)
    if all(len(set(own)) <= 1 for own in limits):
        return ""
    return " (the smallest limit counts for all devices, as their arrays are equally long)"

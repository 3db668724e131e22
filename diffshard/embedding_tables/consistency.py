"""Checks of what a plan of embedding tables from a file means: pieces of its own tables, a bound below the step."""

import math
from typing import Protocol

from diffshard.embedding_tables.learned_cost import LearnedPrediction
from search_spaces.embedding_tables.base import EVERY_DEVICE, HOST, MEMORIES, EmbeddingTable, Piece, TableDevices

_STATUSES = ("optimal", "finished", "time limit", "interrupted")
_TOLERANCE = 1e-6  # relative: sums of the same numbers in another order


class TablePlanData(Protocol):
    """What `check_table_plan` looks at of a plan."""

    @property
    def tables(self) -> tuple[EmbeddingTable, ...]: ...  # noqa: D102
    @property
    def devices(self) -> TableDevices: ...  # noqa: D102
    @property
    def pieces(self) -> tuple[Piece, ...]: ...  # noqa: D102
    @property
    def mesh_axes(self) -> tuple[tuple[str, int], ...]: ...  # noqa: D102
    @property
    def lower_bound_s(self) -> float: ...  # noqa: D102
    @property
    def step_s(self) -> float: ...  # noqa: D102
    @property
    def status(self) -> str: ...  # noqa: D102
    @property
    def learned(self) -> LearnedPrediction | None: ...  # noqa: D102


def check_table_plan(plan: TablePlanData) -> None:
    """Checks that the fields of a plan fit each other; that they have the right types is known.

    Raises:
      ValueError: they do not; the error names the field or the table.
    """
    names = [table.name for table in plan.tables]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"`tables` must be one or more with different names, not {names}")
    _check_devices(plan)
    _check_pieces(plan)
    if plan.status not in _STATUSES:
        raise ValueError(f"`status` is {plan.status!r}, not one of {_STATUSES}")
    if not plan.lower_bound_s <= plan.step_s * (1 + _TOLERANCE):
        raise ValueError(f"`lower_bound_s` is {plan.lower_bound_s!r}, more than the {plan.step_s!r} s of the step")


def _check_devices(plan: TablePlanData) -> None:
    devices = plan.devices
    num_devices = devices.num_devices
    axes = [axis for axis, _ in plan.mesh_axes]
    if math.prod(size for _, size in plan.mesh_axes) != num_devices or len(set(axes)) < len(axes):
        raise ValueError(f"`mesh_axes` are {plan.mesh_axes}, not of {num_devices} devices")
    lists: dict[str, tuple[object, ...]] = {"devices.memory_limit_bytes": devices.memory_limit_bytes}
    if devices.host_limit_bytes:
        lists["devices.host_limit_bytes"] = devices.host_limit_bytes
        if any(hardware.host_memory_bytes_per_s is None for hardware in devices.hardware):
            raise ValueError("`devices.host_limit_bytes` is given, but `hardware` does not say how fast its host is")
    if plan.learned is not None:
        lists |= {"learned.forward_s": plan.learned.forward_s, "learned.rest_s": plan.learned.rest_s}
    for name, numbers in lists.items():
        if len(numbers) != num_devices:
            raise ValueError(f"`{name}` has {len(numbers)} numbers for {num_devices} devices")


def _check_pieces(plan: TablePlanData) -> None:
    """Checks that pieces cover each number of each table once, on devices that there are."""
    num_devices = plan.devices.num_devices
    for index, table in enumerate(plan.tables):
        own = [piece for piece in plan.pieces if piece.table == index]
        for p in own:
            fits = 0 <= p.row_start < p.row_end <= table.rows and 0 <= p.column_start < p.column_end <= table.dimension
            is_copy = p.device == EVERY_DEVICE
            if is_copy and (p.columns < table.dimension or p.memory == HOST or sum(q.device < 0 for q in own) > 1):
                raise ValueError(f"table {table.name!r} has the piece {p}; of a table some whole rows may be copied")
            on_host = p.memory == HOST and not plan.devices.host_limit_bytes
            if not fits or not EVERY_DEVICE <= p.device < num_devices or p.memory not in MEMORIES or on_host:
                raise ValueError(f"table {table.name!r} has the piece {p}, which does not fit it or the devices")
        covered = sum(p.rows * p.columns for p in own)
        if covered != table.rows * table.dimension or any(_overlap(a, b) for i, a in enumerate(own) for b in own[:i]):
            raise ValueError(f"the pieces of table {table.name!r} do not cover each of its numbers once")
        parts = {(p.row_start, p.row_end) for p in own if p.columns < table.dimension}
        if any(a[0] < b[1] and b[0] < a[1] for a in parts for b in parts if a != b):  # updates add up their squares
            raise ValueError(f"pieces of columns of table {table.name!r} have different rows in common")
    if any(not 0 <= p.table < len(plan.tables) for p in plan.pieces):
        raise ValueError("a piece belongs to no table")


def _overlap(a: Piece, b: Piece) -> bool:
    return (
        a.row_start < b.row_end
        and b.row_start < a.row_end
        and a.column_start < b.column_end
        and b.column_start < a.column_end
    )

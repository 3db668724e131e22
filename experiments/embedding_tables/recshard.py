"""Hot rows in fast memory: counted in a sample and numbered anew, beside whole tables in tiers and RecShard's program.

    python -m experiments.embedding_tables.recshard [--tasks 3] [--devices 4]

Rows are looked up by Zipf's law, and hot ones are anywhere in their table. All devices together have room for a half, a
quarter and a tenth of the bytes of all tables; hosts have room for all. Each way sees a sample of ids, and none knows
the law. By the law are, of each plan, the share of accesses from fast memory and the predicted seconds.

RecShard's mixed integer program puts each table on one device and cuts it in two: the hot rows in the device's memory,
the others on its host. Here it minimises our step, the longest lookups plus the longest rest, and HiGHS solves it.

Source: Sethi et al., "RecShard" (ASPLOS 2022), sections 4.2 and 5; curves of 100 steps.
"""

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import AbstractMesh
from scipy.optimize import Bounds, LinearConstraint, milp

from diffshard.tables.hot_rows import RowOrder, TableStatistics, needed_orders
from diffshard.tables.search import shard_tables
from diffshard.tables.solving import solve_space
from experiments.tables import print_table
from search_spaces.embedding_tables.base import DEVICE, HOST, EmbeddingTable, Piece, TableDevices
from search_spaces.embedding_tables.prices import decoded, piece_bytes, prices_of
from search_spaces.embedding_tables.space import EmbeddingTableSpace
from search_spaces.embedding_tables.strategies import TableStrategies

WHOLE, PROGRAM, OWN_ORDER, BY_COUNTS = (
    "whole tables in tiers", "RecShard's program", "diffshard, rows as they are", "diffshard, rows by counts",
)  # fmt: skip
_SHARES = (0.5, 0.25, 0.1)
_STEPS, _TIME_LIMIT_S = 100, 60.0
_EXAMPLES, _BATCH_SIZE = 5000, 65536
_PARTS = 8192  # for which the law's accesses are counted


class Task(NamedTuple):
    """Tables with their laws.

    Attributes:
      tables: T of them; pooling factors are true.
      laws: the share of lookups that goes to each row, by its id: T arrays `[rows]`.
      statistics: what a sample of ids tells, by table.
    """

    tables: tuple[EmbeddingTable, ...]
    laws: tuple[np.ndarray, ...]
    statistics: dict[str, TableStatistics]


class Outcome(NamedTuple):
    """The outcome of a way on one task with one memory.

    Attributes:
      fast_share: of accesses by the law.
      step_s: by the law.
      processor_s: that the way took.
      gap: of the mixed integer program, as HiGHS says; 0 for others.
    """

    fast_share: float
    step_s: float
    processor_s: float
    gap: float = 0.0


def generated(seed: int, num_tables: int = 10, most_rows: int = 10**6) -> Task:
    """Returns tables of 32 to 128 columns, looked up by Zipf's law with exponents of 0.8 to 1.4, in a random order."""
    rng = np.random.default_rng(seed)
    tables, laws, statistics = [], [], {}
    for index in range(num_tables):
        rows = int(10 ** rng.uniform(4, np.log10(most_rows)))
        law = np.arange(1, rows + 1) ** -rng.uniform(0.8, 1.4)
        law = rng.permutation(law / law.sum())
        pooling = int(np.clip(rng.lognormal(1.0, 1.0), 1, 40))
        table = EmbeddingTable(f"t{index}", rows, int(2 ** rng.integers(5, 8)), pooling)
        statistics[table.name] = TableStatistics.measure(rng.choice(rows, (_EXAMPLES, pooling), p=law))
        tables.append(table)
        laws.append(law)
    return Task(tuple(tables), tuple(laws), statistics)


def judged(
    task: Task, pieces: Sequence[Piece], orders: Sequence[RowOrder], devices: TableDevices
) -> tuple[float, float]:
    """Returns the share of accesses from fast memory and the seconds of a step, both by the law."""
    ids = {order.table: order.ids_of(task.tables[order.table].rows) for order in orders}
    tables, fast, total = [], 0.0, 0.0
    for index, (table, law) in enumerate(zip(task.tables, task.laws, strict=True)):
        cumulative = np.concatenate([[0.0], np.cumsum(law[ids[index]] if index in ids else law)])
        cuts = np.linspace(0, table.rows, min(_PARTS, table.rows) + 1)
        access = np.diff(np.interp(cuts, np.arange(table.rows + 1), cumulative))
        tables.append(dataclasses.replace(table, access=tuple(access.tolist())))
        total += table.pooling_factor
        fast += table.pooling_factor * sum(
            (cumulative[p.row_end] - cumulative[p.row_start]) * p.columns / table.dimension
            for p in pieces
            if p.table == index and p.memory == DEVICE
        )
    cost = decoded(tables, pieces, devices)
    return float(fast / total), float(cost.forward_s.max() + cost.rest_s.max())


class WholeTablesSpace(EmbeddingTableSpace):
    """The strategies in which all rows of a table are in one memory."""

    @functools.cached_property
    def strategies(self) -> tuple[TableStrategies, ...]:
        """The strategies of each table, T sequences of S_t."""

        def treats_alike(pieces: Sequence[Piece]) -> bool:
            return len({(piece.memory, piece.device < 0) for piece in pieces}) == 1

        return tuple(
            TableStrategies(kind for kind in strategies.kinds if treats_alike(kind.pieces))
            for strategies in super().strategies
        )


def program_pieces(task: Task, devices: TableDevices) -> tuple[list[Piece], float]:
    """Returns the choice of RecShard's mixed-integer program, and the gap that HiGHS leaves.

    A variable says that table t is on device d with the hot rows that have a part of its lookups in fast memory.

    Raises:
      ValueError: HiGHS finds nothing that fits in 60 seconds.
    """
    num_devices = devices.num_devices
    choices: list[tuple[int, int, int]] = []  # table, device and number of hot rows
    columns: list[np.ndarray] = []  # seconds forward and of the rest on each device, and bytes there and on its host
    for index, table in enumerate(task.tables):
        own = task.statistics[table.name]
        measured = dataclasses.replace(table, pooling_factor=own.pooling_factor, access=own.access(table.rows))
        curve = np.concatenate([[0.0], np.cumsum(measured.access or ())])
        ends = np.linspace(0, table.rows, len(curve))
        counts = np.unique(np.interp(np.linspace(0, curve[-1], _STEPS + 1), curve, ends).astype(int))
        for hot in sorted({0, *counts.tolist(), table.rows}):
            price = prices_of(
                measured, [in_two_tiers(table, index, device, hot) for device in range(num_devices)], devices
            )
            for device in range(num_devices):
                choices.append((index, device, hot))
                columns.append(np.concatenate([part[device] for part in price[:4]]))
    forward, rest, device_bytes, host_bytes = np.split(np.stack(columns, axis=1), 4)
    of_table = np.array([[table == other for other, _, _ in choices] for table in range(len(task.tables))], float)
    longest = np.eye(2)
    limits: list[Any] = [np.array(own) / 2**20 for own in (devices.memory_limit_bytes, devices.host_limit_bytes)]
    zeros = np.zeros((num_devices, 2))
    constraints: list[Any] = [
        LinearConstraint(np.hstack([of_table, np.zeros((len(of_table), 2))]), 1, 1),
        *(
            LinearConstraint(np.hstack([1e3 * seconds, -np.tile(which, (num_devices, 1))]), -np.inf, 0)
            for seconds, which in ((forward, longest[0]), (rest, longest[1]))
        ),
        LinearConstraint(np.hstack([device_bytes / 2**20, zeros]), ub=limits[0]),
        LinearConstraint(np.hstack([host_bytes / 2**20, zeros]), ub=limits[1]),
    ]
    is_choice = np.concatenate([np.ones(len(choices)), [0, 0]])
    most: Any = np.where(is_choice, 1.0, np.inf)
    result = milp(
        1 - is_choice,
        integrality=is_choice,
        bounds=Bounds(0, most),
        constraints=constraints,
        options={"time_limit": _TIME_LIMIT_S},
    )
    if result.x is None:
        raise ValueError(f"HiGHS found no placement: {result.message}")
    chosen = [choice for choice, x in zip(choices, result.x[:-2], strict=True) if x > 0.5]
    return [
        p for index, device, hot in chosen for p in in_two_tiers(task.tables[index], index, device, hot)
    ], result.mip_gap


def in_two_tiers(table: EmbeddingTable, index: int, device: int, hot: int) -> list[Piece]:
    """Returns the hot rows of a table on a device, and the others on its host."""
    spans = ((0, hot, DEVICE), (hot, table.rows, HOST))
    return [Piece(index, device, start, end, 0, table.dimension, memory) for start, end, memory in spans if start < end]


def outcomes(task: Task, num_devices: int, share: float) -> dict[str, Outcome]:
    """Returns the outcome of each way where devices have room for a share of the bytes of all tables."""
    whole = sum(piece_bytes(table, table.rows, table.dimension) for table in task.tables)
    mesh = AbstractMesh((num_devices,), ("tables",))
    hottest = {name: own.hottest for name, own in task.statistics.items()}
    in_order = [_in_own_order(table, law, i) for i, (table, law) in enumerate(zip(task.tables, task.laws, strict=True))]

    def planned(tables: Sequence[EmbeddingTable], statistics: dict[str, TableStatistics] | None):
        return shard_tables(
            tables, mesh, hardware="h100", memory_limit_bytes=share * whole / num_devices, batch_size=_BATCH_SIZE,
            host_memory_limit_bytes=float(whole), statistics=statistics, key=0,
        )  # fmt: skip

    begin = time.process_time()
    by_counts = planned(task.tables, task.statistics)
    seconds = time.process_time() - begin
    devices = by_counts.devices
    found = {BY_COUNTS: Outcome(*judged(task, by_counts.pieces, by_counts.orders, devices), seconds)}

    def add(name: str, place: Callable[[], tuple[Sequence[Piece], Sequence[RowOrder], float]]) -> None:
        begin = time.process_time()
        pieces, orders, gap = place()
        seconds = time.process_time() - begin
        found[name] = Outcome(*judged(task, pieces, orders, devices), seconds, gap)

    def whole_tables() -> tuple[Sequence[Piece], Sequence[RowOrder], float]:
        space = WholeTablesSpace(task.tables, devices)
        return space.decode(solve_space(space, key=0).choice).pieces, (), 0.0

    def program() -> tuple[Sequence[Piece], Sequence[RowOrder], float]:
        pieces, gap = program_pieces(task, devices)
        return pieces, needed_orders(task.tables, hottest, pieces), gap

    add(WHOLE, whole_tables)
    add(PROGRAM, program)
    add(OWN_ORDER, lambda: (planned(in_order, None).pieces, (), 0.0))
    return found


def _in_own_order(table: EmbeddingTable, law: np.ndarray, index: int) -> EmbeddingTable:
    """Returns a table with counts of a sample in the order of its ids."""
    ids = np.random.default_rng([1, index]).choice(table.rows, _EXAMPLES * int(table.pooling_factor), p=law)
    counts = np.histogram(ids, np.linspace(0, table.rows, min(1024, table.rows) + 1))[0]
    return dataclasses.replace(table, access=tuple(counts.tolist()))


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=3)
    parser.add_argument("--tables", type=int, default=10)
    parser.add_argument("--most-rows", type=int, default=10**6, help="of a table")
    parser.add_argument("--devices", type=int, default=4)
    options = parser.parse_args(arguments)
    made = [generated(seed, options.tables, options.most_rows) for seed in range(options.tasks)]
    rows = []
    for share in _SHARES:
        results = [outcomes(task, options.devices, share) for task in made]
        for name in (WHOLE, PROGRAM, OWN_ORDER, BY_COUNTS):
            own = [result[name] for result in results]
            ratios = [result[name].step_s / result[BY_COUNTS].step_s for result in results]
            rows.append(
                (
                    f"{share:.0%}", name, f"{np.mean([o.fast_share for o in own]):.1%}",
                    f"{1e3 * np.mean([o.step_s for o in own]):.3f}", f"{np.mean(ratios):.3f}", f"{np.max(ratios):.3f}",
                    f"{np.mean([o.processor_s for o in own]):.1f}", f"{np.max([o.gap for o in own]):.1%}",
                )
            )  # fmt: skip
    columns = ("memory", "way", "from fast memory", "step ms", "to rows by counts", "most", "s", "program's gap")
    print_table(f"{options.tasks} tasks of {options.tables} tables, by Zipf's law", columns, rows)


if __name__ == "__main__":
    main()

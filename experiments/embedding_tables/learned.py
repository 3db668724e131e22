"""Learned costs of embedding tables: measured placements beside predicted ones, and searches with one learned cost.

    python -m experiments.embedding_tables.learned [--placements 6] [--tasks 10]
    python -m experiments.embedding_tables.learned --learn diffshard/tables/host_tables.npz

The first command measures placements on 4 host devices, none of which a cost was learned from. The second one learns.
"""

import argparse
import dataclasses
import os
import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import numpy as np
from rich.progress import Progress, track
from scipy.stats import kendalltau

from cost.base import Hardware
from cost.embedding_tables import step_s
from diffshard.tables import learned_annealing
from diffshard.tables.learned_cost import LearnedTableCost, device_sums
from diffshard.tables.measurements import (
    MeasuredSeconds,
    device_seconds,
    exchange_seconds,
    host_table_cost,
    learn_table_cost,
)
from diffshard.tables.search import solve_space
from experiments.embedding_tables import tasks
from experiments.embedding_tables.__main__ import ColumnsOnlySpace
from experiments.embedding_tables.baselines import beam_placed
from experiments.embedding_tables.learned_beam import LearnedPrices
from experiments.tables import print_table
from search_spaces.embedding_tables.base import EVERY_DEVICE, EmbeddingTable, Piece, TableDevices
from search_spaces.embedding_tables.prices import decoded, piece_features
from search_spaces.embedding_tables.space import EmbeddingTableSpace
from search_spaces.embedding_tables.strategies import TableStrategies

_FIRST_SEED = 400  # of placements and tasks; costs are learned, and searches tuned, on others
_NUM_DEVICES, _BATCH_SIZE = 4, 8192
_PARTS = 16


class Judged(NamedTuple):
    """One placement: what was measured, and what is predicted.

    Attributes:
      way: who placed.
      measured: forward and backward seconds of each device and of the exchange, `[2, D + 1]`.
      learned: the same from networks.
      by_bytes: the same from bytes, up to a factor for each row and for the exchange.
    """

    way: str
    measured: np.ndarray
    learned: np.ndarray
    by_bytes: np.ndarray


class WithoutCopies(EmbeddingTableSpace):
    """The strategies that a device runs by itself."""

    @cached_property
    def strategies(self) -> tuple[TableStrategies, ...]:
        """The strategies of each table, without those that copy rows to each device."""
        return tuple(
            TableStrategies(k for k in s.kinds if all(p.device != EVERY_DEVICE for p in k.pieces))
            for s in super().strategies
        )


def host_task(seed: int) -> tuple[list[EmbeddingTable], TableDevices]:
    """Returns 8 to 20 tables that a host measures in seconds: 10^3 to 10^6 rows with accesses by Zipf's law."""
    rng = np.random.default_rng(seed)
    tables = []
    for i in range(int(rng.integers(8, 21))):
        rows = int(10 ** rng.uniform(3, 6))
        rank = np.arange(1, rows + 1) ** -rng.uniform(0.6, 1.2)
        access = tuple(part.sum() for part in np.array_split(rank, _PARTS))
        pooling_factor = float(np.clip(rng.lognormal(1.0, 1.0), 1, 40))
        tables.append(EmbeddingTable(f"t{i}", rows, int(2 ** rng.integers(2, 8)), pooling_factor, access=access))
    hardware = (Hardware("host", 1.0, 1e9, 1e12, {}),) * _NUM_DEVICES
    return tables, TableDevices(hardware, (2.0**30,) * _NUM_DEVICES, 1e-9, _BATCH_SIZE)


def placements(space: EmbeddingTableSpace, cost: LearnedTableCost, seed: int) -> Iterator[tuple[str, Sequence[Piece]]]:
    """Yields two random placements, the one that is best by bytes, and the one that is best by the learned cost."""
    rng = np.random.default_rng(seed)
    for _ in range(2):
        yield "random", space.decode([int(rng.integers(len(s))) for s in space.strategies]).pieces
    yield "by bytes", space.decode(solve_space(space, key=seed).choice).pieces
    choice = learned_annealing.solve(space, cost, time_limit_s=None, key=seed)
    assert choice is not None
    yield "learned", space.decode(choice.tolist()).pieces


def judged(way: str, space: EmbeddingTableSpace, pieces: Sequence[Piece], cost: LearnedTableCost, seed: int) -> Judged:
    """Measures a placement, device by device and then its exchange, and predicts the same."""
    rng, devices = np.random.default_rng(seed), jax.devices()
    measured, learned = [], []
    for device in range(_NUM_DEVICES):
        own = [piece for piece in pieces if piece.device == device]
        indices = sorted({piece.table for piece in own})
        tables = [space.tables[i] for i in indices]
        moved = [piece._replace(table=indices.index(piece.table)) for piece in own]
        seconds = device_seconds(tables, moved, _BATCH_SIZE, devices[0], rng) if own else MeasuredSeconds(0.0, 0.0)
        measured.append(seconds)
        features = [piece_features(space.tables[p.table], p, _BATCH_SIZE, _NUM_DEVICES) for p in own]
        networks = cost.lookups, cost.updates
        learned.append([float(n.seconds(n.embeddings(features).sum(0))) if own else 0.0 for n in networks])
    columns, ids = device_sums(space.tables, pieces, _NUM_DEVICES)
    counts = columns.astype(int).tolist(), ids.astype(int).tolist()
    measured.append(exchange_seconds(*counts, _BATCH_SIZE, devices[:_NUM_DEVICES]))
    learned.append(cost.exchanged_s(columns, ids, _BATCH_SIZE))
    by_bytes = decoded(space.tables, pieces, space.devices).forward_s
    bytes_of_devices = np.append(by_bytes, columns.max())
    return Judged(way, np.array(measured).T, np.array(learned).T, np.stack([bytes_of_devices] * 2))


def steps_s(seconds: np.ndarray) -> float:
    """Returns the seconds of a step from those of devices and of the exchange, `[2, D + 1]`."""
    return float(seconds[:, :-1].max(1).sum() + seconds[:, -1].sum())


def fitted(found: Sequence[Judged]) -> list[Judged]:
    """Returns placements whose prices by bytes have the factors that fit these measurements best, in the median."""
    measured, by_bytes = (np.stack([getattr(one, name) for one in found]) for name in ("measured", "by_bytes"))
    factors = np.zeros((2, _NUM_DEVICES + 1))
    for row in range(2):
        for columns in (slice(0, _NUM_DEVICES), slice(_NUM_DEVICES, None)):
            some, own = measured[:, row, columns], by_bytes[:, row, columns]
            factors[row, columns] = np.median(some[own > 0] / own[own > 0])
    return [one._replace(by_bytes=one.by_bytes * factors) for one in found]


def _print_placements(tasks_found: Sequence[Sequence[Judged]]) -> None:
    every = fitted([one for found in tasks_found for one in found])
    parts = {
        "lookups of a device": (0, slice(0, -1)),
        "update of a device": (1, slice(0, -1)),
        "exchange of ids and rows": (0, slice(-1, None)),
        "exchange of ids and gradients": (1, slice(-1, None)),
    }
    rows = []
    for name, (row, columns) in parts.items():
        measured = np.concatenate([one.measured[row, columns] for one in every])
        errors = []
        for way in ("learned", "by_bytes"):
            predicted = np.concatenate([getattr(one, way)[row, columns] for one in every])
            errors.append(np.abs(predicted[measured > 0] / measured[measured > 0] - 1))
        rows.append((name, int((measured > 0).sum()), f"{1e3 * np.median(measured):.3g}", *_errors(errors)))
    errors = [
        np.array([abs(steps_s(getattr(one, way)) / steps_s(one.measured) - 1) for one in every])
        for way in ("learned", "by_bytes")
    ]
    median_ms = 1e3 * np.median([steps_s(one.measured) for one in every])
    rows.append(("step", len(every), f"{median_ms:.3g}", *_errors(errors)))
    columns = ("what", "measured", "median ms", "learned: median", "of 9 in 10", "by bytes: median", "of 9 in 10")
    print_table("Relative errors on placements that no cost was learned from", columns, rows)
    rows, size = [], len(tasks_found[0])
    for i in range(len(tasks_found)):
        own = every[i * size : (i + 1) * size]
        measured = [steps_s(one.measured) for one in own]
        taus = [kendalltau(measured, [steps_s(getattr(one, way)) for one in own])[0] for way in ("learned", "by_bytes")]
        rows.append((i, *(f"{1e3 * s:.1f}" for s in measured), *(f"{tau:.2f}" for tau in taus)))
    ways = [f"{one.way} ms" for one in tasks_found[0]]
    print_table(
        "Measured steps by who placed, and rank correlations", ("task", *ways, "tau, learned", "tau, bytes"), rows
    )


def _errors(errors: Sequence[np.ndarray]) -> list[str]:
    return [f"{value:.1%}" for own in errors for value in (np.median(own), np.quantile(own, 0.9))]


def _print_tasks(seeds: Sequence[int], cost: LearnedTableCost) -> None:
    ways: dict[str, list[tuple[float, float]]] = {}
    for seed in seeds:
        tables, devices = tasks.generated(seed)
        devices = dataclasses.replace(devices, batch_size=2 * _BATCH_SIZE)
        spaces = {"diffshard": EmbeddingTableSpace, "diffshard, columns only": ColumnsOnlySpace}
        begin = time.process_time()
        placed = beam_placed(LearnedPrices(tables, devices, cost))
        assert placed is not None
        ways.setdefault("beam search", []).append((placed.step_s, time.process_time() - begin))
        for name, kind in spaces.items():
            space = kind(tables, devices)
            begin = time.process_time()
            choice = learned_annealing.solve(space, cost, time_limit_s=None, key=seed)
            assert choice is not None
            seconds = time.process_time() - begin
            ways.setdefault(name, []).append((_step_s(space, choice.tolist(), cost), seconds))
        space = EmbeddingTableSpace(tables, devices)
        begin = time.process_time()
        choice = solve_space(space, key=seed).choice
        seconds = time.process_time() - begin
        ways.setdefault("diffshard, found by bytes", []).append((_step_s(space, choice, cost), seconds))
    ours = np.array([step for step, _ in ways["diffshard"]])
    rows = []
    for name, found in ways.items():
        steps, seconds = np.array(found).T
        ratios = steps / ours
        shares = f"{ratios.mean():.3f}", f"{ratios.min():.3f}", f"{ratios.max():.3f}"
        rows.append((name, *shares, f"{seconds.mean():.2f}", f"{seconds.max():.2f}"))
    columns = ("way", "mean/diffshard", "least", "most", "mean s", "most s")
    print_table(f"{len(seeds)} generated tasks, step time by the learned cost", columns, rows)


def _step_s(space: EmbeddingTableSpace, choice: Sequence[int], cost: LearnedTableCost) -> float:
    found = cost.decoded(space.tables, space.decode(choice).pieces, space.devices)
    return step_s(found.forward_s, found.rest_s)


def main(arguments: Sequence[str] | None = None) -> None:
    """Learns a cost, or prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learn", metavar="FILE", help="where a learned cost is written")
    parser.add_argument("--samples", type=int, default=600, help="of pieces, to learn from")
    parser.add_argument("--exchanges", type=int, default=550, help="to learn from")
    parser.add_argument("--seed", type=int, default=0, help="of what is learned from")
    parser.add_argument("--placements", type=int, default=6, help="tasks whose placements are measured")
    parser.add_argument("--tasks", type=int, default=10, help="that are placed by the learned cost")
    options = parser.parse_args(arguments)
    if options.learn:
        with Progress() as bar:
            samples = bar.add_task("samples", total=None)

            def show(done: int, total: int) -> None:
                bar.update(samples, completed=done, total=total)

            cost = learn_table_cost(
                num_samples=options.samples, num_exchanges=options.exchanges, key=options.seed, progress=show
            )
        cost.save(options.learn)
        return
    cost = host_table_cost()
    found = []
    for seed in track(range(_FIRST_SEED, _FIRST_SEED + options.placements), "placements"):
        space = WithoutCopies(*host_task(seed))
        ways = list(placements(space, cost, seed))
        found.append([judged(way, space, pieces, cost, seed) for way, pieces in ways])
    if found:
        _print_placements(found)
    if options.tasks:
        _print_tasks(range(_FIRST_SEED, _FIRST_SEED + options.tasks), cost)


if __name__ == "__main__":
    main()

"""Tables on several hosts of 8 H100s: plans that know links inside and across hosts, beside plans that know one link.

    python -m experiments.embedding_tables.hosts [--hosts 2 4 8] [--tasks 4]

All placements are priced with both links. "One link" is the same search, which takes all bytes for those of the slowest
link; "two links" knows both, but has no tables that are copied on each host and divided among its devices.
"""

import argparse
import dataclasses
import functools
import math
import time
from collections.abc import Sequence

import numpy as np
from jax.sharding import AbstractMesh

from cost.embedding_tables import step_s
from cost.presets import preset
from diffshard.tables.search import devices_of_mesh
from diffshard.tables.solving import solve_space
from experiments.embedding_tables import tasks
from experiments.embedding_tables.tiers import skewed
from experiments.tables import print_table
from search_spaces.embedding_tables.base import EVERY_DEVICE, EmbeddingTable, Piece, TableDevices
from search_spaces.embedding_tables.prices import decoded
from search_spaces.embedding_tables.space import EmbeddingTableSpace
from search_spaces.embedding_tables.strategies import TableStrategies

_DEVICES_PER_HOST, _BATCH_SIZE, _DEVICE_BYTES = 8, 65536, 40.0 * 2**30
_EXPONENT = 1.05  # of Zipf's law, for MLPerf's tables
ONE, TWO, OURS = "one link", "two links", "diffshard"


class WithoutHostCopies(EmbeddingTableSpace):
    """The strategies in which no host has a copy for itself."""

    @functools.cached_property
    def strategies(self) -> tuple[TableStrategies, ...]:
        """The strategies of each table, T sequences of S_t."""
        return tuple(
            TableStrategies(kind for kind in own.kinds if not kind.pieces[-1].on_each_host)
            for own in super().strategies
        )


def hosts_of(num_hosts: int) -> TableDevices:
    """Returns H100s on hosts of 8, with 40 GiB each for the tables."""
    axes = {"hosts": num_hosts, "devices": _DEVICES_PER_HOST}
    count = math.prod(axes.values())
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes))
    return devices_of_mesh(mesh, (preset("h100", axes),) * count, (_DEVICE_BYTES,) * count, _BATCH_SIZE)


def long_pooling(seed: int) -> list[EmbeddingTable]:
    """Returns the tables of a generated task with 20 to 500 ids of an example each, as histories of users have."""
    rng = np.random.default_rng(seed)
    tables = tasks.generated(seed)[0]
    pooling = np.exp(rng.uniform(np.log(20), np.log(500), len(tables)))
    return [dataclasses.replace(t, pooling_factor=float(p)) for t, p in zip(tables, pooling, strict=True)]


def ways(tables: Sequence[EmbeddingTable], devices: TableDevices, seed: int) -> dict[str, tuple[list[Piece], float]]:
    """Returns the pieces that each way places, and its processor seconds."""
    one_link = dataclasses.replace(devices, s_per_byte=devices.far_s_per_byte, num_hosts=1, far_s_per_byte=0.0)
    spaces = {
        ONE: EmbeddingTableSpace(tables, one_link),
        TWO: WithoutHostCopies(tables, devices),
        OURS: EmbeddingTableSpace(tables, devices),
    }
    found = {}
    for name, space in spaces.items():
        begin = time.process_time()
        choice = solve_space(space, key=seed).choice
        found[name] = list(space.decode(choice).pieces), time.process_time() - begin
    return found


def far_bytes(tables: Sequence[EmbeddingTable], pieces: Sequence[Piece], devices: TableDevices) -> float:
    """Returns the bytes that leave hosts in a step, of all devices together, by prices without any other seconds."""
    only_far = dataclasses.replace(devices, s_per_byte=0.0, far_s_per_byte=1.0)
    free = dataclasses.replace(devices, s_per_byte=0.0, far_s_per_byte=0.0)
    rest = [decoded(tables, pieces, one).rest_s.sum() for one in (only_far, free)]
    return float(rest[0] - rest[1])


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--tasks", type=int, default=4, help="generated ones of each kind")
    options = parser.parse_args(arguments)
    rows = []
    for num_hosts in options.hosts:
        devices = hosts_of(num_hosts)
        kinds = {
            "MLPerf": [[skewed(table, _EXPONENT) for table in tasks.mlperf(4)[0]]],
            "generated": [tasks.generated(seed)[0] for seed in range(options.tasks)],
            "long pooling": [long_pooling(seed) for seed in range(options.tasks)],
        }
        for kind, sets in kinds.items() if options.tasks else [("MLPerf", kinds["MLPerf"])]:
            rows += rows_of(f"{num_hosts} x {_DEVICES_PER_HOST}", kind, sets, devices)
    columns = ("devices", "tables", "way", "step ms", "mean/diffshard", "most", "GB that leave hosts", "copies", "s")
    print_table("Placements on several hosts, by the prices of both links", columns, rows)


def rows_of(
    label: str, kind: str, sets: Sequence[Sequence[EmbeddingTable]], devices: TableDevices
) -> list[tuple[str, ...]]:
    """Returns the rows of all ways on some sets of tables."""
    found: dict[str, list[tuple[float, float, int, int, float]]] = {ONE: [], TWO: [], OURS: []}
    for seed, tables in enumerate(sets):
        for name, (pieces, seconds) in ways(tables, devices, seed).items():
            costs = decoded(tables, pieces, devices)
            everywhere = len({p.table for p in pieces if p.device == EVERY_DEVICE})
            each_host = len({p.table for p in pieces if p.on_each_host})
            step = step_s(costs.forward_s, costs.rest_s)
            found[name].append((step, far_bytes(tables, pieces, devices), everywhere, each_host, seconds))
    ours = np.array([own[0] for own in found[OURS]])
    rows = []
    for name, every in found.items():
        steps, far, everywhere, each_host, seconds = np.array(every).T
        ratios = steps / ours
        rows.append(
            (
                label, kind, name, f"{1e3 * steps.mean():.3f}", f"{ratios.mean():.3f}", f"{ratios.max():.3f}",
                f"{far.mean() / 1e9:.2f}", f"{everywhere.mean():.0f} + {each_host.mean():.0f}", f"{seconds.mean():.2f}",
            )
        )  # fmt: skip
    return rows


if __name__ == "__main__":
    main()

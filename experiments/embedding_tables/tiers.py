"""MLPerf's tables where they do not fit the devices: hot rows on devices, others on hosts, by Zipf's law.

    python -m experiments.embedding_tables.tiers [--devices 4 8 16] [--exponent 1.05]

All memory of the devices is given, and parts of what all tables need.
"""

import argparse
import dataclasses
import time
from collections.abc import Sequence

import numpy as np
from jax.sharding import AbstractMesh

from diffshard.base import InfeasibleError
from diffshard.tables.search import shard_tables
from experiments.embedding_tables import tasks
from experiments.tables import print_table
from search_spaces.embedding_tables.base import EVERY_DEVICE, HOST, EmbeddingTable
from search_spaces.embedding_tables.prices import piece_bytes

_PARTS = 128  # of a table, for which accesses are counted
_HOST_BYTES = 128 * 2**30  # for each device
_SHARES = (1.1, 0.5, 0.1)  # of the bytes of all tables that all devices have room for


def skewed(table: EmbeddingTable, exponent: float) -> EmbeddingTable:
    """Returns a table whose rows are looked up by Zipf's law, most often looked up ones first."""
    ends = np.linspace(0, table.rows, min(_PARTS, table.rows) + 1) + 0.5
    integral = ends ** (1 - exponent) / (1 - exponent)
    return dataclasses.replace(table, access=tuple(np.diff(integral).tolist()))


def row_of(tables: Sequence[EmbeddingTable], num_devices: int, limit: float, host_limit: float | None) -> tuple:
    """Returns step, gap, rows on hosts, copied rows and processor seconds of one search, as text."""
    begin = time.process_time()
    mesh = AbstractMesh((num_devices,), ("tables",))
    try:
        plan = shard_tables(
            tables, mesh, hardware="h100", memory_limit_bytes=limit, host_memory_limit_bytes=host_limit, key=0
        )
    except InfeasibleError:
        return "does not fit", "", "", "", f"{time.process_time() - begin:.2f}"
    numbers = sum(table.rows * table.dimension for table in tables)
    on_hosts = sum(p.rows * p.columns for p in plan.pieces if p.memory == HOST) / numbers
    copied = sum(p.rows for p in plan.pieces if p.device == EVERY_DEVICE and p.rows < tables[p.table].rows)
    seconds = time.process_time() - begin
    return f"{1e3 * plan.step_s:.3f}", f"{plan.gap:.3f}", f"{on_hosts:.1%}", f"{copied:,}", f"{seconds:.2f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--exponent", type=float, default=1.05, help="of Zipf's law; not 1")
    options = parser.parse_args(arguments)
    rows = []
    for num_devices in options.devices:
        tables = [skewed(table, options.exponent) for table in tasks.mlperf(num_devices)[0]]
        whole = sum(piece_bytes(table, table.rows, table.dimension) for table in tables)
        for share in _SHARES:
            limit = share * whole / num_devices
            for way, host_limit in (("devices only", None), ("with hosts", _HOST_BYTES)):
                room = f"{limit / 2**30:.1f}"
                rows.append((num_devices, room, way, *row_of(tables, num_devices, limit, host_limit)))
    columns = ("devices", "GiB each", "rows", "step ms", "gap", "on hosts", "hot rows copied", "s")
    print_table("MLPerf's tables on H100s, with less and less memory", columns, rows)


if __name__ == "__main__":
    main()

"""Tasks: tables and devices, generated with seeds as NeuroShard's are, and the tables of MLPerf's DLRM-DCNv2.

Source: Zha et al., "NeuroShard" (MLSys 2023), section 4: 10 to 60 tables of 4 to 128 columns on 4 GPUs of 4 GB each.
MLPerf's rows and pooling factors: mlcommons/training, recommendation_v2.
"""

import numpy as np
from jax.sharding import AbstractMesh

from cost.presets import preset
from diffshard.tables.search import devices_of_mesh
from search_spaces.embedding_tables.base import EmbeddingTable, TableDevices
from search_spaces.embedding_tables.prices import piece_bytes

_BATCH_SIZE = 65536
DEVICE_BYTES = 4 * 2**30
_MOST_BYTES = 15e9  # of all tables on 4 devices
_PARTS = 16  # of a table, for which accesses are counted
_MLPERF_ROWS = (
    40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10, 2209, 11938, 155, 4, 976, 14,
    40000000, 40000000, 40000000, 590152, 12973, 108, 36,
)  # fmt: skip
_MLPERF_POOLING = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)


def generated(seed: int, most_tables: int = 60) -> tuple[list[EmbeddingTable], TableDevices]:
    """Returns 10 to `most_tables` tables with skewed accesses, at most 15 GB, and 4 V100s with 4 GiB each for them."""
    rng = np.random.default_rng(seed)
    tables = [_generated_table(i, rng) for i in range(int(rng.integers(10, most_tables + 1)))]
    return fitting(tables, 4), alike_devices("v100", 4, DEVICE_BYTES)


def fitting(tables: list[EmbeddingTable], num_devices: int) -> list[EmbeddingTable]:
    """Returns tables with other names, with fewer rows where they need more than all devices have."""
    room = _MOST_BYTES * num_devices / 4
    shrink = min(room / sum(piece_bytes(table, table.rows, table.dimension) for table in tables), 1.0)
    return [
        EmbeddingTable(f"t{i}", max(int(t.rows * shrink), _PARTS), t.dimension, t.pooling_factor, access=t.access)
        for i, t in enumerate(tables)
    ]


def few(seed: int, num_tables: int) -> tuple[list[EmbeddingTable], TableDevices]:
    """Returns the first tables, so few that the optimum can be proven, of a task of 10 tables, or of 10 to so many."""
    tables, devices = generated(seed, max(num_tables, 10))
    return tables[:num_tables], devices


def mlperf(num_devices: int) -> tuple[list[EmbeddingTable], TableDevices]:
    """Returns the 26 tables of DLRM-DCNv2, of 128 columns, and H100s."""
    tables = [
        EmbeddingTable(f"t{i}", rows, 128, float(pooling))
        for i, (rows, pooling) in enumerate(zip(_MLPERF_ROWS, _MLPERF_POOLING, strict=True))
    ]
    return tables, alike_devices("h100", num_devices, 80 * 2**30)


def _generated_table(index: int, rng: np.random.Generator) -> EmbeddingTable:
    rows = int(10 ** rng.uniform(3, 7))
    rank = np.arange(1, rows + 1) ** -rng.uniform(0.6, 1.2)  # Zipf's law; rows are in the order of their accesses
    access = tuple(part.sum() for part in np.array_split(rank, _PARTS))
    pooling_factor = float(np.clip(rng.lognormal(1.0, 1.2), 1, 200))
    return EmbeddingTable(f"t{index}", rows, int(2 ** rng.integers(2, 8)), pooling_factor, access=access)


def alike_devices(name: str, num_devices: int, memory_bytes: float) -> TableDevices:
    """Returns devices of a preset, with so many bytes each for the tables."""
    mesh = AbstractMesh((num_devices,), ("tables",))
    hardware = (preset(name, dict(mesh.shape)),) * num_devices
    limits = (float(memory_bytes),) * num_devices
    return devices_of_mesh(mesh, hardware, limits, _BATCH_SIZE)

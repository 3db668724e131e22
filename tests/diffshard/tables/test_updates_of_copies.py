"""What an update of a copy moves through the memory of a GPU: the passes of the price are those of XLA's kernels."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

# Bytes that the lookups move are the same for both numbers of rows, so that the difference is the dense work.
SCRIPT = """
import dataclasses, sys
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from cost.embedding_tables import TableLinks, copy_update_s
from diffshard.tables import EmbeddingTable, shard_tables
from diffshard.checks.targets import gpu_mesh
from diffshard.checks.hlo import parse
from diffshard.checks.kernel_work import kernel_work
from search_spaces.embedding_tables.base import EVERY_DEVICE, Piece

mesh, dtype = gpu_mesh({"x": 4}), sys.argv[1]

def moved(rows):
    table = EmbeddingTable("copied", rows, 64, 2.0, dtype=dtype)
    plan = shard_tables([table], mesh, hardware="h100", batch_size=16)
    plan = dataclasses.replace(plan, pieces=(Piece(0, EVERY_DEVICE, 0, rows, 0, 64),))
    on = lambda shape, type_, *axes: jax.ShapeDtypeStruct(shape, type_, sharding=NamedSharding(mesh, P(*axes)))
    arrays, state = jax.tree.map(lambda x: on(x.shape, x.dtype, *["x"] * (x.shape[0] == 4)), plan.shapes())
    batch = lambda columns, type_: {"copied": on((16, columns), type_, "x")}
    step = jax.jit(lambda *args: plan.update(*args, learning_rate=0.1), donate_argnums=(0, 1))
    text = step.lower(arrays, state, batch(2, jnp.int32), batch(64, jnp.float32)).compile().as_text()
    module = parse(text)
    entry = module.computations[module.entry]
    works = [kernel_work(module, entry, one) for one in entry.instructions if "all-reduce" not in one.opcode]
    hardware = plan.devices.hardware[0]
    links, state_bytes = TableLinks(4, 0.0), table.update_rule.state_bytes(64)
    predicted_s = copy_update_s(rows, 64, table.itemsize, links, hardware, state_bytes)
    predicted = predicted_s * hardware.reached_memory_bytes_per_s
    return sum(work.num_bytes for work in works if work), predicted

(few, few_predicted), (many, many_predicted) = moved(5000), moved(10000)
print((many - few) / (many_predicted - few_predicted))
"""


@pytest.mark.skipif(importlib.util.find_spec("jax_cuda12_plugin") is None, reason="needs the extra gpu-compile")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bytes_of_a_copys_update_are_those_of_xlas_kernels_for_gpus(dtype):
    # A process of its own: JAX looks for plugins once, when its first backend starts.
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, dtype], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert float(result.stdout) == pytest.approx(1.0, rel=0.03)

"""Compiling for GPUs that are not there; the compilation itself needs the extra `gpu-compile`."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from diffshard.checks import targets
from diffshard.checks.targets import A100, H100, gpu_mesh

ROOT = Path(__file__).resolve().parents[3]


def test_a_mesh_must_fill_whole_hosts():
    with pytest.raises(ValueError, match="gpus_per_host"):
        gpu_mesh({"data": 3, "model": 4})


def test_a_missing_plugin_is_named_with_what_to_install(monkeypatch):
    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"\.\[gpu-compile\]"):
        gpu_mesh({"model": 8})


# Source: CUDA C++ Programming Guide, technical specifications of compute capabilities 8.0 and 9.0.
LIMITS = {
    "threads_per_block_limit": 1024, "threads_per_warp": 32, "threads_per_core_limit": 2048,
    "shared_memory_per_block": 49152, "block_dim_limit_x": 2147483647, "block_dim_limit_y": 65535,
    "block_dim_limit_z": 65535, "registers_per_core_limit": 65536, "registers_per_block_limit": 65536,
}  # fmt: skip


@pytest.mark.parametrize(("target", "shared_kib", "version"), [(H100, 228, "9 minor: 0"), (A100, 164, "8 minor: 0")])
def test_the_target_in_xlas_text_form(target, shared_kib, version):
    text = target.to_proto_text()
    assert text.count("{") == text.count("}") == 3
    device, version_of_device, *_ = text.removeprefix("gpu_device_info {").split("cuda_compute_capability { major: ")
    assert version_of_device.startswith(version)
    fields = dict(zip(device.split()[::2], map(float, device.split()[1::2]), strict=True))
    own = {
        "core_count": target.num_cores, "fpus_per_core": target.fpus_per_core, "clock_rate_ghz": target.clock_rate_ghz,
        "memory_bandwidth": target.memory_bytes_per_s, "l2_cache_size": target.l2_cache_bytes,
        "device_memory_size": target.memory_bytes, "shared_memory_per_core": shared_kib * 1024,
        "shared_memory_per_block_optin": (shared_kib - 1) * 1024,
    }  # fmt: skip
    assert fields == {f"{name}:": value for name, value in {**LIMITS, **own}.items()}


SCRIPT = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from diffshard.checks.collectives import hlo_collectives
from diffshard.checks.targets import gpu_mesh

mesh = gpu_mesh({"data": 2, "model": 4})
place = lambda *specs: jax.tree.map(lambda s: NamedSharding(mesh, s), specs)
step = jax.jit(lambda x, w, v: (x @ w) @ v, in_shardings=place(P("data"), P(None, "model"), P("model")),
               out_shardings=place(P("data", "model"))[0])
shapes = ((64, 128), (128, 256), (256, 128))
compiled = step.lower(*(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes)).compile()
found = [(c.kind, c.axes, c.num_bytes) for c in hlo_collectives(compiled.as_text(), mesh.shape)]
assert found == [("reduce_scatter", ("model",), 32 * 128 * 2.0)], found
assert compiled.memory_analysis().argument_size_in_bytes == (32 * 128 + 128 * 64 + 64 * 128) * 2
"""


@pytest.mark.skipif(importlib.util.find_spec("jax_cuda12_plugin") is None, reason="needs the extra gpu-compile")
def test_a_reduce_scatter_is_one_on_the_gpu_target():
    # A process of its own: JAX looks for plugins once, when its first backend starts.
    result = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]

"""What plans are compiled for to be judged: GPUs that need not be there, or the host's own processor.

So XLA's GPU compiler can judge a plan before a cluster is paid for. Programs can be compiled for the devices of
`gpu_mesh`, but not run on them. `jax.jit(...).lower(...).compile()` with shardings on such a mesh runs the real GPU
compiler: its program (`as_text()`, read by `collectives.py`) and its `memory_analysis()` are those of the target. This
needs the extra `gpu-compile`, which has JAX's CUDA plugin and ptxas; a driver and CUDA's libraries are not needed. XLA
also compiles programs that do not fit the GPU's memory: compare `memory_analysis()` with the size of the memory.

A target with rates tells how long a compiled step takes (`timeline.py`). The host's has none: its backend schedules
nothing concurrently, so that only bytes and memory of its programs mean something.
"""

import importlib.util
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from cost.base import Hardware
from cost.networks import SwitchedHost
from cost.presets import preset
from diffshard.checks.kernel_work import H100_HOST, AchievableRates, achievable_rates

_SKIP_CHECK = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"


@dataclass(frozen=True)
class GpuTarget:
    """The properties of a GPU that decide which program XLA compiles for it.

    Others do not matter: with the full public specification of an H100, including the rates of all its units, a GPT
    training step compiled to the same collectives and the same bytes of memory.

    Attributes:
      name: NVIDIA's name of the product.
      compute_capability: major and minor.
      num_cores: streaming multiprocessors.
      clock_rate_ghz: boost clock.
      memory_bytes, memory_bytes_per_s: of the device's memory.
      l2_cache_bytes: of the whole chip.
      shared_memory_per_core_bytes: of a multiprocessor.
      shared_memory_per_block_bytes: the largest that a block can have.
      fpus_per_core: float32 lanes of a multiprocessor.
    """

    name: str
    compute_capability: tuple[int, int]
    num_cores: int
    clock_rate_ghz: float
    memory_bytes: int
    memory_bytes_per_s: int
    l2_cache_bytes: int
    shared_memory_per_core_bytes: int
    shared_memory_per_block_bytes: int
    fpus_per_core: int

    def to_proto_text(self) -> str:
        """Returns the target as XLA's `GpuTargetConfigProto` in text form, with limits that all these GPUs share."""
        major, minor = self.compute_capability
        device = {
            "threads_per_block_limit": 1024,
            "threads_per_warp": 32,
            "threads_per_core_limit": 2048,
            "shared_memory_per_block": 48 * 1024,
            "shared_memory_per_core": self.shared_memory_per_core_bytes,
            "shared_memory_per_block_optin": self.shared_memory_per_block_bytes,
            "core_count": self.num_cores,
            "fpus_per_core": self.fpus_per_core,
            "block_dim_limit_x": 2**31 - 1,
            "block_dim_limit_y": 2**16 - 1,
            "block_dim_limit_z": 2**16 - 1,
            "memory_bandwidth": self.memory_bytes_per_s,
            "l2_cache_size": self.l2_cache_bytes,
            "clock_rate_ghz": self.clock_rate_ghz,
            "device_memory_size": self.memory_bytes,
            "registers_per_core_limit": 2**16,
            "registers_per_block_limit": 2**16,
        }
        fields = " ".join(f"{name}: {value}" for name, value in device.items())
        return (
            f"gpu_device_info {{ {fields} cuda_compute_capability {{ major: {major} minor: {minor} }} }} "
            f'platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 patch: 0 }} '
            f'device_description_str: "{self.name}"'
        )


# Source: NVIDIA H100 and A100 Tensor Core GPU Architecture white papers; sizes as the driver reports them.
H100 = GpuTarget(
    name="NVIDIA H100 80GB HBM3",
    compute_capability=(9, 0),
    num_cores=132,
    clock_rate_ghz=1.98,
    memory_bytes=84_942_979_072,
    memory_bytes_per_s=3_352_320_000_000,
    l2_cache_bytes=50 * 2**20,
    shared_memory_per_core_bytes=228 * 2**10,
    shared_memory_per_block_bytes=227 * 2**10,
    fpus_per_core=128,
)
A100 = GpuTarget(
    name="NVIDIA A100-SXM4-80GB",
    compute_capability=(8, 0),
    num_cores=108,
    clock_rate_ghz=1.41,
    memory_bytes=85_097_971_712,
    memory_bytes_per_s=2_039_000_000_000,
    l2_cache_bytes=40 * 2**20,
    shared_memory_per_core_bytes=164 * 2**10,
    shared_memory_per_block_bytes=163 * 2**10,
    fpus_per_core=64,
)


def check_compiler(name: str) -> None:
    """Checks that XLA's GPU compiler is here.

    Args:
      name: of what is compiled for, for the message.

    Raises:
      RuntimeError: JAX's CUDA plugin is missing; names the extra that brings it.
    """
    if not any(importlib.util.find_spec(plugin) for plugin in ("jax_cuda12_plugin", "jax_cuda13_plugin")):
        raise RuntimeError(
            f"Compiling for {name} needs JAX's CUDA plugin and ptxas: `pip install '.[gpu-compile]'` in a clone of "
            "diffshard (no GPU, driver or CUDA libraries are needed). A check of a plan can also take "
            '`target="host"`, which judges bytes and memory by the CPU compiler of XLA.'
        )


def gpu_mesh(axis_sizes: Mapping[str, int], target: GpuTarget = H100, *, gpus_per_host: int = 8) -> Mesh:
    """Makes a mesh of GPUs for which programs can be compiled, but on which they cannot be run.

    Args:
      axis_sizes: devices along each axis; neighbours along the last axis share a host first.
      target: the GPU.
      gpus_per_host: GPUs that share a host; the mesh spans as many hosts as it needs.

    Raises:
      ValueError: the mesh is neither within one host nor a whole number of hosts.
      RuntimeError: the packages of the extra `gpu-compile` are missing, or do not fit this JAX.
    """
    num_devices = math.prod(axis_sizes.values())
    if num_devices > gpus_per_host and num_devices % gpus_per_host:
        raise ValueError(
            f"`axis_sizes` must fill whole hosts of `gpus_per_host` = {gpus_per_host} GPUs, not {num_devices} devices "
            f"{dict(axis_sizes)}."
        )
    check_compiler("GPUs")
    num_hosts = max(1, num_devices // gpus_per_host)
    devices = _topology_devices(target, num_hosts, num_devices // num_hosts)
    return Mesh(np.array(devices).reshape(tuple(axis_sizes.values())), tuple(axis_sizes))


def _topology_devices(target: GpuTarget, num_hosts: int, gpus_per_host: int) -> list[Any]:
    # When the plugin is loaded it looks for CUDA's libraries, which are not needed to compile.
    before = os.environ.get(_SKIP_CHECK)
    os.environ[_SKIP_CHECK] = "1"
    try:
        topology = topologies.get_topology_desc(
            topology_name=target.name,
            platform="cuda",
            target_config=target.to_proto_text(),
            topology=f"1x{num_hosts}x{gpus_per_host}",
        )
    except (NotImplementedError, RuntimeError) as error:
        raise RuntimeError(f"JAX's CUDA plugin cannot describe GPUs here: {error}") from error
    finally:
        if before is None:
            del os.environ[_SKIP_CHECK]
        else:
            os.environ[_SKIP_CHECK] = before
    return list(topology.devices)


# What one GPU of an HGX A100 sends: NVLink at 80% of 300 GB/s, and its own InfiniBand card at 90% of 25 GB/s, the
# shares of `H100_HOST`.
A100_HOST = replace(H100_HOST, device_bytes_per_s=240e9, network_bytes_per_s=8 * 22.5e9)
_HOST_DEVICES_FLAG = "--xla_force_host_platform_device_count"


@dataclass(frozen=True)
class Target:
    """The devices that programs are compiled for.

    Attributes:
      name: for tables.
      gpu: the GPU; None stands for devices of this host's processor.
      rates: what the devices and links reach, by which timelines are priced; None where there is no timeline.
    """

    name: str
    gpu: GpuTarget | None = None
    rates: AchievableRates | None = None

    @property
    def platform(self) -> str:
        """The platform for which JAX lowers: "cuda" or "cpu"."""
        return "cpu" if self.gpu is None else "cuda"

    def check(self) -> None:
        """Checks that the target's compiler is here.

        Raises:
          RuntimeError: JAX's CUDA plugin is missing; names the extra that brings it.
        """
        if self.gpu is not None:
            check_compiler(self.name)

    def mesh(self, axis_sizes: dict[str, int]) -> Mesh:
        """Makes the mesh of devices for which programs can be compiled.

        Raises:
          RuntimeError: the compiler or, for the host, its devices are not here.
          ValueError: as `gpu_mesh`.
        """
        types = (AxisType.Auto,) * len(axis_sizes)
        if self.gpu is not None:
            num_devices = self.rates.host.num_devices if self.rates else 8
            mesh = gpu_mesh(axis_sizes, self.gpu, gpus_per_host=num_devices)
            return Mesh(mesh.devices, mesh.axis_names, axis_types=types)
        count = int(np.prod(list(axis_sizes.values())))
        devices = jax.devices("cpu")
        if len(devices) < count:
            raise RuntimeError(f"The host has {len(devices)} devices, not {count}; see {_HOST_DEVICES_FLAG}.")
        return Mesh(np.array(devices[:count]).reshape(tuple(axis_sizes.values())), tuple(axis_sizes), axis_types=types)

    def environment(self, num_devices: int) -> dict[str, str]:
        """Returns the environment of a process that compiles for the target; it needs no accelerator of its own."""
        flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if not f.startswith(_HOST_DEVICES_FLAG)]
        if self.gpu is None:
            flags.append(f"{_HOST_DEVICES_FLAG}={num_devices}")
        return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)}


def _gpu(name: str, gpu: GpuTarget, preset_name: str, host: SwitchedHost) -> Target:
    return Target(name, gpu, achievable_rates(preset(preset_name, {}), host=host))


TARGETS: dict[str, Target] = {
    "h100": _gpu("H100", H100, "h100", H100_HOST),
    "a100": _gpu("A100", A100, "a100", A100_HOST),
    "host": Target("host"),
}


def target_for(target: Target | str | None, hardware: Hardware) -> Target:
    """Returns a target as it is, by its name, or for None the one of some hardware.

    Raises:
      TypeError, ValueError: there is no such target, or none for the hardware.
    """
    if isinstance(target, Target):
        return target
    if isinstance(target, str):
        if target not in TARGETS:
            raise ValueError(f"`target` must be one of {', '.join(TARGETS)} or a Target, not {target!r}.")
        return TARGETS[target]
    if target is not None:
        raise TypeError(f"`target` must be a name, a Target or None, not {type(target).__name__}.")
    for word, name in (("H100", "h100"), ("A100", "a100"), ("CPU", "host")):
        if hardware.name.startswith(word):
            return TARGETS[name]
    raise ValueError(f"`target` must be given: there is none for {hardware.name!r}. One of {', '.join(TARGETS)}.")

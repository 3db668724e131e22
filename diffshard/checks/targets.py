"""What plans are compiled for to be judged: GPUs that need not be there, or the host's own processor.

A target with rates tells how long a compiled step takes (`timeline.py`). The host's has none: its backend schedules
nothing beside anything, so that only bytes and memory of its programs mean something.
"""

import os
from dataclasses import dataclass, replace

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from cost.base import Hardware
from cost.networks import SwitchedHost
from cost.presets import preset
from diffshard.checks.achievable_rates import H100_HOST, AchievableRates, achievable_rates
from diffshard.checks.gpu_target import A100, H100, GpuTarget, check_compiler, gpu_mesh

# What one GPU of an HGX A100 sends: NVLink at 80% of 300 GB/s, and its own InfiniBand card at 90% of 25 GB/s, the
# shares of `H100_HOST`.
A100_HOST = replace(H100_HOST, device_bytes_per_s=240e9, network_bytes_per_s=8 * 22.5e9)
_HOST_DEVICES_FLAG = "--xla_force_host_platform_device_count"


@dataclass(frozen=True)
class Target:
    """What programs are compiled for.

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

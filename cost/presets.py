"""Presets of common hardware, with the public source of every number.

`preset` puts together a device and the links of a mesh's axes, which follow from how the devices are connected
(`cost/networks.py`).
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from importlib import resources
from typing import Any

from jax.sharding import AbstractMesh

from cost.base import CollectiveKind, Hardware, Link
from cost.lines import Line
from cost.measured_rates import NOT_MEASURED, MeasuredRates, measured_rates
from cost.networks import (
    Network,
    SharedProcessor,
    SwitchedHost,
    TorusPod,
    devices_in_host,
    hosts_along,
    links_of,
    share_of_host,
)

_TB = 1e12
_GB = 1e9
_GIB = 2**30

EXPOSED_ON_GPU = 0.25
"""`Hardware.exposed_share` of GPUs: on a decoder as a program for each device, compiled for 8, 32 and 64 H100s, steps
wait for a tenth to a quarter of these collectives' time (python -m experiments.timeline)."""

# NCCL's own tuning model (github.com/NVIDIA/nccl, src/graph/tuning.cc), protocol LL128: base 14 µs, 1.9 µs for a step
# over NVLink and 4.0 µs over a network. NVLink reaches 0.82 of its nominal rate: 741 of 900 GB/s on an HGX H100
# (astra-sim.github.io/astra-sim-docs/validation/hardware/gpu-validation-hgx-h100.html). Networks reach 0.93: 2.9 of
# 3.125 GB/s on the V100 hosts.
_LAUNCH_S, _HOP_S, _NETWORK_HOP_S = 14e-6, 1.9e-6, 4.0e-6
_NVLINK, _NETWORK = 0.82, 0.93

# float32 is the rate of matrix products in JAX's default precision: TF32 on A100 and later
# (docs.jax.dev, jax.default_matmul_precision), one bfloat16 pass on TPUs. All rates are dense.
_HOPPER_FLOPS_PER_S = {
    "float64": 67 * _TB,
    "float32": 495 * _TB,
    "bfloat16": 989 * _TB,
    "float16": 989 * _TB,
    "float8_e4m3fn": 1979 * _TB,
    "int8": 1979 * _TB,
}

# DGX/HGX H100: NVLink 4 at 450 GB/s each way, 8 ConnectX-7 at 400 Gbit/s (nvidia.com/en-us/data-center/dgx-h100).
_HOPPER_HOST = SwitchedHost(8, 450 * _GB * _NVLINK, 400 * _GB * _NETWORK, _LAUNCH_S, _HOP_S, _NETWORK_HOP_S)

# What XLA's kernels reach on GPUs: 70% of the rate in large matrix products and 80% of the memory's bandwidth are round
# numbers for H100s, assumed and not measured. From one kernel to the next it takes 1 µs: XLA,
# xla/service/gpu/model/gpu_performance_model_base.h, `kKernelLaunchOverhead`.
_MATRIX_SHARE, _MEMORY_SHARE, _KERNEL_LAUNCH_S = 0.70, 0.80, 1e-6


# PCI Express with 16 lanes, bytes/s each way: 8, 16 and 32 GT/s on each lane, of which 128 of 130 bits are data
# (PCI-SIG, base specifications 3.0, 4.0 and 5.0). Copies to pinned memory reach 0.78 of version 3 (12.36 GB/s, the
# README of nvbandwidth) and 0.88 of version 5 (55.63 GB/s, developer.nvidia.com/blog/?p=115566); 0.8 is taken for all.
# GPUs that share a switch, as pairs do in many hosts, have less when they copy at the same time.
_PCIE_3, _PCIE_4, _PCIE_5 = (0.8 * 16 / 8 * rate * 1e9 * 128 / 130 for rate in (8, 16, 32))


def _attention(name: str) -> MeasuredRates:
    """Returns the measured rates of fused attention. Products stay at a share of the datasheet's rate.

    That share was held against compiled programs played at the same share, and not against devices;
    `measured_preset` has products and links as devices were measured.
    """
    return MeasuredRates(measured_rates(name).attention)


_HOPPER_ATTENTION = _attention("h100")  # GH200 and H200 have the same arithmetic


def _gpu(
    name: str,
    flops_per_s: dict[str, float],
    memory_rate: float,
    memory: float,
    host_memory_rate: float,
    *,
    matrix_share: float = _MATRIX_SHARE,
    measured: MeasuredRates = NOT_MEASURED,
) -> Hardware:
    """Returns a GPU with a datasheet's rates and what programs reach of them; its links follow from the mesh."""
    return Hardware(
        name,
        flops_per_s,
        memory_rate,
        memory,
        {},
        exposed_share=EXPOSED_ON_GPU,
        matrix_share=matrix_share,
        memory_share=_MEMORY_SHARE,
        kernel_launch_s=_KERNEL_LAUNCH_S,
        host_memory_bytes_per_s=host_memory_rate,
        measured=measured,
    )


def _lines_by_ring(file: str) -> dict[tuple[int, int, int], dict[CollectiveKind, tuple[Line, ...]]]:
    """Returns the lines that `SwitchedHost.measured_lines` takes, from a file beside this one."""
    links = json.loads(resources.files("cost").joinpath(file).read_text())
    return {
        (link["devices_in_host"], link["size"], link["stride"]): {
            kind: tuple(Line(*line) for line in lines) for kind, lines in link["by_kind"].items()
        }
        for link in links
    }


_PRESETS: dict[str, tuple[Hardware, Network]] = {
    "v100": (
        # p3.16xlarge. Rates of products measured in `v100_collective_profiles.csv.gz` (10^12 FLOP in 67.7 and 9.18 ms);
        # memory 900 GB/s and 16 GB, float64 7.8 TFLOP/s: V100 datasheet (nvidia.com/en-us/data-center/v100).
        _gpu(
            "V100-16GB",
            {"float64": 7.8 * _TB, "float32": 15.5 * _TB, "float16": 114 * _TB, "bfloat16": 15.5 * _TB},
            900 * _GB,
            16 * _GIB,
            _PCIE_3,
            matrix_share=1.0,
        ),
        # Fitted to the same profiles by relative error: NVLink 2 as a hybrid cube mesh, so that a ring's speed depends
        # on which devices it joins; 25 Gbit/s between hosts. The lines were written by
        # `python -m experiments.collectives --write cost/v100_links.json`.
        SwitchedHost(
            8,
            21.8 * _GB,
            2.6 * _GB,
            launch_s=46e-6,
            hop_s=24e-6,
            network_hop_s=115e-6,
            rings={
                (2, 1): (21.8 * _GB, 14.3 * _GB),
                (2, 2): (21.8 * _GB, 14.3 * _GB),
                (2, 4): (21.8 * _GB, 14.3 * _GB),
                (4, 1): (81.5 * _GB, 39.0 * _GB),
                (4, 2): (43.9 * _GB, 9.9 * _GB),
                (8, 1): (130.0 * _GB, 7.5 * _GB),
            },
            measured_lines=_lines_by_ring("v100_links.json"),
        ),
    ),
    "a100": (
        # A100-SXM4-80GB datasheet (nvidia.com/en-us/data-center/a100): TF32 156, bfloat16 312, int8 624, FP64 tensor
        # 19.5 TFLOP/s; 2039 GB/s; DGX A100: NVLink 3 at 300 GB/s each way, 8 ConnectX-6 at 200 Gbit/s.
        _gpu(
            "A100-80GB",
            {
                "float64": 19.5 * _TB,
                "float32": 156 * _TB,
                "bfloat16": 312 * _TB,
                "float16": 312 * _TB,
                "int8": 624 * _TB,
            },
            2039 * _GB,
            80 * _GIB,
            _PCIE_4,
            measured=_attention("a100"),
        ),
        SwitchedHost(8, 300 * _GB * _NVLINK, 200 * _GB * _NETWORK, _LAUNCH_S, _HOP_S, _NETWORK_HOP_S),
    ),
    # T4 datasheet (nvidia.com/en-us/data-center/tesla-t4): the rates below, 16 GB at 300 GB/s. Bfloat16, for which it
    # has no units, runs as float32. Hosts are AWS's g4dn.metal: 8 T4s, PCIe 3.0 x16 of 16 GB/s each way, of which 80%
    # is assumed, and 100 Gbit/s.
    "t4": (
        _gpu(
            "T4-16GB",
            {"float32": 8.1 * _TB, "bfloat16": 8.1 * _TB, "float16": 65 * _TB, "int8": 130 * _TB},
            300 * _GB,
            16 * _GB,
            _PCIE_3,
        ),
        SwitchedHost(8, 16 * _GB * 0.8, 12.5 * _GB * _NETWORK, _LAUNCH_S, _HOP_S, _NETWORK_HOP_S),
    ),
    # H100 SXM datasheet (nvidia.com/en-us/data-center/h100): the rates above without sparsity, 3.35 TB/s, 80 GB.
    "h100": (
        _gpu("H100-80GB", _HOPPER_FLOPS_PER_S, 3350 * _GB, 80 * _GIB, _PCIE_5, measured=_HOPPER_ATTENTION),
        _HOPPER_HOST,
    ),
    # H200 SXM datasheet (nvidia.com/en-us/data-center/h200): the H100's rates, 4.8 TB/s, 141 GB.
    "h200": (
        _gpu("H200-141GB", _HOPPER_FLOPS_PER_S, 4800 * _GB, 141 * _GB, _PCIE_5, measured=_HOPPER_ATTENTION),
        _HOPPER_HOST,
    ),
    # DGX B200 datasheet (nvidia.com/en-us/data-center/dgx-b200) and the architecture's brief; dense rates of one of its
    # 8 GPUs: bfloat16 2250, TF32 1125, float8 and int8 4500, float4 9000, FP64 37 TFLOP/s; 180 GB at 8 TB/s; NVLink 5
    # at 900 GB/s each way, 8 ConnectX-7 at 400 Gbit/s.
    "b200": (
        _gpu(
            "B200-180GB",
            {
                "float64": 37 * _TB,
                "float32": 1125 * _TB,
                "bfloat16": 2250 * _TB,
                "float16": 2250 * _TB,
                "float8_e4m3fn": 4500 * _TB,
                "float4_e2m1fn": 9000 * _TB,
                "int8": 4500 * _TB,
            },
            8000 * _GB,
            180 * _GB,
            _PCIE_5,
        ),
        SwitchedHost(8, 900 * _GB * _NVLINK, 400 * _GB * _NETWORK, _LAUNCH_S, _HOP_S, _NETWORK_HOP_S),
    ),
    # GH200 datasheet (nvidia.com/en-us/data-center/grace-hopper-superchip): the H100's rates, 96 GB at 4 TB/s, one GPU
    # in a host with 400 Gbit/s. NVLink-C2C joins it with its processor at 450 GB/s each way, of which copies reach 375
    # to the device and 297 to the host (Schieffer et al. 2024, arxiv.org/abs/2407.07850); the slower one is taken.
    "gh200": (
        _gpu("GH200-96GB", _HOPPER_FLOPS_PER_S, 4000 * _GB, 96 * _GB, 297 * _GB, measured=_HOPPER_ATTENTION),
        SwitchedHost(1, 450 * _GB * _NVLINK, 50 * _GB * _NETWORK, _LAUNCH_S, _HOP_S, _NETWORK_HOP_S),
    ),
    # cloud.google.com/tpu/docs/v5e: 197 TFLOP/s bfloat16, 393 int8, 16 GB at 819 GB/s, 2D torus of 256 chips, 400 GB/s
    # over 4 links both ways, 6.4 Tbit/s out of a pod. A hop takes about 1 µs and an axis of 16 closes to a ring:
    # jax-ml.github.io/scaling-book/tpus.
    "tpu_v5e": (
        Hardware("TPU v5e", {"float32": 197 * _TB, "bfloat16": 197 * _TB, "int8": 393 * _TB}, 819 * _GB, 16 * _GIB, {}),
        TorusPod(256, 16, 50 * _GB, 3.125 * _GB, launch_s=1e-6, hop_s=1e-6, network_hop_s=10e-6),
    ),
    # docs.cloud.google.com/tpu/docs/v5p: 459 TFLOP/s bfloat16, int8 twice that, 95 GiB at 2765 GB/s, 3D torus of 8960
    # chips, 1200 GB/s over 6 links both ways, 50 Gbit/s for each chip out of a pod; axes of 4, 8, ... close to rings.
    "tpu_v5p": (
        Hardware(
            "TPU v5p", {"float32": 459 * _TB, "bfloat16": 459 * _TB, "int8": 918 * _TB}, 2765 * _GB, 95 * _GIB, {}
        ),
        TorusPod(8960, 4, 100 * _GB, 6.25 * _GB, launch_s=1e-6, hop_s=1e-6, network_hop_s=10e-6),
    ),
    # docs.cloud.google.com/tpu/docs/v6e: 918 TFLOP/s bfloat16, int8 twice that, 32 GB at 1638 GB/s, 2D torus of 256
    # chips, 800 GB/s over 4 links both ways; a host of 8 chips has 4 cards of 200 Gbit/s. A product of 8192 x 8192 x
    # 8192 reaches 827 TFLOP/s (github.com/AI-Hypercomputer/tpu-recipes, microbenchmarks/README.md).
    "tpu_v6e": (
        Hardware(
            "TPU v6e",
            {"float32": 918 * _TB, "bfloat16": 918 * _TB, "int8": 1836 * _TB},
            1638 * _GB,
            32 * _GIB,
            {},
            matrix_share=0.90,
        ),
        TorusPod(256, 16, 100 * _GB, 12.5 * _GB, launch_s=1e-6, hop_s=1e-6, network_hop_s=10e-6),
    ),
    # Two cores of an AMD EPYC 9005 with XLA's CPU backend, as `diffshard.hardware.calibrate` measures them on 8
    # simulated devices (python -m experiments.calibration): the whole processor's rates, which they share.
    "cpu": (
        Hardware(
            "CPU, 2 cores",
            {"float32": 0.16 * _TB, "bfloat16": 0.24 * _TB},
            33 * _GB,
            24 * _GIB,
            {},
            combines_gathers=False,
        ),
        SharedProcessor(1.6 * _GB, launch_s=250e-6, hop_s=60e-6),
    ),
}
PRESET_NAMES: tuple[str, ...] = tuple(_PRESETS)

# Parts of a device's `device_kind` in lower case and the preset that each stands for, the more specific first.
_PRESET_OF_KIND = (
    ("gh200", "gh200"),
    ("h200", "h200"),
    (" b200", "b200"),  # with the space, because hosts of GB200s are others
    ("h100", "h100"),
    ("a100", "a100"),
    ("v100", "v100"),
    ("t4", "t4"),
    ("v5 lite", "tpu_v5e"),
    ("v5e", "tpu_v5e"),
    ("v5p", "tpu_v5p"),
    ("tpu v5", "tpu_v5p"),
    ("v6 lite", "tpu_v6e"),
    ("v6e", "tpu_v6e"),
    ("cpu", "cpu"),
)


def preset(
    name: str,
    mesh_axes: Mapping[str, int],
    *,
    links: Mapping[str, Link] | None = None,
    devices_per_host: int | None = None,
    hosts: Mapping[str, int] | None = None,
) -> Hardware:
    """Returns known hardware with a link for each axis of a mesh.

    Args:
      name: one of `PRESET_NAMES`; case and `-` or `_` don't matter.
      mesh_axes: sizes of the mesh's axes, slowest first: `{"data": 4, "model": 8}`, or a mesh's `shape`.
      links: links to take as they are, for some axes or for all.
      devices_per_host: devices in a host (or pod), where it isn't the usual number.
      hosts: for each axis the hosts (or pods) that a group along it is in; None takes what follows from the order of
        the axes, whose last one's neighbours are neighbours in the host.

    Raises:
      TypeError: `mesh_axes` is no mapping, such as a mesh in place of its `shape`.
      ValueError: unknown name; an axis that is not positive; a link for an axis that the mesh doesn't have.
    """
    device, network = device_and_network(name)
    _check_axes(mesh_axes, links or {})
    if devices_per_host is not None:
        network = dataclasses.replace(network, num_devices=devices_per_host)
    num_devices = math.prod(mesh_axes.values()) if hosts is None else devices_per_host or 1
    own_part = share_of_host(network, device, num_devices)
    return dataclasses.replace(own_part, links={**links_of(network, mesh_axes, hosts), **(links or {})})


def device_and_network(name: str) -> tuple[Hardware, Network]:
    """Returns known hardware: a device without links, and how such devices are connected; `name` as in `preset`.

    Raises:
      ValueError: unknown name.
    """
    key = name.lower().replace("-", "_").replace(" ", "_")
    if key not in _PRESETS:
        raise ValueError(f"`hardware` {name!r} is unknown; there are {', '.join(PRESET_NAMES)}. Or give a `Hardware`.")
    return _PRESETS[key]


def preset_of_mesh(name: str, mesh: Any) -> Hardware:
    """Returns known hardware with a link for each axis of a mesh, whose devices say which hosts they are in.

    Args:
      name: as in `preset`.
      mesh: `jax.sharding.Mesh`, or an `AbstractMesh`, whose hosts follow from the order of its axes. So do those of
        devices that are all in one host.

    Raises:
      ValueError: as `preset`.
    """
    if not isinstance(mesh, AbstractMesh):
        hosts = hosts_along(mesh)
        if max(hosts.values(), default=1) > 1:
            is_of_pods = name.lower().startswith("tpu")
            per_host = None if is_of_pods else devices_in_host(mesh)
            return preset(name, dict(mesh.shape), devices_per_host=per_host, hosts=hosts)
    return preset(name, dict(mesh.shape))


def hardware_of(mesh: Any) -> Hardware:
    """Returns the preset of the devices that a mesh is made of.

    Args:
      mesh: `jax.sharding.Mesh`, or an `AbstractMesh` that knows its abstract device.

    Raises:
      ValueError: an abstract mesh without a device, or devices without a preset.
    """
    if isinstance(mesh, AbstractMesh):
        kind = None if mesh.abstract_device is None else mesh.abstract_device.device_kind
    else:
        kind = mesh.devices.flat[0].device_kind
    if kind is None:
        raise ValueError(
            "`hardware` must be given for an AbstractMesh, which has no devices: one of "
            f"{', '.join(PRESET_NAMES)}, or a `Hardware`."
        )
    return preset_of_mesh(preset_name_of(kind), mesh)


def preset_name_of(device_kind: str) -> str:
    """Returns the name of the preset of a JAX device's `device_kind`.

    Raises:
      ValueError: it has no preset.
    """
    for part, name in _PRESET_OF_KIND:
        if part in str(device_kind).lower():
            return name
    raise ValueError(
        f"`hardware` has no preset for devices of the kind {device_kind!r}; there are {', '.join(PRESET_NAMES)}. "
        "Give a `Hardware`, or measure one with `diffshard.hardware.calibrate(mesh)`."
    )


def _check_axes(mesh_axes: Mapping[str, int], links: Mapping[str, Link]) -> None:
    if not isinstance(mesh_axes, Mapping):
        kind = type(mesh_axes).__name__
        raise TypeError(f"`mesh_axes` must map the mesh's axes to their sizes, as `dict(mesh.shape)` does, not {kind}.")
    for axis, size in mesh_axes.items():
        if size != int(size) or size < 1:
            raise ValueError(f"`mesh_axes` {axis!r} must have a positive whole number of devices, not {size!r}.")
    for axis in links:
        if axis not in mesh_axes:
            raise ValueError(
                f"`links` has an axis {axis!r} that the mesh doesn't have; its axes are {tuple(mesh_axes)}."
            )

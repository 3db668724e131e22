"""Hardware as it was measured: on the devices of a mesh that is here, or in published measurements of kernels.

`calibrate` measures arithmetic by dtype, memory bandwidth, and the link of each axis. In measured presets products
follow a law of their shapes and collectives inside a host lines, all fitted to measured kernels; the presets of
`cost.presets` price products at one share of the datasheet's rate, and NVLink by a rule.
"""

import dataclasses
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cost.base import COLLECTIVE_KINDS, CollectiveKind, Hardware, Link
from cost.collectives import collective_sent_bytes
from cost.lines import fit_latency_and_slope, fit_lines
from cost.measured_rates import measured_lines, measured_rates
from cost.networks import SwitchedHost, hosts_along, links_of
from cost.presets import EXPOSED_ON_GPU, device_and_network


def calibrate(
    mesh: Mesh,
    *,
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    matrix_size: int = 2048,
    largest_bytes: int = 2**26,
    repeats: int = 7,
) -> Hardware:
    """Measures one device and the links of a mesh by running on it.

    `diffshard.hardware.calibrate` explains the arguments and the result; it lets the processes of a job agree, too.

    Raises:
      ValueError: an abstract mesh, one without a device of this process, or a size or number that is too small.
    """
    if not isinstance(mesh, Mesh):
        raise ValueError(f"`mesh` must hold real devices to be measured, not {mesh!r}; use a preset to plan without.")
    for name, value, least in (
        ("matrix_size", matrix_size, 1),
        ("largest_bytes", largest_bytes, 2**14),
        ("repeats", repeats, 1),
    ):
        if value < least:
            raise ValueError(f"`{name}` must be at least {least}, not {value}.")
    if all(device.process_index != jax.process_index() for device in mesh.devices.flat):
        raise ValueError(f"`mesh` has no device of this process, number {jax.process_index()}, to be measured.")
    device, hosts = mesh.devices.flat[0], hosts_along(mesh)
    return Hardware(
        name=f"{device.device_kind}, measured on {mesh.size} device{'s' if mesh.size > 1 else ''}",
        flops_per_s={dtype: _flops_per_s(mesh, dtype, matrix_size, repeats) for dtype in dtypes},
        memory_bytes_per_s=_memory_bytes_per_s(mesh, largest_bytes, repeats),
        memory_bytes=_memory_bytes(mesh),
        links={
            axis: dataclasses.replace(_link(mesh, axis, largest_bytes, repeats), num_hosts=hosts[axis])
            for axis in mesh.axis_names
        },
        combines_gathers=device.platform != "cpu",
        exposed_share=EXPOSED_ON_GPU if device.platform == "gpu" else 1.0,
    )


def _everywhere(mesh: Mesh, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Makes an array with one block of `shape` on each device, stacked along a new first dimension."""
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    make = jax.jit(lambda: jnp.ones((mesh.size, *shape), jnp.dtype(dtype)), out_shardings=sharding)
    return make()


def _flops_per_s(mesh: Mesh, dtype: str, size: int, repeats: int) -> float:
    x = _everywhere(mesh, (size, size), dtype)
    product = jax.jit(lambda a: jnp.einsum("dij,djk->dik", a, a), out_shardings=x.sharding)
    return 2.0 * size**3 / median_s(lambda: product(x), repeats)


def _memory_bytes_per_s(mesh: Mesh, num_bytes: int, repeats: int) -> float:
    arrays = [_everywhere(mesh, (num_bytes // 4,), "float32")]
    # Donated, or the time is that of getting new pages from the operating system.
    increment = jax.jit(lambda a: a + 1, out_shardings=arrays[0].sharding, donate_argnums=0)

    def call() -> jax.Array:
        arrays.append(increment(arrays.pop()))
        return arrays[0]

    return 2.0 * num_bytes / median_s(call, repeats)  # one read, one write


def _memory_bytes(mesh: Mesh) -> float:
    own = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    stats = own[0].memory_stats()
    if stats and stats.get("bytes_limit"):
        return float(stats["bytes_limit"])
    # Simulated devices share the host's memory.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / len(own)


def _link(mesh: Mesh, axis: str, largest_bytes: int, repeats: int) -> Link:
    if mesh.shape[axis] == 1:
        return Link(0.0, 0.0)
    points = {kind: _times(mesh, axis, kind, largest_bytes, repeats) for kind in COLLECTIVE_KINDS}
    rings = np.concatenate([points["all_gather"], points["all_reduce"]], axis=1)
    return Link(*fit_latency_and_slope(*rings), {kind: fit_lines(*points[kind]) for kind in COLLECTIVE_KINDS})


def _times(mesh: Mesh, axis: str, kind: CollectiveKind, largest_bytes: int, repeats: int) -> np.ndarray:
    """Measures one kind of collective at sizes a factor of four apart: bytes sent and seconds, `[2, sizes]`."""
    n = mesh.shape[axis]
    points = []
    largest_local_bytes = largest_bytes // (n if kind == "all_gather" else 1)
    local_bytes = min(2**12, largest_local_bytes)
    while local_bytes <= largest_local_bytes:
        x = _everywhere(mesh, (n, max(1, local_bytes // (4 * n))), "float32")
        full_bytes = x.nbytes // mesh.size * (n if kind in ("all_gather", "all_to_all") else 1)
        call = jax.jit(collective_on_blocks(mesh, axis, kind))
        seconds = median_s(partial(call, x), repeats)
        points.append((float(collective_sent_bytes(kind, full_bytes, n)), seconds))
        local_bytes *= 4
    return np.array(points).T


def collective_on_blocks(mesh: Mesh, axis: str, kind: CollectiveKind) -> Callable[[jax.Array], jax.Array]:
    """Returns a function that runs one collective along an axis on blocks `[1, n, columns]` of n devices each."""
    n = mesh.shape[axis]

    def local(x: jax.Array) -> jax.Array:
        match kind:
            case "all_gather":
                return jax.lax.all_gather(x, axis, axis=1, tiled=True)
            case "all_reduce":
                return jax.lax.psum(x, axis)
            case "reduce_scatter":
                return jax.lax.psum_scatter(x, axis, scatter_dimension=1, tiled=True)
            case "all_to_all":
                return jax.lax.all_to_all(x, axis, split_axis=1, concat_axis=1, tiled=True)
        return jax.lax.ppermute(x, axis, [(i, (i + 1) % n) for i in range(n)])

    spec = PartitionSpec(mesh.axis_names)
    return jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)


def median_s(call: Callable[[], object], repeats: int) -> float:
    """Measures the median seconds of a call, its results awaited, after a first call that compiles."""
    return statistics.median(call_seconds(call, repeats))


def call_seconds(
    call: Callable[[], object], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Measures the seconds of calls, their results awaited, after a first call that compiles."""
    jax.block_until_ready(call())
    seconds = []
    for _ in range(repeats):
        start = clock()
        jax.block_until_ready(call())
        seconds.append(clock() - start)
    return seconds


MEASURED: tuple[str, ...] = ("a100", "h100", "h200", "b200")
"""Presets of which kernels were measured."""


def measured_preset(name: str, mesh_axes: Mapping[str, int]) -> Hardware:
    """Returns the preset of a GPU with products, attention and collectives inside a host as they were measured.

    Args:
      name: one of `MEASURED`.
      mesh_axes: sizes of the mesh's axes, slowest first, as for `cost.presets.preset`.

    Raises:
      ValueError: nothing was measured of this hardware.
    """
    device, network = measured_device_and_network(name)
    return dataclasses.replace(device, links=links_of(network, mesh_axes))


def measured_device_and_network(name: str) -> tuple[Hardware, SwitchedHost]:
    """Returns the device without links, and how such devices are connected; raises as `measured_preset`.

    Collectives inside a host take the measured lines, whatever devices of it they join.
    """
    if name not in MEASURED:
        raise ValueError(f"`name` {name!r} was not measured; there are {', '.join(MEASURED)}.")
    device, network = device_and_network(name)
    assert isinstance(network, SwitchedHost)
    rates = measured_rates(name)
    rates = dataclasses.replace(rates, attention=rates.attention or device.measured.attention)
    lines = {
        (network.num_devices, size, stride): by_kind
        for size, by_kind in measured_lines(name).items()
        for stride in (2**power for power in range(int(math.log2(network.num_devices // size)) + 1))
    }
    return dataclasses.replace(device, measured=rates), dataclasses.replace(network, measured_lines=lines)

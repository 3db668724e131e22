"""`diffshard calibrate`: the devices that are here are measured, and written down for searches."""

import argparse
import math
from dataclasses import replace

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from cost.base import Hardware
from diffshard.command.arguments import UsageError, check_writable, writing
from diffshard.hardware import calibrate, save_hardware
from diffshard.plans.formats import format_bytes, format_s, format_table


def measure_hardware(options: argparse.Namespace) -> int:
    """Measures the devices of a mesh, prints what they reach, writes it to `--output`, and returns the exit code."""
    check_writable("--output", options.output)
    sizes, devices = tuple(options.mesh.values()), jax.devices()
    if len(devices) < math.prod(sizes):
        raise UsageError(
            f"--mesh has {math.prod(sizes)} devices, and there are {len(devices)}: {devices[0].device_kind}. Name axes "
            "with the sizes of this machine"
        )
    grid = np.array(devices[: math.prod(sizes)]).reshape(sizes)
    mesh = Mesh(grid, tuple(options.mesh), axis_types=(AxisType.Auto,) * grid.ndim)
    given = {"matrix_size": options.matrix_size, "largest_bytes": options.largest, "repeats": options.repeats}
    try:
        hardware = calibrate(mesh, dtypes=options.dtypes, **{k: int(v) for k, v in given.items() if v is not None})
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from None
    hardware = hardware if options.name is None else replace(hardware, name=options.name)
    print(_text(hardware, options.mesh), flush=True)
    if options.output:
        with writing("--output", options.output):
            save_hardware(hardware, options.output)
    return 0


def _text(hardware: Hardware, axes: dict[str, int]) -> str:
    """Returns what was measured as a table."""
    rates = hardware.flops_per_s if isinstance(hardware.flops_per_s, dict) else {}
    rows = [("products", dtype, f"{rate / 1e12:.3g} TFLOP/s") for dtype, rate in rates.items()]
    rows.append(("memory", format_bytes(hardware.memory_bytes), f"{hardware.memory_bytes_per_s / 1e9:.3g} GB/s"))
    for axis, size in axes.items():
        link = hardware.link(axis)
        bandwidth = f"{1e-9 / link.s_per_byte:.3g} GB/s" if link.s_per_byte else "as fast for any size"
        measured = f"{bandwidth}, latency {format_s(link.latency_s)}" if size > 1 else "one device"
        rows.append(("links", f"{axis} {size}", measured))
    return "\n".join([hardware.name, "", *format_table(rows, "  ")])

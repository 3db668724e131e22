"""`diffshard search --check numbers`: the plan runs once, and its results are held against another run."""

import argparse
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from cost.clusters import Cluster
from diffshard.base import NumbersError
from diffshard.command.arguments import UsageError
from diffshard.command.terminal import FailedError
from diffshard.sharding_search.plan import Plan

_DEVICES_FLAG = "xla_force_host_platform_device_count"


def make_devices(options: argparse.Namespace, cluster: Cluster | None) -> None:
    """Sees to it that this process has as many devices as the plan will be for, before JAX makes any."""
    num_devices = options.devices if cluster is None else cluster.num_devices
    if options.mesh:
        num_devices = math.prod(options.mesh.values())
    if "JAX_PLATFORMS" not in os.environ and _DEVICES_FLAG not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", num_devices)


def arrays_of(make: Callable[[], Any]) -> tuple[Any, ...]:
    """Returns the arguments of the step, as the function of `--args` makes them.

    Raises:
      UsageError: they are shapes, not arrays.
    """
    made = make()
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(made)):
        raise UsageError("--check numbers runs the function, so that --args has to return arrays, not shapes")
    return tuple(made) if type(made) in (tuple, list) else (made,)


def run_once(plan: Plan, function: Callable[..., Any], args: Sequence[Any]) -> None:
    """Runs a plan once, and says that the results are right.

    Raises:
      FailedError: they are not, or there are too few devices.
    """
    num_devices = math.prod(plan.mesh_axes.values())
    devices = jax.devices()
    if len(devices) < num_devices:
        raise FailedError(
            f"--check numbers needs {num_devices} devices, and there are {len(devices)}. For host devices set "
            f"JAX_PLATFORMS=cpu XLA_FLAGS=--{_DEVICES_FLAG}={num_devices}."
        )
    grid = np.array(devices[:num_devices]).reshape(tuple(plan.mesh_axes.values()))
    mesh = Mesh(grid, tuple(plan.mesh_axes), axis_types=(AxisType.Auto,) * grid.ndim)
    try:
        plan.apply(function, mesh, check="numbers")(*args)
    except NumbersError as error:
        raise FailedError(str(error)) from None
    print(f"numbers  right: by {plan.executor} the first call gives what another run gives, but for rounding")

"""Meshes of host devices, on which a plan for many devices runs on one machine."""

import math
import os
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

AXIS_NAMES = {1: ("data",), 2: ("data", "model"), 3: ("data", "model", "third")}


def host_mesh(shape: Sequence[int], count: int = 8) -> Mesh:
    """Makes a mesh of the given shape from the first of `count` host devices.

    Raises:
      RuntimeError: JAX was already used in this process with fewer host devices than the shape needs.
    """
    flag = "--xla_force_host_platform_device_count"
    # XLA reads the flag when the first array is made, not when JAX is imported.
    if flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}={count}".strip()
    devices = jax.devices("cpu")
    if len(devices) < math.prod(shape):
        raise RuntimeError(
            f"A mesh of shape {tuple(shape)} needs {math.prod(shape)} host devices, but JAX has {len(devices)}. "
            f"Set XLA_FLAGS={flag}={count} before the process first uses JAX."
        )
    grid = np.asarray(devices[: math.prod(shape)]).reshape(shape)
    return Mesh(grid, AXIS_NAMES[len(shape)], axis_types=(AxisType.Auto,) * len(shape))


def parse_mesh(text: str) -> tuple[int, ...]:
    """Reads a mesh shape from a command line: "2x4" is (2, 4).

    Raises:
      ValueError: the text is not one to three positive integers joined by x.
    """
    try:
        shape = tuple(int(part) for part in text.split("x"))
    except ValueError:
        shape = ()
    if len(shape) not in AXIS_NAMES or min(shape) < 1:
        raise ValueError(f"a mesh is one to three positive integers joined by x, such as 2x4; got {text!r}")
    return shape

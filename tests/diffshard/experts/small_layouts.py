"""Layouts of six experts on eight host devices, for tests."""

import jax
import numpy as np
from jax.sharding import Mesh

from diffshard.experts.layout import ExpertLayout

NUM_EXPERTS = 6


def small_layout(name: str) -> ExpertLayout:
    """Makes a layout: "one device", "rectangle", "equal groups" that hold experts differently, or "unequal groups"."""
    devices = np.array(jax.devices())
    if name == "one device":
        mesh = Mesh(devices[:1].reshape(1, 1), ("data", "expert"))
        return ExpertLayout(mesh, "expert", ((0,),), (tuple(range(NUM_EXPERTS)),))
    if name == "rectangle":
        mesh = Mesh(devices.reshape(2, 4), ("data", "expert"))
        return ExpertLayout(mesh, "expert", ((0, 1, 2, 3),), ((0, 3), (1,), (2, 4, 5), ()))
    groups, experts = {
        "equal groups": (
            ((0, 2, 4, 6), (1, 3, 5, 7)),
            ((0, 1), (3, 5), (2,), (0,), (3, 4), (1, 2), (5,), (4,)),
        ),
        "unequal groups": (
            ((0, 4), (1, 3, 5), (2, 6, 7)),
            ((0, 1, 2), (3, 5, 4), (2,), (0,), (3, 4, 5), (1, 2), (5, 4, 0), (3, 1)),
        ),
    }[name]
    return ExpertLayout(Mesh(devices, ("expert",)), "expert", groups, experts)

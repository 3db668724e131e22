"""A target whose compiler crashes, as XLA's do at times."""

import os
from dataclasses import dataclass

from jax.sharding import Mesh

from diffshard.checks.targets import Target


@dataclass(frozen=True)
class CrashingTarget(Target):
    """A target that ends its process with SIGABRT when something is compiled for it."""

    def mesh(self, axis_sizes: dict[str, int]) -> Mesh:
        """Ends the process."""
        os.abort()

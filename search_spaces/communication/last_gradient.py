"""The gradient of the last step, sent while this step computes: nothing in this step waits for its sum."""

import math
from dataclasses import dataclass, replace

import jax.numpy as jnp

from search_spaces.communication.base import CollectiveStrategy
from search_spaces.communication.strategies import Exact

_EXACT = Exact()


@dataclass(frozen=True)
class LastGradient:
    """Each step applies the gradient of the step before, and keeps its own for the next one.

    The gradients are those of the weights of one step ago: with optimisers that leave weights as they are where no
    gradient has come yet, such as SGD with or without momentum, step t + 1 makes the weights that step t of
    `diffshard.pipelines.delayed` makes. The last gradient of a training is not applied.

    >>> strategies = {"gradient": (Exact(), LastGradient(compute_s=2e-3))}

    Attributes:
      compute_s: seconds of a step in which the device computes and its links have nothing else to send. The price of a
        transfer is what remains after them.
      strategy: by which the gradient is sent.

    Raises:
      ValueError: `compute_s` is not positive and finite.

    Source: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (PipeDream-2BW, 2021), section 3.1.
    """

    compute_s: float
    strategy: CollectiveStrategy = _EXACT
    is_exact = False
    keeps_residual = True

    def __post_init__(self):
        if not 0 < self.compute_s < math.inf:
            raise ValueError(
                f"`compute_s` must be positive and finite, in seconds, not {self.compute_s}; give the time that a step "
                "computes without sending."
            )

    @property
    def name(self) -> str:  # noqa: D102
        return f"{self.strategy.name} of the last gradient"

    def run(self, collective, x, residual, key, step):  # noqa: D102
        before = jnp.zeros(x.shape, jnp.float32) if residual is None else residual
        y, not_sent = self.strategy.run(collective, jnp.zeros_like(x), before, key, step)
        return y, not_sent + x.astype(jnp.float32)

    def stages(self, collective, shape, dtype):  # noqa: D102
        stages = self.strategy.stages(collective, shape, dtype)
        sent_bytes = sum(stage.sent_bytes for stage in stages) or 1.0
        return [replace(stage, hidden_s=self.compute_s * stage.sent_bytes / sent_bytes) for stage in stages]

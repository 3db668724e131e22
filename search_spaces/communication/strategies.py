"""Ways to run a collective: exact, encoded, with error feedback, every k-th step, one way first and another later."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from search_spaces.communication.collectives import CollectiveOp, Stage
from search_spaces.communication.precision import BFLOAT16, FLOAT8, INT4, INT8, Precision


class CollectiveStrategy(Protocol):
    """A way to run a collective.

    Strategies that keep a residual are for gradients: what they have not sent yet is added to the next step's operand,
    whichever strategy sends that.

    Attributes:
      name: for people, choices and plans; no two strategies of a site share one.
      lossless: whether the result is the plain collective's, always.
      keeps_residual: whether it ever leaves something for later.
    """

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def lossless(self) -> bool: ...  # noqa: D102
    @property
    def keeps_residual(self) -> bool: ...  # noqa: D102

    def run(
        self, collective: CollectiveOp, x: jax.Array, key: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The collective's result, and this device's part of what is still to be sent (float32, shaped as `x`).

        Args:
          collective: to be run.
          x: this device's operand.
          key: a random key, the same on all devices.
          step: number of the training step, an integer scalar.
        """
        ...

    def stages(self, collective: CollectiveOp, shape: Sequence[int], dtype: np.dtype) -> list[Stage]:
        """What it sends in the mean step."""
        ...


@dataclass(frozen=True)
class Exact:
    """The plain collective in the data's own type."""

    name: str = "exact"
    lossless: bool = True
    keeps_residual: bool = False

    def run(self, collective, x, key, step):  # noqa: D102
        return collective.exact(x), jnp.zeros(x.shape, jnp.float32)

    def stages(self, collective, shape, dtype):  # noqa: D102
        return collective.stages(shape, dtype, None)


@dataclass(frozen=True)
class Encode:
    """Codes travel; what rounding loses is lost."""

    precision: Precision
    lossless: bool = False
    keeps_residual: bool = False

    @property
    def name(self) -> str:  # noqa: D102
        return self.precision.name

    def run(self, collective, x, key, step):  # noqa: D102
        return collective.encoded(x, self.precision, key)[0], jnp.zeros(x.shape, jnp.float32)

    def stages(self, collective, shape, dtype):  # noqa: D102
        return collective.stages(shape, dtype, self.precision)


@dataclass(frozen=True)
class ErrorFeedback:
    """Codes travel; what rounding loses is added to the next step's gradient. For all-reduces of gradients.

    Source: Seide et al., "1-bit stochastic gradient descent" (2014); rounding of the sums is fed back too, as in Tang
    et al., "1-bit Adam" (2021).
    """

    precision: Precision
    lossless: bool = False
    keeps_residual: bool = True

    @property
    def name(self) -> str:  # noqa: D102
        return f"{self.precision.name} with error feedback"

    def run(self, collective, x, key, step):  # noqa: D102
        y, left = collective.encoded(x, self.precision, key)
        return y, left

    def stages(self, collective, shape, dtype):  # noqa: D102
        return collective.stages(shape, dtype, self.precision)


@dataclass(frozen=True)
class EveryK:
    """Gradients add up on each device and their sum is sent in each k-th step; in the others the result is zero.

    Attributes:
      k: steps from one to the next.
      strategy: how the sum is sent.

    Raises:
      ValueError: `k` is less than 2.
    """

    k: int
    strategy: CollectiveStrategy = Exact()
    lossless: bool = False
    keeps_residual: bool = True

    def __post_init__(self):
        if self.k < 2:
            raise ValueError(f"`k` must be at least 2, not {self.k}; use the strategy itself to send in each step.")

    @property
    def name(self) -> str:  # noqa: D102
        return f"{self.strategy.name} every {self.k} steps"

    def run(self, collective, x, key, step):  # noqa: D102
        return lax.cond(
            step % self.k == self.k - 1,
            lambda x, key: self.strategy.run(collective, x, key, step),
            lambda x, key: (jnp.zeros_like(x), x.astype(jnp.float32)),
            x,
            key,
        )

    def stages(self, collective, shape, dtype):  # noqa: D102
        return _scaled(self.strategy.stages(collective, shape, dtype), 1 / self.k)


@dataclass(frozen=True)
class Schedule:
    """One strategy before a step, another from it on.

    Attributes:
      first: until the switch.
      second: from it on.
      switch_step: the first step of `second`.
      num_steps: of the whole training; its mean step is what is priced.

    Raises:
      ValueError: `switch_step` is not within the training.
    """

    first: CollectiveStrategy
    second: CollectiveStrategy
    switch_step: int
    num_steps: int

    def __post_init__(self):
        if not 0 < self.switch_step < self.num_steps:
            raise ValueError(
                f"`switch_step` must lie between 0 and `num_steps`, {self.num_steps}, not {self.switch_step}; "
                "use the strategy itself where there is no switch."
            )

    @property
    def name(self) -> str:  # noqa: D102
        return f"{self.first.name}, {self.second.name} from step {self.switch_step}"

    @property
    def lossless(self) -> bool:  # noqa: D102
        return self.first.lossless and self.second.lossless

    @property
    def keeps_residual(self) -> bool:  # noqa: D102
        return self.first.keeps_residual or self.second.keeps_residual

    def run(self, collective, x, key, step):  # noqa: D102
        return lax.cond(
            step < self.switch_step,
            lambda x, key: self.first.run(collective, x, key, step),
            lambda x, key: self.second.run(collective, x, key, step),
            x,
            key,
        )

    def stages(self, collective, shape, dtype):  # noqa: D102
        share = self.switch_step / self.num_steps
        first = _scaled(self.first.stages(collective, shape, dtype), share)
        return first + _scaled(self.second.stages(collective, shape, dtype), 1 - share)


def _scaled(stages: list[Stage], share: float) -> list[Stage]:
    return [replace(stage, count=stage.count * share) for stage in stages]


_NARROW = tuple(Encode(precision) for precision in (BFLOAT16, FLOAT8, INT8, INT4))
DEFAULT: dict[str, tuple[CollectiveStrategy, ...]] = {
    "forward": (Exact(), *_NARROW),
    "backward": (Exact(), *_NARROW),
    "gradient": (Exact(), *_NARROW, ErrorFeedback(INT8), ErrorFeedback(INT4), EveryK(4)),
}
"""What each direction can choose from where the user gives nothing: the plain collective first."""

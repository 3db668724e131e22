"""Ways to run a collective: exact, encoded, with error feedback, every k-th step, one way first and another later.

Each is a frozen dataclass that follows `base.CollectiveStrategy`. A new one needs no registration: give it in the
`strategies` of a space. Whether a strategy is exact or keeps a residual follows from its class, so these are attributes
without a type: `dataclass` makes no arguments of them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cost.base import CollectiveKind
from search_spaces.communication.base import (
    BFLOAT16,
    FLOAT8,
    INT4,
    INT8,
    CollectiveOp,
    CollectiveStrategy,
    Precision,
    Stage,
)
from search_spaces.communication.collectives import encoded_bytes, run_encoded, run_exact


@dataclass(frozen=True)
class Exact:
    """The plain collective, in the data's own type."""

    name = "exact"
    is_exact = True
    keeps_residual = False

    def run(self, collective, x, residual, key, step):  # noqa: D102
        operand, cast_loss = with_residual(x, residual)
        return run_exact(collective, operand), cast_loss

    def stages(self, collective, shape, dtype):  # noqa: D102
        return stages_of(collective, shape, dtype, None)


@dataclass(frozen=True)
class Encode:
    """The operand is sent as codes; what rounding loses is lost."""

    precision: Precision
    is_exact = False
    keeps_residual = False

    @property
    def name(self) -> str:  # noqa: D102
        return self.precision.name

    def run(self, collective, x, residual, key, step):  # noqa: D102
        operand, cast_loss = with_residual(x, residual)
        return run_encoded(collective, operand, self.precision, key)[0], cast_loss

    def stages(self, collective, shape, dtype):  # noqa: D102
        return stages_of(collective, shape, dtype, self.precision)


@dataclass(frozen=True)
class ErrorFeedback:
    """The gradient is sent as codes; what rounding loses is added to the gradient of the next step.

    Source: Seide et al., "1-bit stochastic gradient descent" (2014). What the rounding of the sums loses is fed back
    too, as in Tang et al., "1-bit Adam" (2021). What is not finite is lost and not fed back: otherwise one overflow
    would stay in every later gradient, though the training leaves out its step.
    """

    precision: Precision
    is_exact = False
    keeps_residual = True

    @property
    def name(self) -> str:  # noqa: D102
        return f"{self.precision.name} with error feedback"

    def run(self, collective, x, residual, key, step):  # noqa: D102
        operand, cast_loss = with_residual(x, residual)
        y, rounding_loss = run_encoded(collective, operand, self.precision, key)
        assert rounding_loss is not None, "gradients are summed by reductions, which have a residual"
        residual = rounding_loss + cast_loss
        return y, jnp.where(jnp.isfinite(residual), residual, 0)

    def stages(self, collective, shape, dtype):  # noqa: D102
        return stages_of(collective, shape, dtype, self.precision)


@dataclass(frozen=True)
class EveryK:
    """Each device adds up its gradients and sends their sum in every k-th step; the result of the other steps is zero.

    Attributes:
      k: steps from one time of sending to the next.
      strategy: by which the sum is sent.

    Raises:
      ValueError: `k` is less than 2.
    """

    k: int
    strategy: CollectiveStrategy = Exact()
    is_exact = False
    keeps_residual = True

    def __post_init__(self):
        if self.k < 2:
            raise ValueError(f"`k` must be at least 2, not {self.k}; use the strategy itself to send in each step.")

    @property
    def name(self) -> str:  # noqa: D102
        return f"{self.strategy.name} every {self.k} steps"

    def run(self, collective, x, residual, key, step):  # noqa: D102
        return lax.cond(
            step % self.k == self.k - 1,
            lambda x, residual, key: self.strategy.run(collective, x, residual, key, step),
            lambda x, residual, key: (
                jnp.zeros_like(x),
                x.astype(jnp.float32) + (0.0 if residual is None else residual),
            ),
            x,
            residual,
            key,
        )

    def stages(self, collective, shape, dtype):  # noqa: D102
        return _scaled_stages(self.strategy.stages(collective, shape, dtype), 1 / self.k)


@dataclass(frozen=True)
class Schedule:
    """One strategy until a training step, another one from that step on.

    Attributes:
      first: the strategy of the steps before `switch_step`.
      second: the strategy from `switch_step` on.
      switch_step: the first step of `second`.
      num_steps: of the whole training; the price is that of its average step.

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
    def is_exact(self) -> bool:  # noqa: D102
        return self.first.is_exact and self.second.is_exact

    @property
    def keeps_residual(self) -> bool:  # noqa: D102
        return self.first.keeps_residual or self.second.keeps_residual

    def run(self, collective, x, residual, key, step):  # noqa: D102
        return lax.cond(
            step < self.switch_step,
            lambda x, residual, key: self.first.run(collective, x, residual, key, step),
            lambda x, residual, key: self.second.run(collective, x, residual, key, step),
            x,
            residual,
            key,
        )

    def stages(self, collective, shape, dtype):  # noqa: D102
        share = self.switch_step / self.num_steps
        first = _scaled_stages(self.first.stages(collective, shape, dtype), share)
        return first + _scaled_stages(self.second.stages(collective, shape, dtype), 1 - share)


def without_schedules(
    strategies: Sequence[CollectiveStrategy], step: jax.Array
) -> tuple[list[CollectiveStrategy], jax.Array]:
    """Returns the strategies that run in some step, each once, and the number of the one that runs now for each, `[S]`.

    So a program that can run any of them has each way of sending once, however many schedules switch between them.
    """
    parts: list[CollectiveStrategy] = []

    def number_now(strategy: CollectiveStrategy) -> jax.Array:
        if isinstance(strategy, Schedule):
            first, second = number_now(strategy.first), number_now(strategy.second)
            return jnp.where(step < strategy.switch_step, first, second)
        if strategy not in parts:
            parts.append(strategy)
        return jnp.int32(parts.index(strategy))

    return parts, jnp.stack([number_now(strategy) for strategy in strategies])


_NARROW = tuple(Encode(precision) for precision in (BFLOAT16, FLOAT8, INT8, INT4))
DEFAULT: dict[str, tuple[CollectiveStrategy, ...]] = {
    "forward": (Exact(), *_NARROW),
    "backward": (Exact(), *_NARROW),
    "gradient": (Exact(), *_NARROW, ErrorFeedback(INT8), ErrorFeedback(INT4), EveryK(4)),
}
"""What each direction chooses from where the user gives nothing; the plain collective comes first."""


def with_residual(x: jax.Array, residual: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Returns an operand with its residual, in the operand's own type, and what the cast loses, float32."""
    if residual is None:
        return x, jnp.zeros(x.shape, jnp.float32)
    total = x + residual
    operand = total.astype(x.dtype)
    return operand, (total - operand).astype(jnp.float32)


def stages_of(
    collective: CollectiveOp, shape: Sequence[int], dtype: np.dtype, precision: Precision | None
) -> list[Stage]:
    """Returns the stages for an operand of a shape and type on each device; exact where `precision` is None.

    Over several axes the whole size goes along the last one, the fastest by convention, and what each of its devices
    keeps along those before. An exact all-reduce is one stage on each axis, an encoded one two.
    """
    sizes, size = collective.sizes, math.prod(shape)

    def nbytes(elements: int) -> float:
        return elements * np.dtype(dtype).itemsize if precision is None else encoded_bytes(precision, elements)

    stage = partial(_stage, collective)
    if collective.kind == "collective_permute":
        stages, num_coded = [stage("collective_permute", 0, nbytes(size))], 2 * size
    elif collective.kind == "all_to_all":
        whole = collective.num_devices * nbytes(size // collective.num_devices)
        stages, num_coded = [stage("all_to_all", i, whole * n) for i, n in enumerate(sizes)], 2 * size
    elif collective.kind == "all_gather":
        stages, num_coded = _gather_stages(collective, nbytes(size)), size * (1 + collective.num_devices)
    else:
        stages, num_coded, part = [], 0, size
        for i in reversed(range(len(sizes))):
            smaller = math.ceil(part / sizes[i])
            exact_stage = stage(collective.kind, i, nbytes(part))
            encoded_stage = stage("all_to_all", i, sizes[i] ** 2 * nbytes(smaller))
            stages.append(exact_stage if precision is None else encoded_stage)
            num_coded, part = num_coded + 2 * part, smaller
        if collective.kind == "all_reduce" and precision is not None:
            stages, num_coded = stages + _gather_stages(collective, nbytes(part)), num_coded + part + size
    if precision is None:
        return stages
    return [replace(stages[0], num_coded=num_coded, precision=precision), *stages[1:]]


def _stage(collective: CollectiveOp, kind: CollectiveKind, i: int, num_bytes: float) -> Stage:
    return Stage(kind, collective.axes[i], collective.sizes[i], num_bytes)


def _gather_stages(collective: CollectiveOp, num_bytes: float) -> list[Stage]:
    ends = range(1, len(collective.axes) + 1)
    return [_stage(collective, "all_gather", i - 1, num_bytes * math.prod(collective.sizes[:i])) for i in ends]


def _scaled_stages(stages: list[Stage], share: float) -> list[Stage]:
    return [replace(stage, count=stage.count * share) for stage in stages]


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

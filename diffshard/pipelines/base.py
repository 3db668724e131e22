"""What a search may choose of a pipeline."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from cost.pipeline_schedules import BY_STAGES_LEFT, Schedule, checked_stages_per_device, goes_round, splits_backward
from cost.real_numbers import Count, checked_number, whole_number
from diffshard.pipelines.delayed_gradients import checked_predicted_steps
from diffshard.pipelines.loss_limits import LossLimit, MeasuredDelay
from diffshard.pipelines.microbatches import BatchArguments
from diffshard.pipelines.plans.base import BatchMeans, GradientReduction, ResidualUse

_STAGES_PER_DEVICE = 2
"""The number with "interleaved" where none is given: the fewest that it can have."""


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """The pipelines from which `search` may choose.

    Attributes:
      batch_argnums: positions of the arguments whose arrays have the batch as their leading dimension.
      batch_argnames: further such arguments by name.
      microbatches: numbers of micro-batches to try; those that do not divide the batch are left out.
      max_stages: the largest number of stages.
      schedules: the schedules to try: "1f1b", "eager", "gpipe". On equal parts of the cluster, of one kind:
        "interleaved", by which each device holds several stages, and the number of devices divides that of the
        micro-batches; "zb-h1", which computes the gradients of weights where stages would wait; and "zb-v", which does
        so with two stages on each device. Never by default, and beside others with a `loss_limit` only: "2bw", which
        changes the results: gradients are those of the weights of one step ago, as `diffshard.pipelines.delayed` has
        them.
      predicted_steps: with "2bw" by how many steps weights are predicted, as in `diffshard.pipelines.delayed`; with a
        `loss_limit` several numbers may be given, and each is measured.
      loss_limit: how far "2bw" may raise the loss; None does not measure it.
      stages_per_device: how many stages a device may hold with "interleaved"; each number is tried.
      gradient_reductions: how often gradients may be reduced over the devices that share the examples of a micro-batch:
        "each_microbatch", or "once", when the step ends. The latter sends less, and each device keeps a whole total of
        each gradient.
      max_replicas: the largest number of replicas. Above 1, each kind of device of the cluster may be a replica of the
        pipeline, which takes its own number of micro-batches; the fastest kind keeps the state.
      residuals: what may become of the arrays that the backward pass reads of the forward pass: "keep" leaves them in
        memory for each micro-batch in flight; with "recompute" a stage makes some again where the memory
        demands it or that is faster; with "offload" some wait in pinned memory of the host.
      batch_means: what a gradient reads that needs a mean over the batch, as that of a product of two means does, such
        as the balancing loss of a mixture of experts. No micro-batch knows the "whole" one before all have run, so that
        such steps are refused; with "each_microbatch" each takes its own, which is the gradient of the mean of the
        micro-batches' losses, and does not go with gradients that are reduced "once". Losses themselves are those of
        the whole batch either way.

    Raises:
      TypeError, ValueError: a number or a name breaks its rule.
    """

    batch_argnums: int | Sequence[int] = 1
    batch_argnames: str | Sequence[str] = ()
    microbatches: int | Sequence[int] = (4, 8, 16, 32)
    max_stages: int = 8
    schedules: Sequence[Schedule] = ("1f1b", "eager", "gpipe")
    gradient_reductions: Sequence[GradientReduction] = ("each_microbatch",)
    max_replicas: int = 1
    residuals: Sequence[ResidualUse] = ("keep", "recompute")
    batch_means: BatchMeans = "whole"
    stages_per_device: int | Sequence[int] = _STAGES_PER_DEVICE
    predicted_steps: float | Sequence[float] = 0.0
    loss_limit: LossLimit | None = None

    def __post_init__(self):
        _ = self.batch
        if any((whole_number(n) or 0) < 1 for n in self.microbatch_counts) or not self.microbatch_counts:
            raise ValueError(f"`Pipeline.microbatches` must be whole numbers, 1 or more, not {self.microbatches!r}.")
        checked_number("Pipeline.max_stages", self.max_stages, Count)
        checked_number("Pipeline.max_replicas", self.max_replicas, Count)
        _check_names("schedules", self.schedules, get_args(Schedule))
        _check_names("gradient_reductions", self.gradient_reductions, get_args(GradientReduction))
        _check_names("residuals", self.residuals, get_args(ResidualUse))
        if "keep" not in self.residuals:
            raise ValueError(f'`Pipeline.residuals` must have "keep" among them, not {self.residuals!r}.')
        self._check_delay()
        if self.max_replicas > 1 and (self.is_delayed or "each_microbatch" not in self.gradient_reductions):
            raise ValueError(
                "`Pipeline.max_replicas` must be 1 with the schedule '2bw', and where gradients are reduced only once: "
                f"replicas add up their own sums when a step ends; got {self.max_replicas!r}."
            )
        _check_batch_means(self.batch_means, self.gradient_reductions)
        self._check_even_stages()

    def _check_delay(self) -> None:
        steps = [checked_predicted_steps(number) for number in self.predicted_step_counts]
        if not steps or len(set(steps)) < len(steps):
            raise ValueError(f"`Pipeline.predicted_steps` must name each number once, not {self.predicted_steps!r}.")
        if not self.is_delayed and (any(steps) or self.loss_limit is not None):
            raise ValueError(
                "`Pipeline.predicted_steps` and `loss_limit` are for the schedule '2bw', which `schedules` must have; "
                f"it is {self.schedules!r}."
            )
        if self.loss_limit is not None and not isinstance(self.loss_limit, LossLimit):
            raise TypeError(f"`Pipeline.loss_limit` must be a LossLimit or None, not {self.loss_limit!r}.")
        if self.is_delayed and self.loss_limit is None and (set(self.schedules) != {"2bw"} or len(steps) > 1):
            raise ValueError(
                "`Pipeline.schedules` must be ('2bw',) where it has '2bw', with one number of `predicted_steps`: it "
                "changes the results and the state, so that one search cannot choose between it and others. Give a "
                "`loss_limit`, by which it is measured what that does to the loss, or search twice and compare; got "
                f"{self.schedules!r} and {self.predicted_steps!r}."
            )

    def _check_even_stages(self) -> None:
        numbers = self.stages_per_device
        numbers = numbers if isinstance(numbers, Sequence) and not isinstance(numbers, str) else (numbers,)
        if not numbers or any((whole_number(n) or 0) < 2 for n in numbers):
            raise ValueError(
                f"`Pipeline.stages_per_device` must be whole numbers, 2 or more, not {self.stages_per_device!r}: with "
                'one stage on each device "interleaved" is "1f1b".'
            )
        if "interleaved" not in self.schedules and set(numbers) != {_STAGES_PER_DEVICE}:
            raise ValueError(
                "`Pipeline.stages_per_device` is for the schedule 'interleaved', which `schedules` must have; they are "
                f"{self.schedules!r}. Leave it out, not {self.stages_per_device!r}."
            )
        even: list[Schedule] = [name for name in self.schedules if name not in BY_STAGES_LEFT]
        if even and self.max_replicas > 1:
            raise ValueError(f"`Pipeline.max_replicas` must be 1 with the schedule {even[0]!r}: all devices are alike.")
        if "offload" in self.residuals and any(splits_backward(name) for name in even):
            raise ValueError(
                "`Pipeline.residuals` must not have 'offload' with schedules that compute the gradients of weights "
                f"apart, {even}: both programs would copy what they read from the host."
            )
        for name in even:
            least = 2 * min(self.stages_per_device_of(name))
            most = 2 * self.max_stages // least
            if most < 2:
                raise ValueError(
                    f"`Pipeline.max_stages` must be {least} or more with the schedule {name!r}, so that two devices "
                    f"hold their stages, not {self.max_stages!r}."
                )
            counts = self.microbatch_counts
            if not any(goes_round(name, d, n) for n in counts for d in range(2, most + 1)):
                raise ValueError(
                    f"`Pipeline.microbatches` must have a multiple of 2 to {most} devices with {name!r}, not "
                    f"{self.microbatches!r}."
                )

    def stages_per_device_of(self, schedule: Schedule) -> tuple[int, ...]:
        """Returns the numbers of stages on a device to try with a schedule."""
        if schedule != "interleaved":
            return (checked_stages_per_device(schedule, None),)
        numbers = self.stages_per_device
        return tuple(sorted(set(numbers))) if isinstance(numbers, Sequence) else (numbers,)

    @property
    def is_delayed(self) -> bool:
        """Whether gradients are those of the weights of one step ago."""
        return "2bw" in self.schedules

    @property
    def predicted_step_counts(self) -> tuple[Any, ...]:
        """By how many steps weights may be predicted with "2bw"."""
        given = self.predicted_steps
        return tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else (given,)

    def within_limit(self, delays: Sequence[MeasuredDelay]) -> "Sequence[Pipeline]":
        """Returns the schedules to search: exact ones, and "2bw" with the cheapest delay that is allowed.

        A prediction takes more memory than none, and all predictions take as much: of these the one with the least
        loss.

        Raises:
          ValueError: there is none.
        """
        exact: tuple[Schedule, ...] = tuple(name for name in self.schedules if name != "2bw")
        found = [replace(self, schedules=exact, predicted_steps=0.0, loss_limit=None)] if exact else []
        allowed = [delay for delay in delays if delay.is_allowed]
        if allowed:
            best = min(allowed, key=lambda delay: (delay.predicted_steps > 0, delay.increase))
            delayed = replace(
                self,
                schedules=("2bw",),
                predicted_steps=best.predicted_steps,
                stages_per_device=_STAGES_PER_DEVICE,
                loss_limit=None,
            )
            found.append(delayed)
        if not found:
            raise ValueError(
                "`Pipeline.schedules` has '2bw' alone, but each delay raises the loss by more than "
                f"`LossLimit.max_loss_increase`: {'; '.join(map(str, delays))}. Give other schedules with it."
            )
        return found

    @property
    def batch(self) -> BatchArguments:
        """Which arguments have the batch; raises `ValueError` if they are none."""
        return BatchArguments.checked(self.batch_argnums, self.batch_argnames)

    @property
    def microbatch_counts(self) -> tuple[Any, ...]:
        """The numbers of micro-batches to try, ascending."""
        given = self.microbatches
        if isinstance(given, Sequence) and not isinstance(given, str):
            return tuple(sorted(set(given)))
        return (given,)


def _check_names(field: str, given: Any, allowed: Sequence[str]) -> None:
    """Checks that a field is a tuple or list of names, each once."""
    if isinstance(given, str) or not isinstance(given, Sequence):
        example = given if isinstance(given, str) and given in allowed else allowed[0]
        raise TypeError(f"`Pipeline.{field}` must be a tuple of names, such as ({example!r},), not {given!r}.")
    if not given or any(name not in allowed for name in given):
        raise ValueError(f"`Pipeline.{field}` must be some of {tuple(allowed)}, not {given!r}.")
    if len(set(given)) < len(given):
        raise ValueError(f"`Pipeline.{field}` must name each choice once, not {given!r}.")


def _check_batch_means(batch_means: Any, gradient_reductions: Sequence[GradientReduction]) -> None:
    if batch_means not in get_args(BatchMeans):
        raise ValueError(f"`Pipeline.batch_means` must be one of {get_args(BatchMeans)}, not {batch_means!r}.")
    if batch_means == "each_microbatch" and "once" in gradient_reductions:
        raise ValueError(
            '`Pipeline(batch_means="each_microbatch")` cannot be given together with `gradient_reductions` '
            f"{tuple(gradient_reductions)!r}: gradients that are reduced once are those of groups of examples, which "
            "do not know the means of their micro-batch."
        )

"""Which delays of gradients a pipeline may have, by what they do to the loss of short trainings on one device.

The schedule "2bw" changes the results of a step, and no price says by how much the loss rises. So the user's own step
is trained with exact, with delayed and with predicted weights, on the same batches, and what raises the loss by more
than is allowed is not searched.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from cost.real_numbers import Limit, checked_number
from diffshard.pipelines.delayed_gradients import DelayedArray, TracedStep, current_version, delayed, traced_step
from diffshard.sharding_search.call import Structure, array_paths, split
from diffshard.sharding_search.format_losses import LATE_SHARE, increase_between
from diffshard.sharding_search.number_formats import check_loss
from diffshard.sharding_search.training_calls import loss_result

Run = Sequence[tuple[Any, ...]]
"""A short training: for each step the positional arguments of the function, arrays on one device."""


@dataclass(frozen=True)
class LossLimit:
    """How far the schedule "2bw" may raise the loss of a training, and what that is measured by.

    >>> limit = diffshard.pipelines.LossLimit(0.01, [[(state, batch) for batch in batches]])
    >>> pipeline = diffshard.Pipeline(schedules=("1f1b", "2bw"), predicted_steps=(0, 1), loss_limit=limit)

    Attributes:
      max_loss_increase: by how much the loss may rise, in its own unit.
      validation_runs: short trainings: for each of them its calls, tuples of the positional arguments of the step. What
        results replace, the state, is read from the first call only. An increase is that of the mean loss over the last
        fifth of each run, at the current weights, on batches that they were not yet trained on.
      loss: the path of the loss among the results, such as "result[1]"; None takes the only floating-point scalar that
        does not replace an argument.

    Raises:
      ValueError: the limit is not positive, or there is no call.
    """

    max_loss_increase: float
    validation_runs: Sequence[Run] = field(repr=False)
    loss: str | None = None

    def __post_init__(self):
        checked_number("LossLimit.max_loss_increase", self.max_loss_increase, Limit)
        check_loss("LossLimit.loss", self.loss)
        if not self.validation_runs or not all(self.validation_runs):
            raise ValueError("`LossLimit.validation_runs` must be trainings of one call or more each.")
        calls = [call for run in self.validation_runs for call in run]
        if not all(isinstance(call, tuple | list) for call in calls):
            raise TypeError("`LossLimit.validation_runs` must have a tuple of positional arguments for each call.")


class MeasuredDelay(NamedTuple):
    """The measured increase of the loss by a delay of gradients.

    Attributes:
      predicted_steps: by how many steps weights are predicted.
      increase: of the loss, in the mean over all runs; infinite if some loss is not finite.
      error: its standard error; None for a single run.
      is_allowed: whether it is within the limit.
    """

    predicted_steps: float
    increase: float
    error: float | None
    is_allowed: bool

    def __str__(self) -> str:
        weights = f"weights predicted {self.predicted_steps:g} steps ahead" if self.predicted_steps else "no prediction"
        error = "" if self.error is None else f" ± {self.error:.2g}"
        return f"{weights}: {self.increase:+.4g}{error}" + ("" if self.is_allowed else " (too much)")


def measured_delays(
    fn: Callable[..., Any], limit: LossLimit, predicted_steps: Sequence[float]
) -> tuple[MeasuredDelay, ...]:
    """Trains with delayed gradients of each kind, and returns what they do to the loss.

    Raises:
      ValueError: the step cannot be delayed, its loss is not found, or the loss of the step itself is not finite.
    """
    arrays, structure = split((tuple(limit.validation_runs[0][0]), {}))
    traced = traced_step(fn, *structure.unflatten(arrays))
    avals: list[Any] = [variable.aval for variable in traced.program.jaxpr.outvars]
    outputs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    paths = array_paths("result", traced.result.unflatten(outputs))
    loss = loss_result("LossLimit.loss", limit.loss, outputs, traced.feedback, paths)
    runs = [[_flat_call(structure, call) for call in run] for run in limit.validation_runs]

    def flat(step: Callable[..., Any]) -> Callable[..., list[Any]]:
        return jax.jit(lambda arrays: _flat_results(step(*structure.unflatten(arrays)[0]), traced))

    def late_losses(step: Callable[[Any], list[Any]]) -> list[float]:
        return [_late_loss(step, exact_step, loss, traced.feedback, run) for run in runs]

    exact_step = flat(fn)
    exact = late_losses(exact_step)
    if not np.isfinite(exact).all():
        raise ValueError(
            f"The late losses of `LossLimit.validation_runs` must be finite without a delay, not {exact}. Give runs "
            "with a smaller step."
        )
    found = []
    for steps in predicted_steps:
        increase = increase_between(late_losses(flat(delayed(fn, predicted_steps=steps))), exact)
        found.append(MeasuredDelay(steps, *increase, increase.mean <= limit.max_loss_increase))
    return tuple(found)


def _flat_call(structure: Structure, call: Sequence[Any]) -> list[Any]:
    arrays = structure.arrays_of((tuple(call), {}))
    if arrays is None:
        raise ValueError("All calls of `LossLimit.validation_runs` must have the structure of the first one.")
    return arrays


def _late_loss(
    step: Callable[[Any], list[Any]],
    exact_step: Callable[[Any], list[Any]],
    loss: int,
    feedback: Sequence[int | None],
    run: Sequence[list[Any]],
) -> float:
    """Trains through a run, and returns the mean loss of its last steps, each before it is trained on."""
    state, losses, num_early = {}, [], len(run) - math.ceil(LATE_SHARE * len(run))
    for number, call in enumerate(run):
        arrays = [state.get(i, array) for i, array in enumerate(call)]
        if number >= num_early:
            losses.append(float(exact_step(current_version(arrays))[loss]))
        results = step(arrays)
        state = {argument: x for x, argument in zip(results, feedback, strict=True) if argument is not None}
    return float(np.mean(losses))


def _flat_results(tree: Any, traced: TracedStep) -> list[Any]:
    """Returns the flat results of a step; what has several versions is one result."""
    constants = dict(traced.result.constants)
    leaves = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, DelayedArray))
    return [leaf for i, leaf in enumerate(leaves) if i not in constants]

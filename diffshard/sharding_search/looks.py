"""A look ahead: some steps of a training on given batches, run, or differentiated in the weights of number formats."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from search_spaces.sharding.number_formats import MixedProducts

FlatCall = Sequence[Any]
"""The flat arguments of one step."""
State = Mapping[int, Any]
"""The arrays that results have replaced, by the number of the flat argument, and `RESIDUALS`."""
RESIDUALS = -1
"""The place of the residuals of sums with error feedback, and of the maxima of delayed scales, in a state."""
LOOK_SHARE = 0.5
"""The share of a look's losses, its last ones, that are compared: the first step has the same state in both."""


class Look:
    """Steps of a function whose products are mixtures of exact and rounded ones.

    Args:
      replaced: of each result that replaces an argument its number and that of the argument.
      loss: the number of the result that is the loss.
    """

    def __init__(
        self,
        mixed: MixedProducts,
        replaced: Sequence[tuple[int, int]],
        loss: int,
        on_overflow: Callable[[int, int], None] | None = None,
    ):
        self._replaced, self._loss, self.mixed = tuple(replaced), loss, mixed
        self._on_overflow, self._step, self._slopes = on_overflow, jax.jit(mixed), jax.jit(jax.grad(self._late_loss))

    def lower_step(self, weights: np.ndarray, arguments: FlatCall) -> Any:
        """Lowers what `run` runs for each step, as `jax.jit(...).lower` does; what it compiles to is not kept."""
        return jax.jit(lambda *args: self.mixed(*args)).lower(weights, self.mixed.first_residuals(), *arguments)

    def run(self, weights: np.ndarray, state: State, calls: Sequence[FlatCall]) -> tuple[State, np.ndarray]:
        """Returns the state after some calls, and the loss of each; `weights` is `[rows, formats]`.

        Where a loss is not finite the calls run again, to count the operands that have no scale.
        """
        after, losses = self._run(self._step, weights, state, calls)
        if self._on_overflow is not None and not np.all(np.isfinite(losses)):
            self._run(jax.jit(self.mixed.counting(self._on_overflow)), weights, state, calls)
            jax.effects_barrier()
        return after, losses

    def _run(
        self, step: Callable[..., Any], weights: np.ndarray, state: State, calls: Sequence[FlatCall]
    ) -> tuple[State, np.ndarray]:
        state, losses = dict(state), []
        for arguments in calls:
            residuals = state.get(RESIDUALS, self.mixed.first_residuals())
            results, residuals = step(weights, residuals, *(state.get(i, array) for i, array in enumerate(arguments)))
            state = {argument: results[result] for result, argument in self._replaced} | {RESIDUALS: residuals}
            losses.append(results[self._loss])
        return state, np.array(losses, np.float64)

    def slopes(self, weights: np.ndarray, state: State, calls: Sequence[FlatCall]) -> np.ndarray:
        """Returns the derivative of the mean late loss of some calls in the weights, through all updates.

        The loss of each step is of a batch on which no step before it was trained, as a validation loss is.
        """
        return np.asarray(self._slopes(jnp.asarray(weights), *self._stacked(state, calls)), np.float64)

    def lower_slopes(self, weights: np.ndarray, state: State, calls: Sequence[FlatCall]) -> Any:
        """Lowers what `slopes` runs, as `jax.jit(...).lower` does."""
        return self._slopes.lower(jnp.asarray(weights), *self._stacked(state, calls))

    def _stacked(self, state: State, calls: Sequence[FlatCall]) -> tuple[dict[int, Any], dict[int, Any]]:
        """Returns the state before some calls, and the batches of all of them together."""
        carried = {argument for _, argument in self._replaced}
        first = {i: jnp.asarray(state.get(i, calls[0][i])) for i in carried}
        varying = [i for i in range(len(calls[0])) if i not in carried]
        batches = {i: jnp.stack([jnp.asarray(arguments[i]) for arguments in calls]) for i in varying}
        first[RESIDUALS] = state.get(RESIDUALS, self.mixed.first_residuals())
        return first, batches

    def _late_loss(self, weights: jax.Array, state: dict[int, Any], batches: dict[int, Any]) -> jax.Array:
        @jax.checkpoint
        def step(state: dict[int, Any], batch: dict[int, Any]) -> tuple[dict[int, Any], jax.Array]:
            residuals = state.pop(RESIDUALS)
            arguments = (array for _, array in sorted({**state, **batch}.items()))
            results, residuals = self.mixed(weights, residuals, *arguments)
            types = {i: array.dtype for i, array in state.items()}
            after = {i: results[r].astype(types[i]) for r, i in self._replaced}
            return {**after, RESIDUALS: residuals}, results[self._loss]

        _, losses = jax.lax.scan(step, state, batches)
        return jnp.mean(losses[-math.ceil(LOOK_SHARE * len(losses)) :])

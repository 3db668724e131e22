"""The calls of a training that losses are measured on: whether they fit the function, and which result is the loss.

A look ahead is some steps of the training on given batches, run, or differentiated in the weights of number formats.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diffshard.sharding_search.call import ArrayType, array_types, bound_arguments, split
from diffshard.sharding_search.options import Options
from search_spaces.sharding.graph import Graph
from search_spaces.sharding.number_formats import MixedProducts
from search_spaces.sharding.product_formats import is_backward

FlatCall = Sequence[Any]
"""The flat arguments of one step."""
State = Mapping[int, Any]
"""The arrays that results have replaced, by the number of the flat argument, and `RESIDUALS`."""
RESIDUALS = -1
"""The place of the residuals of sums with error feedback, and of the maxima of delayed scales, in a state."""
LOOK_SHARE = 0.5
"""The share of a look's losses, its last ones, that are compared: the first step has the same state in both."""


def check_trains(graph: Graph, function: str) -> None:
    """Checks that a function is a step of a training: ValueError if it is none."""
    what = "" if any(argument is not None for argument in graph.feedback) else "no result replaces an argument"
    if not what and not any(is_backward(vertex) for vertex in graph.operations()):
        what = "it takes no gradients by JAX"
    if what:
        raise ValueError(
            f"`Formats.calls` are to be steps of a training, but {function} is none: {what}. Give a step that computes "
            "gradients and returns the new state, or `Formats.increases` without calls."
        )


def flat_calls(
    options: Options, types: Sequence[ArrayType], name: str, calls: Sequence[tuple[Any, ...]]
) -> list[FlatCall]:
    """Returns the flat arguments of calls.

    Args:
      options: of the function.
      types: of the flat arguments that all have to have.
      name: of the calls, for errors.

    Raises:
      TypeError, ValueError: a call is no tuple, or has other arrays or none.
    """
    flat = []
    for number, call in enumerate(calls):
        if not isinstance(call, tuple | list):
            raise TypeError(
                f"`{name}[{number}]` must be a tuple of the arguments of {options.function_name}, not "
                f"{type(call).__name__}."
            )
        arrays: list[Any] = split(bound_arguments(options, call, {}))[0]
        if (given := array_types(arrays)) != types:
            raise ValueError(
                f"`{name}[{number}]` has other arrays than the arguments that are planned for: "
                f"{_difference(given, types)}. Give arguments of the same shapes and dtypes."
            )
        if any(isinstance(array, jax.ShapeDtypeStruct) for array in arrays):
            raise TypeError(
                f"`{name}[{number}]` has `jax.ShapeDtypeStruct`s, but its step is run: give the arrays themselves, or "
                "`Formats.increases` that an earlier search measured."
            )
        flat.append(arrays)
    return flat


def _difference(given: Sequence[ArrayType], wanted: Sequence[ArrayType]) -> str:
    """Returns in words the first array that has another type, or else how many arrays there are."""
    if len(given) != len(wanted):
        return f"{len(given)} of them instead of {len(wanted)}"
    texts = (
        [f"{dtype}{list(shape)}{' of a weak type' * is_weak}" for shape, dtype, is_weak in of] for of in (given, wanted)
    )
    return next(f"{own} instead of {other}" for own, other in zip(*texts, strict=True) if own != other)


def warn_of_equal_batches(graph: Graph, calls: Sequence[FlatCall], runs: Sequence[Sequence[FlatCall]]) -> None:
    """Warns of batches that formats are chosen by and tested with."""
    state = {argument for argument in graph.feedback if argument is not None}

    def batch(arguments: FlatCall) -> tuple[bytes, ...]:
        arrays = [array for i, array in enumerate(arguments) if i not in state]
        is_key = [jnp.issubdtype(jnp.result_type(array), jax.dtypes.prng_key) for array in arrays]
        numbers = [jax.random.key_data(a) if k else a for a, k in zip(arrays, is_key, strict=True)]
        return tuple(np.asarray(array).tobytes() for array in numbers)

    looked_at = {batch(arguments) for arguments in calls} - {()}
    equal = sum(batch(arguments) in looked_at for run in runs for arguments in run)
    if equal:
        count = sum(map(len, runs))
        warnings.warn(
            f"{equal} of the {count} calls of `Formats.validation_runs` have batches that `Formats.calls` has, too: "
            "formats that were chosen by a batch are not tested by it. Give other batches.",
            stacklevel=2,
        )


def loss_result(
    option: str, given: str | None, types: Sequence[Any], feedback: Sequence[int | None], out_paths: Sequence[str]
) -> int:
    """Returns which flat result is the loss.

    Args:
      option: that names the loss, for errors.
      given: the path of the loss among the results; None takes the only one that can be it.
      types: of the flat results.
      feedback: for each flat result the flat argument that it replaces, or None.
      out_paths: of the flat results.

    Raises:
      ValueError: it is not among the results or no floating-point scalar, or several could be it.
    """
    could_be = [
        i
        for i, (t, argument) in enumerate(zip(types, feedback, strict=True))
        if t.shape == () and jnp.issubdtype(t.dtype, jnp.floating) and argument is None
    ]
    names = ", ".join(out_paths[i] for i in could_be) or "none of the results"
    result = None if given is None or given not in out_paths else out_paths.index(given)
    if given is None:
        others = [
            f"{path} is {t.dtype}{list(t.shape)}"
            for path, t, argument in zip(out_paths, types, feedback, strict=True)
            if argument is None and not could_be
        ]
        what = f" ({', '.join(others)})" if others else ""
        if len(could_be) != 1:
            raise ValueError(
                f"`{option}` must name the loss among the results, a floating-point scalar: {names} could be "
                f"it{what}. Return the mean loss of the batch besides the new state."
            )
        result = could_be[0]
    elif result not in could_be:
        what = "" if result is None else f" but {types[result].dtype}{list(types[result].shape)}"
        raise ValueError(
            f"`{option}` is {given!r}, which is no floating-point scalar among the results{what}; {names} could be it."
        )
    assert result is not None
    if types[result].dtype.itemsize < 4:
        raise ValueError(
            f"The loss `{out_paths[result]}` is {types[result].dtype}, which is too coarse for small differences. "
            "Compute it in float32: `loss.astype(jnp.float32)` after the mean is too late."
        )
    return result


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
        on_overflow: Callable[[int, int], None],
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
        if not np.all(np.isfinite(losses)):
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

"""What products in float8 do to the loss of a training: measured by looks ahead, and by short trainings.

Rounding harms training mostly through the gradients, so what one rounded step does to the loss says little. A look
ahead runs the user's own step several times from the same state on the same batches, with some products in float8 and
without; the difference of the losses is what they do. One factor leads from there to whole trainings. A validation run
trains from its beginning, and needs none.
"""

import math
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diffshard.sharding_search.call import ArrayType, array_types, bound_arguments, split
from diffshard.sharding_search.number_formats import Formats, Group, all_groups
from diffshard.sharding_search.options import Options
from search_spaces.sharding.base import Coded, FormatKey
from search_spaces.sharding.float8 import is_backward
from search_spaces.sharding.graph import Graph
from search_spaces.sharding.number_formats import SwitchedFormats
from search_spaces.sharding.space import ShardingSpace

FlatCall = Sequence[Any]
"""The flat arguments of one step."""
State = Mapping[int, Any]
"""The arrays that results have replaced, by the number of the flat argument."""
LOOK_SHARE = 0.5
"""The share of a look's losses, its last ones, that are compared: the first step has the same state in both."""
LATE_SHARE = 0.2
"""The same for a validation run, which is long enough to be judged by its end."""


class Increase(NamedTuple):
    """An increase of the loss that was measured, and its standard error over runs or looks; None of a single one."""

    mean: float
    error: float | None


class MeasuredLosses:
    """What sets of products, by the indices of their vertices, do to the loss of a step that runs on one device.

    Args:
      formats: has the calls and the validation runs.
      space: of the function that they are calls of.
      options: of this function.
      types: of its flat arguments.
      paths: of its flat results.
      num_devices: that partial sums are sent between.

    Raises:
      ValueError: the function trains nothing, its loss is not found, or calls do not fit it.
    """

    def __init__(
        self,
        formats: Formats,
        space: ShardingSpace,
        options: Options,
        types: Sequence[ArrayType],
        paths: Sequence[str],
        num_devices: int = 1,
    ):
        self.formats, self.graph = formats, space.graph
        self.groups = {group.name: group for group in all_groups(self.graph, formats.kinds)}
        _check_trains(self.graph, options.function_name)
        self._loss = loss_result(formats, self.graph, paths)
        self._calls = _flat_calls(options, types, "Formats.calls", formats.calls)
        self._runs = [
            _flat_calls(options, types, f"Formats.validation_runs[{i}]", run)
            for i, run in enumerate(formats.validation_runs)
        ]
        _warn_of_equal_batches(self.graph, self._calls, self._runs)
        keys = [key for group in self.groups.values() for key in group.keys]
        self._switch = {key: number for number, key in enumerate(keys)}
        layout = space.layout([0] * len(space.nodes))
        self._step = jax.jit(SwitchedFormats(self.graph, layout, self._switch, space.rules, num_devices))
        self._replaced = [(i, argument) for i, argument in enumerate(self.graph.feedback) if argument is not None]
        self._exact_losses: list[float] = []

    @property
    def measured_by(self) -> str:
        """In words, what tells the increase of a whole set of products; "" for nothing."""
        if self._runs:
            return "a validation run" if len(self._runs) == 1 else f"{len(self._runs)} validation runs"
        return "looks ahead" if self._calls else ""

    @property
    def takes_looks(self) -> bool:
        """Whether there are calls for looks ahead."""
        return bool(self._calls)

    def increase_of(self, products: Collection[FormatKey]) -> Increase:
        """Returns what products in float8 together add to the loss of a whole training: inf if it is not finite then.

        Validation runs tell it, or else looks ahead.
        """
        if not products:
            return Increase(0.0, 0.0)
        if self._runs:
            if not self._exact_losses:
                self._exact_losses = [self._finite(run, ()) for run in self._runs]
            losses = [self._run({}, run, products)[1] for run in self._runs]
            return _increase([_late(loss, LATE_SHARE) for loss in losses], self._exact_losses, 1.0)
        pairs = [
            (_late(self._run(state, window, products)[1]), self._finite(window, (), state))
            for state, window in self._points(products)
        ]
        return _increase(*zip(*pairs, strict=True), factor=self.formats.factor)

    def increases_at(self, products: Collection[FormatKey], groups: Sequence[Group]) -> list[float]:
        """Measures by looks ahead what each group adds to the loss of a whole training where others are in float8.

        The looks begin in a training with the given products in float8. Of a group among these it is what the loss
        falls by without it. The losses of the second half of each look are compared, and the increases of all looks
        averaged. A group whose losses are lower on average counts as harmless: there rounding is noise. One with
        losses that are not finite has the increase inf.

        Args:
          products: that are in float8.
          groups: of the function.

        Raises:
          ValueError: a loss without these groups is not finite.
        """
        current = frozenset(products)
        losses = []
        for state, window in self._points(current):
            base = self._finite(window, current, state)
            pairs = []
            for group in groups:
                members = frozenset(group.keys)
                is_in, others = bool(members & current), _without_formats_of(current, members)
                without = base if others == current else _late(self._run(state, window, others)[1])
                other = without if is_in else _late(self._run(state, window, others | members)[1])
                pairs.append((base, other) if is_in else (other, without))
            losses.append(pairs)
        means = [_mean_or_inf(*zip(*pairs, strict=True)) for pairs in zip(*losses, strict=True)]
        return [max(0.0, self.formats.factor * mean) for mean in means]

    def _points(self, products: Collection[FormatKey]) -> Iterator[tuple[State, Sequence[FlatCall]]]:
        """Returns the calls of each look, and the state before them in a training with some products in float8."""
        state, at = {}, 0
        for start in self.formats.look_starts:
            state, at = self._run(state, self._calls[at:start], products)[0], start
            yield state, self._calls[start : start + self.formats.steps]

    def _run(
        self, state: State, calls: Sequence[FlatCall], products: Collection[FormatKey]
    ) -> tuple[State, np.ndarray]:
        """Returns the state after some calls, and the loss of each."""
        switches = np.zeros(len(self._switch), bool)
        switches[[self._switch[product] for product in products]] = True
        state, losses = dict(state), []
        for arguments in calls:
            results = self._step(switches, *(state.get(i, array) for i, array in enumerate(arguments)))
            state = {argument: results[result] for result, argument in self._replaced}
            losses.append(results[self._loss])
        return state, np.array(losses, np.float64)

    def _finite(self, calls: Sequence[FlatCall], products: Collection[FormatKey], state: State | None = None) -> float:
        """Returns the late loss of some calls that others are compared with."""
        share = LOOK_SHARE if state is not None else LATE_SHARE
        late = _late(self._run(state or {}, calls, products)[1], share)
        if not np.isfinite(late):
            where = ", ".join(n for n, g in self.groups.items() if any(key in products for key in g.keys))
            what = "A look ahead" if state is not None else "A validation run"
            raise ValueError(
                f"{what} of {len(calls)} steps has a loss that is not finite, with {where or 'no product'} in float8. "
                "Give calls from a later point of the training, or a smaller step."
            )
        return late


def _without_formats_of(current: frozenset[FormatKey], members: frozenset[FormatKey]) -> frozenset[FormatKey]:
    """Returns what is in fewer bits without some members, in whatever format they are."""
    places = {key[:2] for key in members if isinstance(key, Coded)}
    return frozenset(
        key for key in current if key not in members and not (isinstance(key, Coded) and key[:2] in places)
    )


def _late(losses: np.ndarray, share: float = LOOK_SHARE) -> float:
    return float(np.mean(losses[-math.ceil(share * len(losses)) :]))


def _increase(losses: Sequence[float], others: Sequence[float], factor: float) -> Increase:
    differences = factor * np.subtract(losses, others)
    mean = factor * _mean_or_inf(losses, others)
    if len(differences) < 2 or not np.isfinite(mean):
        return Increase(mean, None)
    return Increase(mean, float(np.std(differences, ddof=1) / len(differences) ** 0.5))


def _mean_or_inf(losses: Sequence[float], others: Sequence[float]) -> float:
    mean = float(np.mean(np.subtract(losses, others)))
    return mean if np.isfinite(mean) else np.inf


def _check_trains(graph: Graph, function: str) -> None:
    what = "" if any(argument is not None for argument in graph.feedback) else "no result replaces an argument"
    if not what and not any(is_backward(vertex) for vertex in graph.operations()):
        what = "it takes no gradients by JAX"
    if what:
        raise ValueError(
            f"`Formats.calls` are to be steps of a training, but {function} is none: {what}. Give a step that computes "
            "gradients and returns the new state, or `Formats.increases` without calls."
        )


def _flat_calls(
    options: Options, types: Sequence[ArrayType], name: str, calls: Sequence[tuple[Any, ...]]
) -> list[FlatCall]:
    flat = []
    for number, call in enumerate(calls):
        arrays: list[Any] = split(bound_arguments(options, call, {}))[0]
        if array_types(arrays) != types:
            raise ValueError(f"`{name}[{number}]` has other arrays than the arguments that are planned for.")
        flat.append(arrays)
    return flat


def _warn_of_equal_batches(graph: Graph, calls: Sequence[FlatCall], runs: Sequence[Sequence[FlatCall]]) -> None:
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


def loss_result(formats: Formats, graph: Graph, out_paths: Sequence[str]) -> int:
    """Returns which flat result is the loss.

    Raises:
      ValueError: it is not among the results or no floating-point scalar, or several could be it.
    """
    types: list[Any] = [getattr(output, "aval", output) for output in graph.outputs]
    could_be = [
        i
        for i, (t, argument) in enumerate(zip(types, graph.feedback, strict=True))
        if t.shape == () and jnp.issubdtype(t.dtype, jnp.floating) and argument is None
    ]
    names = ", ".join(out_paths[i] for i in could_be) or "none of the results"
    result = None if formats.loss is None or formats.loss not in out_paths else out_paths.index(formats.loss)
    if formats.loss is None:
        others = [
            f"{path} is {t.dtype}{list(t.shape)}"
            for path, t, argument in zip(out_paths, types, graph.feedback, strict=True)
            if argument is None and not could_be
        ]
        what = f" ({', '.join(others)})" if others else ""
        if len(could_be) != 1:
            raise ValueError(
                f"`Formats.loss` must name the loss among the results, a floating-point scalar: {names} could be "
                f"it{what}. Return the mean loss of the batch besides the new state."
            )
        result = could_be[0]
    elif result not in could_be:
        what = "" if result is None else f" but {types[result].dtype}{list(types[result].shape)}"
        raise ValueError(
            f"`Formats.loss` is {formats.loss!r}, which is no floating-point scalar among the results{what}; "
            f"{names} could be it."
        )
    assert result is not None
    if types[result].dtype.itemsize < 4:
        raise ValueError(
            f"The loss `{out_paths[result]}` is {types[result].dtype}, which is too coarse for what a format changes. "
            "Compute it in float32: `loss.astype(jnp.float32)` after the mean is too late."
        )
    return result

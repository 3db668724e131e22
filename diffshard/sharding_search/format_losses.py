"""What products in float8 do to the loss of a training: measured by looks ahead, and by short trainings.

Rounding harms training mostly through the gradients, so what one rounded step does to the loss says little. A look
ahead runs the user's own step several times from the same state on the same batches, with some products in float8 and
without; the difference of the losses is what they do. One factor leads from there to whole trainings. A validation run
trains from its beginning, and needs none.
"""

import copy
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diffshard.plans.text import ONE_RUN
from diffshard.sharding_search.call import ArrayType, array_types, bound_arguments, split
from diffshard.sharding_search.looks import LOOK_SHARE, FlatCall, Look, State
from diffshard.sharding_search.number_formats import Formats, ProductGroup, all_groups, kind_of
from diffshard.sharding_search.options import Options
from search_spaces.sharding.base import FormatKey
from search_spaces.sharding.graph import Graph
from search_spaces.sharding.kept_codes import LateReads
from search_spaces.sharding.number_formats import ExchangedInCodes, KeptInCodes, MixedProducts, SumsInParts
from search_spaces.sharding.product_formats import FORMATS, is_backward
from search_spaces.sharding.space import ShardingSpace

LATE_SHARE = 0.2
"""The share of a validation run's losses that are compared: it is long enough to be judged by its end."""
_MOST_DIFFERENCE = 0.02
"""By how much the exact loss may differ between two ways to compute it, as a share: a few roundings of bfloat16."""
_HALF_WAY = 0.5
"""The weight of a format in which the damage of errors without a mean has the slope of its increase from 0 to 1."""


class Increase(NamedTuple):
    """An increase of the loss that was measured, and its standard error over runs or looks; None of a single one."""

    mean: float
    error: float | None


class MeasuredLosses:
    """What sets of products in formats do to the loss of a step that runs on one device.

    Args:
      formats: has the calls and the validation runs.
      space: of the function that they are calls of.
      options: of this function.
      types: of its flat arguments.
      paths: of its flat results.
      num_devices: that share partial sums.

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
        self.graph = space.graph
        self.groups = {group.name: group for group in all_groups(space, formats)}
        _check_trains(self.graph, options.function_name)
        types_of_results = [getattr(output, "aval", output) for output in self.graph.outputs]
        self._loss = loss_result("Formats.loss", formats.loss, types_of_results, self.graph.feedback, paths)
        self._options, self.types = options, types
        self._take_calls(formats)
        vertices = dict.fromkeys(v.index for group in self.groups.values() for v in group.vertices)
        self._row = {vertex: row for row, vertex in enumerate(vertices)}
        names = {
            "product": formats.products, "sum": formats.sums, "kept": formats.kept, "exchange": formats.exchanges
        }  # fmt: skip
        columns = [(kind, name) for kind, own in names.items() for name in own]
        self._column = {kind_and_name: column for column, kind_and_name in enumerate(columns)}
        sums = SumsInParts(formats.sums, space.rules, num_devices)
        kept = {v.results[0].id: "" for g in self.groups.values() if g.kind == "kept" for v in g.vertices}
        kept = KeptInCodes(formats.kept, space.residuals.late_reads(kept) if kept else LateReads())
        replaced = [(i, argument) for i, argument in enumerate(self.graph.feedback) if argument is not None]
        layout = space.layout([0] * len(space.nodes))
        exchanged = [v.index for g in self.groups.values() if g.kind == "exchange" for v in g.vertices]
        codes = sums, kept, ExchangedInCodes(formats.exchanges, frozenset(exchanged))
        mixed = MixedProducts(self.graph, layout, self._row, [FORMATS[name] for name in formats.products], *codes)
        self.overflows: Counter[str] = Counter()
        """How many operands of each group had numbers that are not finite, and so no scale."""
        self.look = Look(mixed, replaced, self._loss, self._count_overflow)

    def _take_calls(self, formats: Formats) -> None:
        self.formats = formats
        self._calls = flat_calls(self._options, self.types, "Formats.calls", formats.calls)
        self._runs = [
            flat_calls(self._options, self.types, f"Formats.validation_runs[{i}]", run)
            for i, run in enumerate(formats.validation_runs)
        ]
        _warn_of_equal_batches(self.graph, self._calls, self._runs)
        self._exact_losses: list[float] = []
        self._late_losses: dict[frozenset[FormatKey], list[float]] = {}

    def on(self, formats: Formats) -> "MeasuredLosses":
        """Returns the same function measured on the calls of formats with the same names; nothing compiles again."""
        other = copy.copy(self)
        other._take_calls(formats)
        return other

    def check_exact(self, fn: Callable[..., Sequence[Any]]) -> None:
        """Compares the first loss of what is measured, with exact products, with that of the function itself.

        Args:
          fn: of the flat arguments; returns the flat results.

        Raises:
          ValueError: they differ by more than rounding; it has both numbers.
        """
        first = (self._calls or self._runs[0])[0]
        measured, own = self.run({}, [first], frozenset())[1][0], float(jax.jit(fn)(*first)[self._loss])
        if abs(measured - own) > _MOST_DIFFERENCE * max(1.0, abs(own)):
            raise ValueError(
                f"The loss of the first call is {own:.8g}, but the products that formats are measured with make it "
                f"{measured:.8g}. This is a fault of diffshard, not of the function; search without `formats`."
            )

    def _count_overflow(self, row: int, column: int) -> None:
        vertex, name = list(self._row)[row], self.formats.products[column]
        self.overflows.update(group.name for group in self.groups.values() if (vertex, name) in group.members)

    @property
    def measured_by(self) -> str:
        """In words, what tells the increase of a whole set of products; "" for nothing."""
        if self._runs:
            return ONE_RUN if len(self._runs) == 1 else f"{len(self._runs)} validation runs"
        return "looks ahead" if self._calls else ""

    @property
    def takes_looks(self) -> bool:
        """Whether there are calls for looks ahead."""
        return bool(self._calls)

    def increase_of(self, products: Set[FormatKey]) -> Increase:
        """Returns what products in formats together add to the loss of a whole training: inf if it is not finite then.

        Validation runs tell it, or else looks ahead.
        """
        if not products:
            return Increase(0.0, 0.0)
        if self._runs:
            if not self._exact_losses:
                self._exact_losses = [self._finite(run, frozenset()) for run in self._runs]
            return increase_between(self.late_losses(products), self._exact_losses)
        pairs = []
        for state, window in self.points(products):
            own = _late(self.run(state, window, products)[1])
            if not np.isfinite(own):  # then the state of the next look may not be, and no exact loss follows from it
                return Increase(np.inf, None)
            pairs.append((own, self._finite(window, frozenset(), state)))
        return increase_between(*zip(*pairs, strict=True), factor=self.formats.factor)

    def late_losses(self, products: Set[FormatKey]) -> list[float]:
        """Returns the mean late loss of each validation run with products in formats; equal products run once."""
        key = frozenset(products)
        if key not in self._late_losses:
            self._late_losses[key] = [_late(self.run({}, run, key)[1], LATE_SHARE) for run in self._runs]
        return self._late_losses[key]

    def increases_at(self, products: Set[FormatKey], groups: Sequence[ProductGroup]) -> list[float]:
        """Measures what each group adds to the loss of a whole training where other products are in formats.

        All looks begin in a training with the given products in formats. Of a group among these it is what the loss
        falls by without it. The losses of the second half of each look count, and the increases of all looks are
        averaged. A group whose losses are lower on average counts as harmless: there rounding is noise. One with losses
        that are not finite has the increase inf.

        Args:
          products: that are in formats.
          groups: of the function.

        Raises:
          ValueError: a loss without these groups is not finite, or the function cannot be differentiated again.
        """
        by_gradients = self.formats.increases_by == "gradients"
        return (self.increases_by_gradients if by_gradients else self.increases_by_looks)(products, groups)

    def increases_by_looks(self, products: Set[FormatKey], groups: Sequence[ProductGroup]) -> list[float]:
        """Measures each group by looks with it and without it, beside the given products; see `increases_at`."""
        current = frozenset(products)
        losses = []
        for state, window in self.points(current):
            base, pairs = self._finite(window, current, state), []
            for group in groups:
                without = group.without(current)
                pair = [without | group.members, without]
                others = (_late(self.run(state, window, p)[1]) if p != current else base for p in pair)
                pairs.append(tuple(others))
            losses.append(pairs)
        means = [_mean_or_inf(*zip(*pairs, strict=True)) for pairs in zip(*losses, strict=True)]
        return [max(0.0, self.formats.factor * mean) for mean in means]

    def increases_by_gradients(self, products: Set[FormatKey], groups: Sequence[ProductGroup]) -> list[float]:
        """Measures all groups by the derivative of a look's loss, through its updates, in the weights of formats.

        A group that is measured stands half-way between exact and rounded. There the derivative of what is quadratic
        in a weight, as the damage of errors without a mean is, is the difference between its ends. Half of the groups
        of a format are measured at once, and the others are as given meanwhile; see `increases_at`.
        """
        current, sums = frozenset(products), dict.fromkeys((group.name for group in groups), 0.0)
        for state, window in self.points(current):
            for measured in self.parts(groups):
                for group, slope in zip(measured, self.half_way_slopes(current, measured, state, window), strict=True):
                    sums[group.name] += slope
        means = [self.formats.factor * total / len(self.formats.look_starts) for total in sums.values()]
        return [max(0.0, mean) if np.isfinite(mean) else np.inf for mean in means]

    def half_way_slopes(
        self, products: Set[FormatKey], groups: Sequence[ProductGroup], state: State, window: Sequence[FlatCall]
    ) -> list[float]:
        """Returns the derivative of a look's loss in the weight of each group's format where all are half-way.

        Args:
          products: that are in formats beside the groups.
          groups: of one format.
          state: before the look.
          window: its calls.

        Raises:
          ValueError: the function cannot be differentiated again.
        """
        weights = self._weights(products)
        places = [([self._row[v.index] for v in g.vertices], self._column[g.kind, g.format]) for g in groups]
        for group, (rows, column) in zip(groups, places, strict=True):
            weights[np.ix_(rows, self._columns_of(group.kind))] = 0.0
            weights[rows, column] = _HALF_WAY
        slopes = self._slopes(weights, state, window)
        return [float(slopes[rows, column].sum()) for rows, column in places]

    def parts(self, groups: Sequence[ProductGroup]) -> list[list[ProductGroup]]:
        """Returns the groups of each format in two parts, neighbours in different ones, which are measured at once."""
        of_format: dict[str, list[ProductGroup]] = {}
        for group in groups:
            of_format.setdefault(group.format, []).append(group)
        return [part for own in of_format.values() for part in (own[::2], own[1::2]) if part]

    def _slopes(self, weights: np.ndarray, state: State, window: Sequence[FlatCall]) -> np.ndarray:
        try:
            return self.look.slopes(weights, state, window)
        except (NotImplementedError, ValueError) as error:  # what JAX raises where it has no rule for a derivative
            raise ValueError(
                "The function has an operation that JAX cannot differentiate through the updates of its steps, as "
                '`Formats.increases_by` = "gradients" and `bilevel` need. Take "looks", which only run it.'
            ) from error

    def points(self, products: Set[FormatKey]) -> Iterator[tuple[State, Sequence[FlatCall]]]:
        """Returns the calls of each look, and the state before them in a training with some products in formats."""
        state, at = {}, 0
        for start in self.formats.look_starts:
            state, at = self.run(state, self._calls[at:start], products)[0], start
            yield state, self._calls[start : start + self.formats.steps]

    @property
    def no_weights(self) -> np.ndarray:
        """Weights with which nothing is rounded, `[rows, formats]`."""
        return np.zeros((len(self._row), len(self._column)), np.float32)

    def _weights(self, products: Set[FormatKey]) -> np.ndarray:
        weights = self.no_weights
        for key in products:
            weights[self._row[key[0]], self._column[kind_of(key), key[1]]] = 1.0
        return weights

    def _columns_of(self, kind: str) -> list[int]:
        return [column for (other, _), column in self._column.items() if other == kind]

    def run(self, state: State, calls: Sequence[FlatCall], products: Set[FormatKey]) -> tuple[State, np.ndarray]:
        """Returns the state after some calls, and the loss of each."""
        return self.look.run(self._weights(products), state, calls)

    def _finite(self, calls: Sequence[FlatCall], products: Set[FormatKey], state: State | None = None) -> float:
        """Returns the late loss of some calls that others are compared with."""
        share = LOOK_SHARE if state is not None else LATE_SHARE
        late = _late(self.run(state or {}, calls, products)[1], share)
        if not np.isfinite(late):
            where = ", ".join(name for name, group in self.groups.items() if group.members & products)
            what = "A look ahead" if state is not None else "A validation run"
            raise ValueError(
                f"{what} of {len(calls)} steps has a loss that is not finite, with {where or 'no product'} in fewer "
                "bits. Give calls from a later point of the training, or a smaller step."
            )
        return late


def _late(losses: np.ndarray, share: float = LOOK_SHARE) -> float:
    return float(np.mean(losses[-math.ceil(share * len(losses)) :]))


def increase_between(losses: Sequence[float], others: Sequence[float], factor: float = 1.0) -> Increase:
    """Returns the mean of the differences between pairs of losses, times a factor, and its standard error."""
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

"""What products in float8 do to the loss of a training: measured by looks ahead, and by short trainings.

Rounding harms training mostly through the gradients, so what one rounded step does to the loss says little. A look
ahead runs the user's own step several times from the same state on the same batches, with some products in float8 and
without; the difference of the losses is what they do. One factor leads from there to whole trainings. A validation run
trains from its beginning, and needs none.
"""

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, NamedTuple

import jax
import numpy as np

from diffshard.plans.text import ONE_RUN
from diffshard.sharding_search.call import ArrayType
from diffshard.sharding_search.number_formats import Formats, ProductGroup, all_groups, kind_of
from diffshard.sharding_search.options import Options
from diffshard.sharding_search.training_calls import (
    LOOK_SHARE,
    FlatCall,
    Look,
    State,
    check_trains,
    flat_calls,
    loss_result,
    warn_of_equal_batches,
)
from search_spaces.sharding.base import FormatKey
from search_spaces.sharding.kept_codes import LateReads
from search_spaces.sharding.number_formats import ExchangedInCodes, KeptInCodes, MixedProducts, SumsInParts
from search_spaces.sharding.product_formats import FORMATS
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
    """The measured losses of a step on one device with sets of products in formats.

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
        check_trains(self.graph, options.function_name)
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
        warn_of_equal_batches(self.graph, self._calls, self._runs)
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
        """Returns by how much products in formats together raise the loss of a whole training; inf if it is not finite.

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

"""`bilevel` of a whole training step: it trains in number formats while gradients choose them.

Steps of the state on training batches and steps of the choice on validation batches alternate. The choice has a row of
weights p for each operation that may be in fewer bits: exact, or one of its formats. Each step of the training draws
its formats from them. The mean loss L(p) of trainings that draw so is linear in each row (the multilinear extension of
the loss of fixed formats), and dL/dp of a format is what it adds to the loss where all others are drawn. A look ahead
estimates that, for half of the groups of a format at once: from the present state, over the last validation batches, by
the derivative of their late loss through the updates where these groups are half-way between exact and rounded. The
weights minimise

    seconds(p) + λ · increases · p - τ · entropy(p),

in which λ is the least price at which increases · p is within the limit. So each row is the softmax of
(gain - λ · increase) / τ, and the temperature τ falls with the root of the number of looks. In the end `search` finds
shardings and formats together by the mean increases, and rounds the choice with a bound.

Source: G. Calinescu, C. Chekuri, M. Pál and J. Vondrák, "Maximizing a Monotone Submodular Function Subject to a Matroid
Constraint" (2011), for the multilinear extension; Y. Freund and R. Schapire, "A Decision-Theoretic Generalization of
On-Line Learning" (1997), for the temperature.
"""

import copy
import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from diffshard.base import checked_mesh
from diffshard.bilevel_search.inputs import check_key, checked_steps
from diffshard.bilevel_search.relaxed_formats import (
    RelaxedFormats,
    StepMetrics,
    StepState,
    entropy_of,
    mean_or_0,
    relaxed_within,
)
from diffshard.front_end import search
from diffshard.sharding_search.call import array_types, bound_arguments, call_of, split
from diffshard.sharding_search.format_losses import MeasuredLosses
from diffshard.sharding_search.format_rounds import stand_ins
from diffshard.sharding_search.format_search import first_start
from diffshard.sharding_search.number_formats import Formats, ProductGroup, offered_groups, rows_of
from diffshard.sharding_search.options import Options
from diffshard.sharding_search.plan import Plan
from diffshard.sharding_search.planned_function import PlannedFunction
from diffshard.sharding_search.request import PlanRequest
from diffshard.sharding_search.step_objective import step_s
from diffshard.sharding_search.tracing import measured_options, space_of, trace_call
from diffshard.sharding_search.training_calls import FlatCall, flat_calls
from search_spaces.sharding.base import FormatKey
from search_spaces.sharding.format_gains import gains_together_s

LOOK_EVERY = 8
"""Updates from one look ahead to the next, in steps of a look. A look takes about four times as long as its steps, and
so half as long as the updates between two."""
_LEAST_SHARE = 1e-6
"""The share of the limit that is left where arrays that memory needs in fewer bits take all of it."""


class _Begun(NamedTuple):
    """The parts of a search that its first arguments decide.

    Attributes:
      kinds: the structure and types of the arguments, of the function that trains and of the planned one.
      measured: options of the function that trains.
      planned_args: those that the other is planned for.
      batch_positions: of the positional arguments that no result replaces.
      args: those that `init` was called with.
      batch: the numbers of the flat arguments in these.
      rows: `[groups]` equal for formats of the same operations.
      losses: of the function that trains.
      groups: of the planned one.
      gains_s: `[groups]` what each saves of a step, with the shardings of the fastest exact one.
      kept: `[groups]` of arrays that the memory limit needs in fewer bits, whatever the loss says.
      exact_s: seconds of the fastest exact step.
    """

    kinds: Any
    measured: Options
    planned_args: tuple[Any, ...]
    args: tuple[Any, ...]
    batch_positions: tuple[int, ...]
    batch: frozenset[int]
    losses: MeasuredLosses
    groups: tuple[ProductGroup, ...]
    rows: np.ndarray
    gains_s: np.ndarray
    kept: np.ndarray
    exact_s: float


class TrainingSearch:
    """A bilevel search of a training step's number formats: `init`, `update` and `finish`; made by `bilevel`."""

    def __init__(
        self,
        fn: Any,
        mesh: Any,
        formats: Formats,
        choice_every: int | None,
        options: Mapping[str, Any],
    ):
        _check(fn, mesh, formats)
        self._formats = formats
        self._every = checked_steps(LOOK_EVERY * formats.steps if choice_every is None else choice_every)
        self._search = functools.partial(search, fn, mesh, **options)
        self._options = self._planned_by({}).options
        self._begun: _Begun | None = None

    def with_limit(self, max_loss_increase: float) -> "TrainingSearch":
        """Returns the search within another limit on the loss; what is known of its arguments is not found again."""
        other = copy.copy(self)
        other._formats = replace(self._formats, max_loss_increase=max_loss_increase)
        return other

    def init(self, key: jax.Array, *args: Any, planned_for: Sequence[Any] | None = None) -> StepState:
        """Returns the first state; the same key draws the same formats.

        Args:
          key: a JAX random key.
          *args: the positional arguments of a step, arrays on one device: the training begins with its state.
          planned_for: where `Formats.measured_fn` trains in the place of the function, the arguments of that one, which
            may be `jax.ShapeDtypeStruct`s.

        Raises:
          TypeError, ValueError: the function trains nothing, its loss is not found, or the arguments are no arrays.
          InfeasibleError: no plan fits the memory limit.
        """
        check_key(key)
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(args)):
            raise TypeError("`init` begins a training, which runs: give arrays and no `jax.ShapeDtypeStruct`.")
        if (planned_for is None) != (self._formats.measured_fn is None):
            which = "which is planned" if planned_for is None else "which `Formats` does not have"
            raise ValueError(
                f"`planned_for` is for the function beside `Formats.measured_fn`, {which}: give both or neither."
            )
        planned_args = args if planned_for is None else tuple(planned_for)
        measured = measured_options(self._options)
        kinds = _kind_of(measured, args), _kind_of(self._options, planned_args)
        if self._begun is None or self._begun.kinds != kinds:
            self._begun = self._begin(measured, args, planned_args, kinds)
        begun = self._begun
        (first,) = flat_calls(begun.measured, begun.losses.types, "init", [args])
        zeros = np.zeros(len(begun.groups))
        return StepState(
            {i: array for i, array in enumerate(first) if i not in begun.batch},
            (),
            zeros,
            zeros.astype(np.int64),
            0,
            key,
        )

    def update(self, state: StepState, train_batch: Any, val_batch: Any) -> tuple[StepState, StepMetrics]:
        """Trains one step, and may take a look ahead from there.

        Args:
          state: after `init` or another update; it is not changed.
          train_batch: the argument of the function that no result replaces; of several a tuple.
          val_batch: the same of other data. The last `Formats.steps` of them are those of a look.

        Raises:
          TypeError, ValueError: batches of other types than in `init`, or no `init` before.
        """
        begun = self._known
        key, own_key = jax.random.split(state.key)
        relaxed = self.relaxed(state)
        drawn = _drawn(begun, relaxed.weights, own_key)
        products = stand_ins(begun.losses, begun.groups, drawn)
        arrays, (loss,) = begun.losses.run(state.arrays, [self._flat("train_batch", train_batch)], products)
        after = {i: arrays[i] for i in state.arrays if i in arrays and i >= 0}
        before = {i: state.arrays[i] for i in after}
        refused = not np.isfinite(loss) or bool(np.any(_are_finite(before) & ~_are_finite(after)))
        validation = self._flat("val_batch", val_batch)
        batch = {i: validation[i] for i in begun.batch}
        window = (*state.window, batch)[-self._formats.steps :]
        state = StepState(
            state.arrays if refused else {**state.arrays, **arrays},
            window,
            state.slopes,
            state.num_looks,
            state.step + 1,
            key,
        )
        increase = _increase(self._increases(state), relaxed.weights)
        looks = len(window) == self._formats.steps and (state.step - self._formats.steps) % self._every == 0
        before_look = state.num_looks
        if looks and not refused:
            state = self._looked(state, products)
        return state, StepMetrics(
            float(loss),
            len(drawn),
            increase,
            1.0 - float(relaxed.weights @ begun.gains_s) / begun.exact_s,
            entropy_of(relaxed.weights, begun.rows),
            bool(np.any(state.num_looks != before_look)),
            refused,
        )

    def relaxed(self, state: StepState) -> RelaxedFormats:
        """Returns the relaxed choice of a state: rows of softmax weights."""
        begun, increases = self._known, self._increases(state)
        gains_s = np.where(np.isfinite(increases) & (begun.gains_s > 0), begun.gains_s, -np.inf)
        temperature_s = mean_or_0(begun.gains_s[begun.gains_s > 0]) / np.sqrt(1.0 + np.max(state.num_looks, initial=0))
        taken = _increase(increases, begun.kept)  # by what memory needs
        limit = max(self._formats.max_loss_increase - taken, _LEAST_SHARE * self._formats.max_loss_increase)
        weights, price_s = relaxed_within(gains_s, increases, limit, temperature_s, begun.rows)
        return RelaxedFormats(np.maximum(weights, begun.kept), price_s)

    def increases(self, state: StepState) -> dict[str, float]:
        """Returns by how much each measured group raises the loss of a whole training, by its name."""
        names = [group.name for group in self._known.groups]
        return {n: float(x) for n, x in zip(names, self._increases(state), strict=True) if np.isfinite(x)}

    def finish(self, state: StepState) -> tuple[Plan, Any]:
        """Returns the plan, and the state of the training as the function takes it; of several arguments a tuple.

        Shardings and formats are searched together, by the mean of what looks have measured, for the fastest step that
        is predicted to stay within the limit. With `Formats.validation_runs` what is found is trained beside simple
        rules, and the fastest of those that were measured to stay within the limit is returned.

        Raises:
          ValueError: no look was taken yet.
          InfeasibleError: no plan fits the memory limit.
        """
        begun, increases = self._known, self.increases(state)
        if not increases:
            raise ValueError(
                f"No look ahead with a finite loss was taken in {state.step} updates, so that nothing is known of the "
                f"loss: the first one comes with update {self._formats.steps} (`Formats.steps`)."
            )
        plan = self._planned_by(increases).plan(*begun.planned_args)
        return plan, self.trained(state)

    def trained(self, state: StepState) -> Any:
        """Returns the state of the training as the function takes it; of several arguments a tuple."""
        begun = self._known
        arrays, structure = split(bound_arguments(begun.measured, begun.args, {}))
        args, _ = structure.unflatten(state.arrays.get(i, array) for i, array in enumerate(arrays))
        own = tuple(arg for i, arg in enumerate(args) if i not in begun.batch_positions)
        return own[0] if len(own) == 1 else own

    def _planned_by(self, increases: Mapping[str, float]) -> PlannedFunction[Plan]:
        step = self._search(formats=replace(self._formats, increases=increases, calls=()))
        assert isinstance(step, PlannedFunction)
        return step

    def _begin(self, measured: Options, args: tuple[Any, ...], planned_args: tuple[Any, ...], kinds: Any) -> _Begun:
        """Traces the functions, and finds the fastest exact step and what groups gain there."""
        options, formats = self._options, self._formats
        traced = trace_call(options, call_of(options, planned_args, {}))
        request = PlanRequest(options, traced, space_of(options, traced), time.perf_counter())
        if not request.space.as_program:
            raise ValueError(
                "`formats` need an explicit program, and the function has operations that cannot be in one."
            )
        space = request.space
        if formats.measured_fn is not None:
            traced = trace_call(measured, call_of(measured, args, {}))
            space = space_of(measured, traced)
        losses = MeasuredLosses(
            replace(formats, calls=(args,), validation_runs=()),
            space,
            measured,
            array_types(traced.call.arrays),
            traced.out_paths,
            int(np.prod(request.space.axis_sizes)),
        )
        losses.check_exact(core.jaxpr_as_fun(traced.jaxpr))
        call = traced.call
        replaced = {call.numbers[argument] for argument in traced.graph.feedback if argument is not None}
        groups = tuple(group for group in offered_groups(request.space, formats) if group.name in losses.groups)
        if not groups:
            name, hardware = options.function_name, options.hardware.name
            raise ValueError(
                f"No format of `Formats` gains time for {name} on {hardware}, or none of its operations has a name "
                "that `Formats.measured_fn` has: there is nothing to choose. Give other formats."
            )
        start = first_start(request, groups, options.deadline())
        offered = request.space.with_formats({key: 0.0 for group in groups for key in sorted(group.members)})
        gains = gains_together_s(offered, start.choice)
        return _Begun(
            kinds,
            measured,
            planned_args,
            args,
            tuple(sorted(set(call.numbers) - replaced)),
            frozenset(i for i, number in enumerate(call.numbers) if number not in replaced),
            losses,
            groups,
            rows_of(groups),
            np.array([sum(max(0.0, gains[member]) for member in group.members) for group in groups]),
            np.array([bool(group.members & start.kept) for group in groups], float),
            step_s(request.space.predict(start.choice.tolist())),
        )

    @property
    def _known(self) -> _Begun:
        if self._begun is None:
            raise ValueError("The search knows no arguments yet; call `init(key, *args)` first.")
        return self._begun

    def _flat(self, name: str, batch: Any) -> FlatCall:
        """Returns the flat arguments of a step with a batch; the state in them is that of `init`."""
        begun, args = self._known, list(self._known.args)
        values = (batch,) if len(begun.batch_positions) == 1 else tuple(batch)
        if len(values) != len(begun.batch_positions):
            raise ValueError(f"`{name}` must be a tuple of {len(begun.batch_positions)} arguments, not {len(values)}.")
        for position, value in zip(begun.batch_positions, values, strict=True):
            args[position] = value
        flat = flat_calls(begun.measured, begun.losses.types, name, [tuple(args)])[0]
        if _kind_of(begun.measured, tuple(args)) != begun.kinds[0]:
            raise ValueError(f"`{name}` has another structure, or other constants, than the arguments of `init`.")
        return flat

    def _looked(self, state: StepState, products: frozenset[FormatKey]) -> StepState:
        """Returns the state with the slopes of a look: the first one is at all groups, others at a part of them."""
        begun, slopes, num_looks = self._known, np.array(state.slopes, float), np.array(state.num_looks, np.int64)
        places = range(len(begun.losses.types))
        calls = [[{**state.arrays, **batch}[i] for i in places] for batch in state.window]
        parts = begun.losses.parts([begun.losses.groups[group.name] for group in begun.groups])
        numbers = {group.name: number for number, group in enumerate(begun.groups)}
        number = (int(state.step) - self._formats.steps) // self._every
        for part in parts if number == 0 else [parts[number % len(parts)]]:
            own = begun.losses.half_way_slopes(products, part, state.arrays, calls)
            if not np.all(np.isfinite(own)):
                continue
            for group, slope in zip(part, own, strict=True):
                slopes[numbers[group.name]] += slope
                num_looks[numbers[group.name]] += 1
        return state._replace(slopes=slopes, num_looks=num_looks)

    def _increases(self, state: StepState) -> np.ndarray:
        """Returns `[groups]` what each adds to the loss of a whole training; NaN where no look was taken."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.maximum(self._formats.factor * state.slopes / state.num_looks, 0.0)


def _drawn(begun: _Begun, weights: np.ndarray, key: jax.Array) -> frozenset[FormatKey]:
    """Returns formats that are drawn: of each row one of its formats, or none."""
    uniform = np.asarray(jax.random.uniform(key, (len(begun.groups),)), float)
    drawn, below = [], np.zeros(len(begun.groups))
    for number, (row, weight) in enumerate(zip(begun.rows, weights, strict=True)):
        if below[row] <= uniform[row] < below[row] + weight:
            drawn.append(number)
        below[row] += weight
    return frozenset(member for number in drawn for member in begun.groups[number].members)


def _increase(increases: np.ndarray, weights: np.ndarray) -> float:
    return float(np.sum(np.where(weights > 0, weights * np.nan_to_num(increases), 0.0)))


def _kind_of(options: Options, args: tuple[Any, ...]) -> Any:
    """Returns the structure and the types of arguments, on which the traced function depends."""
    arrays, structure = split(bound_arguments(options, args, {}))
    return structure, array_types(arrays)


@jax.jit
def _are_finite(arrays: Any) -> jax.Array:
    """Returns for each array of a pytree whether all of its numbers are finite."""
    leaves = [x for x in jax.tree.leaves(arrays) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.array([jnp.all(jnp.isfinite(x)) for x in leaves], bool)


def _check(fn: Any, mesh: Any, formats: Any) -> None:
    if not callable(fn):
        raise TypeError(f"`fn` must be a training step, as `search` takes it, not {fn!r}.")
    checked_mesh(mesh)
    if not isinstance(formats, Formats):
        raise TypeError(f"`formats` must be a diffshard.formats.Formats, not {type(formats).__name__}.")
    for name in ("calls", "increases"):
        if getattr(formats, name):
            raise ValueError(f"`Formats.{name}` is for `search`: `bilevel` measures while it trains. Leave it out.")

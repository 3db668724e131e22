"""`delayed`: a training step with the gradients of the weights of one step ago, so that steps can overlap.

W(t + 1) = W(t) - η·∇f(W(t - 1)) needs two versions of the weights, each a leaf of the state: what reverse-mode
differentiation made reads the previous one, and everything else, such as an optimiser, the current one. JAX writes into
the traced step which of its equations belong to a differentiated function, so that nothing in the step changes.

Weights that go on as they went last are known before the step that makes them ends. So gradients may also be read at
predicted weights, W(t - 1) + s·(W(t - 1) - W(t - 2)), which needs no knowledge of the optimiser and one more version.
With s = 1 and gradient descent with momentum this is the prediction that SpecTrain makes from the velocity.

Source: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (PipeDream-2BW, 2021), section 3.1. Chen,
Yang, Cheng, "Efficient and Robust Parallel DNN Training through Model Parallelism on Multi-GPU Platform" (SpecTrain,
2018), section 4, equation 4.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from cost.real_numbers import real_number
from diffshard.sharding_search.call import Structure, abstract_array, abstract_split, array_paths, split
from diffshard.staged_array import StagedArray
from search_spaces.pipelines.step_parts import is_float
from search_spaces.replay import bind, context_of, with_inner, without_calls, without_dead_code
from search_spaces.sharding.tracing import INLINED_BODIES, feedback_of


@jax.tree_util.register_dataclass
@dataclass(eq=False, repr=False)
class DelayedArray:
    """An array of a training state in two versions, or in three where weights are predicted; a pytree of them.

    Attributes:
      current: what the last step made.
      previous: what it was before that step; gradients are of this version, or of what follows from it and `older`.
      older: what it was before the step before that; None where weights are not predicted.
    """

    current: Any
    previous: Any
    older: Any = None

    def __repr__(self) -> str:
        older = "" if self.older is None else f", older={self.older!r}"
        return f"DelayedArray(current={self.current!r}, previous={self.previous!r}{older})"


class DelayedStep:
    """A training step with the gradients of the weights of one step ago; made by `delayed`."""

    def __init__(self, fn: Callable[..., Any], predicted_steps: float = 0.0):
        functools.update_wrapper(self, fn)
        self._fn, self.predicted_steps = fn, predicted_steps

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a step; weights are `DelayedArray` in its result, and in its arguments unless this is the first step.

        Raises:
          ValueError: the step has no gradient, or its weights are carried through a loop over whole steps.
        """
        args, kwargs = self.with_versions(*args, **kwargs)
        current, structure = split(_version((args, kwargs), "current"))
        previous, _ = split(_version((args, kwargs), "previous"))
        call = traced_step(self._fn, *structure.unflatten(current))
        read, older = previous, dict.fromkeys(call.delayed)
        if self.predicted_steps:
            oldest, _ = split(_version((args, kwargs), "older"))
            older = {i: previous[i] for i in call.delayed}
            read = [x + self.predicted_steps * (x - oldest[i]) if i in older else x for i, x in enumerate(previous)]
        results = _evaluate(call, current, read)
        leaves = [
            DelayedArray(result, current[argument], older[argument]) if argument in call.delayed else result
            for result, argument in zip(results, call.feedback, strict=True)
        ]
        return call.result.unflatten(leaves)

    def with_versions(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments of the first step, arrays or their shapes, with all versions of the weights.

        Arguments that have `DelayedArray` already get or lose the oldest version at most.
        """
        if has_versions((args, kwargs)):
            return jax.tree.map(self._delayed, (args, kwargs), is_leaf=_is_delayed)
        arrays, structure = split((tuple(args), kwargs))
        delayed_arrays = traced_step(self._fn, args, kwargs).delayed
        return structure.unflatten(
            [self._delayed(DelayedArray(x, _copy(x))) if i in delayed_arrays else x for i, x in enumerate(arrays)]
        )

    def _delayed(self, leaf: Any) -> Any:
        """Returns the versions of an array that this step reads: the oldest is the previous one at first."""
        if not _is_delayed(leaf):
            return leaf
        older = _copy(leaf.previous) if leaf.older is None else leaf.older
        return DelayedArray(leaf.current, leaf.previous, older if self.predicted_steps else None)


def delayed(fn: Callable[..., Any], *, predicted_steps: float = 0.0) -> DelayedStep:
    """Makes a training step whose gradients are those of the weights of one step ago, or of weights predicted from it.

    >>> step = jax.jit(diffshard.pipelines.delayed(train_step))
    >>> for batch in data:
    >>>     state, loss = step(state, batch)
    >>> params = diffshard.pipelines.current_version(state)

    Devices then need not wait for the weights of a step before they begin the next: a pipeline has no bubble between
    steps. **Results differ** from those of `fn`: the update of step t applies the gradient, and returns the loss, of
    batch t at the weights before step t - 1. The first step has only one version, and does what `fn` does.

    All floating-point arguments are delayed that `fn` replaces and that a function differentiated by `jax.grad` (or
    `value_and_grad`, `vjp`) in it reads; these are leaves of the state of type `DelayedArray` from the first result on.
    What only an optimiser reads, random keys and counters have one version.

    Args:
      fn: a training step `(state, batch) -> (state, loss)` or alike, which differentiates.
      predicted_steps: s, by how many steps weights are predicted: gradients are read at W(t - 1) + s·(W(t - 1) -
        W(t - 2)). With 1 that is where W(t) will be if the last change repeats itself; it takes a third version.

    Returns:
      A function of the same arguments, for `jax.jit`, `in_microbatches` or `search`.

    Raises:
      TypeError: `fn` is no function.
      ValueError: `predicted_steps` is no finite number, 0 or more; or `fn` is delayed with another one already.
    """
    if not callable(fn):
        raise TypeError(f"`fn` must be a function, not {type(fn).__name__}.")
    steps = checked_predicted_steps(predicted_steps)
    if not isinstance(fn, DelayedStep):
        return DelayedStep(fn, steps)
    if fn.predicted_steps != steps:
        raise ValueError(
            f"`predicted_steps` is {steps:g}, but {getattr(fn, '__name__', 'fn')} is delayed with "
            f"{fn.predicted_steps:g} already. Give the step itself, or the same number."
        )
    return fn


def checked_predicted_steps(steps: Any) -> float:
    """Returns by how many steps weights are predicted; raises `ValueError` unless it is finite and 0 or more."""
    number = real_number(steps)
    if number is None or not 0 <= number < math.inf:
        raise ValueError(
            f"`predicted_steps` must be a finite number, 0 or more, not {steps!r}: 0 predicts nothing, and 1 predicts "
            "the weights of one step later."
        )
    return number


def has_versions(tree: Any) -> bool:
    """Returns whether some leaf of a tree is a `DelayedArray`."""
    return any(map(_is_delayed, jax.tree.leaves(tree, is_leaf=_is_delayed)))


def current_version(tree: Any) -> Any:
    """Returns a state without the previous versions of its weights: for evaluation, checkpoints, or another step."""
    return _version(tree, "current")


class TracedStep(NamedTuple):
    """A step that was traced.

    Attributes:
      program: of the flat arguments, without calls.
      feedback: for each flat result the position of the flat argument that it replaces, or None.
      delayed: the positions of the arguments that have two versions.
      is_differentiated: of each equation, whether it belongs to a differentiated function.
      is_needed: of each equation, whether such an equation needs it.
    """

    program: core.ClosedJaxpr
    result: Structure
    feedback: list[int | None]
    delayed: frozenset[int]
    is_differentiated: list[bool]
    is_needed: list[bool]


def traced_step(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> TracedStep:
    """Traces a training step, and finds which of its arguments are to be delayed; errors are those of `delayed`."""
    arrays, structure = split((tuple(args), dict(kwargs)))
    results: list[tuple[Structure, list[int | None]]] = []

    def from_arrays(*flat: Any) -> list[Any]:
        new_args, new_kwargs = structure.unflatten(flat)
        result = fn(*new_args, **new_kwargs)
        leaves, of_result = split(result)
        given = (*args, *(kwargs[name] for name in sorted(kwargs)))
        results.append((of_result, feedback_of(result, given, abstract_split)))
        return leaves

    traced = jax.make_jaxpr(from_arrays)(*map(abstract_array, arrays))
    program = without_dead_code(without_calls(traced, INLINED_BODIES))
    result, feedback = results[-1]
    jaxpr = program.jaxpr
    is_differentiated = [_is_differentiated(equation) for equation in jaxpr.eqns]
    needed: set[core.Var] = set()
    is_needed = []
    for equation, is_own in zip(reversed(jaxpr.eqns), reversed(is_differentiated), strict=True):
        is_needed.append(is_own or any(v in needed for v in equation.outvars))
        if is_needed[-1]:
            needed.update(v for v in equation.invars if isinstance(v, core.Var))
    replaced = {argument for argument in feedback if argument is not None}
    found = frozenset(i for i in replaced if jaxpr.invars[i] in needed and is_float(jaxpr.invars[i]))
    call = TracedStep(program, result, feedback, found, is_differentiated, is_needed[::-1])
    named = [*((f"argument {i}", x) for i, x in enumerate(args)), *((name, kwargs[name]) for name in sorted(kwargs))]
    _check(call, getattr(fn, "__name__", "fn"), [path for name, x in named for path in array_paths(name, x)])
    return call


def _check(call: TracedStep, name: str, paths: Sequence[str]) -> None:
    jaxpr = call.program.jaxpr
    if not call.delayed:
        raise ValueError(
            f"{name} has no gradient of an array that it replaces, so that nothing can be delayed. Differentiate in it "
            "with `jax.grad` or `jax.value_and_grad`, and return the new weights in the state that it was given."
        )
    made = {v for e, is_own in zip(jaxpr.eqns, call.is_differentiated, strict=True) if is_own for v in e.outvars}
    for variable, argument in zip(jaxpr.outvars, call.feedback, strict=True):
        if argument in call.delayed and variable in made:
            raise ValueError(
                f"{name} replaces {paths[argument]} inside of what differentiates, such as a loop over whole training "
                "steps, so that no version of one step ago can be read. Give a function of a single step."
            )


def _evaluate(call: TracedStep, current: Sequence[Any], previous: Sequence[Any]) -> list[Any]:
    """Runs a step: differentiated functions, and what they need, with the previous version of delayed arguments."""
    jaxpr = call.program.jaxpr
    now: dict[core.Var, Any] = dict(zip(jaxpr.constvars, call.program.consts, strict=True))
    then = dict(now)
    now.update(zip(jaxpr.invars, current, strict=True))
    versions = enumerate(zip(current, previous, strict=True))
    then.update(zip(jaxpr.invars, (old if i in call.delayed else new for i, (new, old) in versions), strict=True))

    def run(equation: core.JaxprEqn, env: dict[core.Var, Any]) -> list[Any]:
        with context_of(equation):
            return list(bind(equation, _read(equation.invars, env)))

    for equation, is_own, is_needed in zip(jaxpr.eqns, call.is_differentiated, call.is_needed, strict=True):
        pairs = zip(_read(equation.invars, now), _read(equation.invars, then), strict=True)
        is_shared = is_own or all(new is old for new, old in pairs)
        old_results = run(equation, then) if is_needed else None
        results = old_results if old_results is not None and is_shared else run(equation, now)
        then.update(zip(equation.outvars, results if old_results is None else old_results, strict=True))
        now.update(zip(equation.outvars, results, strict=True))
    return _read(jaxpr.outvars, now)


def _read(variables: Sequence[Any], env: Mapping[core.Var, Any]) -> list[Any]:
    return [env[v] if isinstance(v, core.Var) else v.val for v in variables]


def _is_differentiated(equation: core.JaxprEqn) -> bool:
    """Returns whether differentiation made an equation or what is inside of it: JAX says so in its name stack."""
    scopes = (str(inner.source_info.name_stack) for inner in with_inner([equation]))
    return any("jvp(" in scope or "transpose(" in scope for scope in scopes)


def _is_delayed(leaf: Any) -> bool:
    return isinstance(leaf, DelayedArray)


def _version(tree: Any, name: str) -> Any:
    return jax.tree.map(lambda leaf: getattr(leaf, name) if _is_delayed(leaf) else leaf, tree, is_leaf=_is_delayed)


def _copy(array: Any) -> Any:
    """Returns an array with memory of its own, so that all versions can be donated; a shape remains as it is."""
    if isinstance(array, StagedArray):
        return StagedArray([_copy(part) for part in array.parts], array.dim)
    return jnp.copy(array) if isinstance(array, jax.Array) else array

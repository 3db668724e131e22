"""`in_microbatches`: a training step that computes its batch in parts, with the results of the whole."""

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from cost.real_numbers import Count, checked_number
from diffshard.sharding_search.argument_names import (
    argument_names,
    checked_positions,
    names_by_position,
    positional_names,
    positions,
    signature_of,
)
from diffshard.sharding_search.call import Structure, abstract_array, abstract_split, array_paths, check_rows, split
from diffshard.sharding_search.tracing import lost_changes, warn_of_lost_changes
from search_spaces.pipelines.batch_flow import batch_flow
from search_spaces.pipelines.batch_states import DivisionError
from search_spaces.pipelines.microbatches import MicrobatchedFunction
from search_spaces.pipelines.own_rows import with_own_rows
from search_spaces.replay import without_dead_code
from search_spaces.sharding.shardy import rules_of
from search_spaces.sharding.tracing import build_graph, feedback_of


class BatchArguments(NamedTuple):
    """Which arguments of a function have the batch as the leading dimension of their arrays."""

    argnums: tuple[int, ...]
    argnames: tuple[str, ...]

    @classmethod
    def checked(cls, argnums: int | Sequence[int], argnames: str | Sequence[str]) -> "BatchArguments":
        """Returns them; raises `ValueError` if there are none, or a position or a name is none."""
        found = cls(checked_positions("batch_argnums", positions(argnums)), argument_names(argnames))
        if not all(isinstance(name, str) for name in found.argnames):
            raise ValueError(
                f"`batch_argnames` must be names of arguments, not {argnames!r}; `batch_argnums` takes positions."
            )
        if not any(found):
            raise ValueError(
                "`batch_argnums` must be positions of arguments that have the batch, not (), where `batch_argnames` "
                "has no names."
            )
        return found


class GivenArgument(NamedTuple):
    """An argument of a call: its name, its position if it has one, and its value."""

    name: str
    number: int | None
    value: Any


def given_arguments(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[GivenArgument]:
    """Returns the arguments of a call in the order in which JAX flattens them."""
    names = names_by_position(signature_of(fn), len(args))
    by_position = [GivenArgument(name, i, value) for i, (name, value) in enumerate(zip(names, args, strict=True))]
    return [*by_position, *(GivenArgument(name, None, kwargs[name]) for name in sorted(kwargs))]


def batch_of(
    fn: Callable[..., Any],
    given: Sequence[GivenArgument],
    arrays: Sequence[Any],
    arguments: BatchArguments,
    batch_name: str,
) -> tuple[list[str], list[int]]:
    """Returns the path of each array of a call, and the numbers of those that belong to the batch."""
    (argnums, argnames), names = arguments, positional_names(signature_of(fn))
    batch_names = {names[n] for n in argnums if n < len(names)} | set(argnames)
    paths, batch, is_given = [], [], set()
    for name, number, argument in given:
        is_batch = number in argnums or name in batch_names
        is_given |= {name, number} if is_batch else set()
        for path in array_paths(name, argument):
            if is_batch and _has_batch(arrays[len(paths)]):
                batch.append(len(paths))
            paths.append(path)
    missing = [n for n in argnums if n not in is_given and (n >= len(names) or names[n] not in is_given)]
    missing += [name for name in argnames if name not in is_given]
    if missing:
        which = missing[0]
        own = f" ({names[which]})" if isinstance(which, int) and which < len(names) else ""
        given_names = ", ".join(argument.name for argument in given) or "nothing"
        raise ValueError(
            f"`{batch_name}` names the argument {which}{own}, which {getattr(fn, '__name__', 'the function')} was not "
            f"given; it was given {given_names}. Give that argument, or name those that have the batch."
        )
    return paths, batch


def _has_batch(array: Any) -> bool:
    is_key = jnp.issubdtype(getattr(array, "dtype", jnp.float32), jax.dtypes.prng_key)
    return not is_key and bool(getattr(array, "shape", ()))


def in_microbatches(
    fn: Callable[..., Any],
    num_microbatches: int,
    *,
    batch_argnums: int | Sequence[int] = 1,
    batch_argnames: str | Sequence[str] = (),
) -> Callable[..., Any]:
    """Makes a function that computes a batch in equal parts, one after the other, with the results of the whole batch.

    >>> step = diffshard.pipelines.in_microbatches(train_step, 8)
    >>> state, loss = jax.jit(step)(state, batch)

    Activations then take an eighth of the memory. Gradients and other sums over the batch are added up, and what needs
    them, such as an optimiser's update, runs once. Where a gradient reads a mean over the batch, as that of the
    balancing loss of a mixture of experts, a forward pass of its own makes the mean before. Random numbers are those of
    the whole batch, so that results differ from those of `fn` by the rounding of sums only. Nothing in `fn` changes:
    what belongs to the batch is found in its traced program. Modules of flax's nnx among the arguments are changed in
    place, once, as `nnx.jit` does; statistics that they keep are those of the whole batch.

    Args:
      fn: a function of arrays, usually a whole training step.
      num_microbatches: the number of parts; it divides the leading dimension of each array of the batch.
      batch_argnums: positions of the arguments whose arrays have the batch as their leading dimension; scalars and
        random keys among them are the same for all parts. It makes no difference whether a call gives such an argument
        by position or by keyword.
      batch_argnames: further such arguments by name.

    Returns:
      A function of the same arguments, for `jax.jit` or `diffshard.search`; of modules for `nnx.jit` or
      `diffshard.nnx.search`.

    Raises:
      ValueError: a number breaks its rule; or, when the result is called, the batch cannot be divided, or an operation
        mixes its examples before others need them one by one, such as batch normalisation; names the operation.
    """
    count = checked_number("num_microbatches", num_microbatches, Count)
    batch = BatchArguments.checked(batch_argnums, batch_argnames)

    def run(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        traced = traced_call(fn, count, batch, args, kwargs)
        return traced.result.unflatten(divided_call(traced, count, estimates_sums=True)(*traced.arrays))

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "flax.nnx" in sys.modules:  # there are modules only where it is imported
            from diffshard.module_states import has_module, of_states, split_modules

            if has_module((args, kwargs)):
                modules = split_modules(args, kwargs)
                return modules.update(*run(of_states(fn, modules.graph), modules.args, modules.kwargs))
        return run(fn, args, kwargs)

    return call if count > 1 else fn


class TracedCall(NamedTuple):
    """A function that was traced for some arguments.

    Attributes:
      program: of the flat arrays, without dead code.
      batch: the positions of those that have the batch as their leading dimension.
      result: the structure of the result, with its leaves that are no arrays.
      feedback: for each flat result the flat argument that it replaces in the next call, or None.
    """

    name: str
    program: core.ClosedJaxpr
    arrays: list[Any]
    paths: list[str]
    batch: list[int]
    result: Structure
    feedback: list[int | None]


def traced_call(
    fn: Callable[..., Any],
    count: int,
    batch: BatchArguments,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    count_name: str = "num_microbatches",
) -> TracedCall:
    """Traces a function for some arguments, arrays or their shapes.

    Raises:
      ValueError: an argument that has the batch is missing, `count` does not divide it, or it has no rows; names the
        argument.
    """
    arrays, structure = split((tuple(args), dict(kwargs)))
    given = given_arguments(fn, args, kwargs)
    paths, of_batch = batch_of(fn, given, arrays, batch, _batch_name(count_name))
    for i in of_batch:
        if arrays[i].shape[0] % count:
            raise ValueError(
                f"`{count_name}` must divide the batch; got {count} and {paths[i]} of shape {arrays[i].shape}. "
                f"`{_batch_name(count_name)}` says which arguments have the batch; it is {batch.argnums}."
            )
    if not of_batch:
        raise ValueError(
            f"`{_batch_name(count_name)}` {batch.argnums} must name arguments with arrays that have a leading "
            "dimension, the batch."
        )
    check_rows([paths[i] for i in of_batch], [arrays[i] for i in of_batch])

    name = getattr(fn, "__name__", "the function")
    argument_of = [argument.name for argument in given for _ in array_paths(argument.name, argument.value)]
    results: list[tuple[Structure, list[int | None]]] = []

    def from_arrays(*flat: Any) -> list[Any]:
        new_args, new_kwargs = structure.unflatten(flat)
        result = fn(*new_args, **new_kwargs)
        leaves, of_result = split(result)
        if lost := lost_changes(name, structure, argument_of, flat, (new_args, new_kwargs), leaves):
            warn_of_lost_changes(lost)
        feedback = feedback_of(result, [argument.value for argument in given], abstract_split)
        results.append((of_result, feedback))
        return leaves

    jaxpr = jax.make_jaxpr(from_arrays)(*map(abstract_array, arrays))
    result, feedback = results[-1]
    return TracedCall(name, without_dead_code(with_own_rows(jaxpr)), arrays, paths, of_batch, result, feedback)


def divided_call(
    call: TracedCall,
    count: int,
    count_name: str = "num_microbatches",
    num_groups: int = 1,
    *,
    estimates_sums: bool = False,
) -> MicrobatchedFunction:
    """Finds how a traced function runs in micro-batches, which are those of some groups one after the other.

    With `estimates_sums` gradients may read sums over the batch as each micro-batch estimates them.

    Raises:
      ValueError: an operation mixes the examples; names it.
    """
    graph = build_graph(call.program, [None] * len(call.program.jaxpr.outvars), call.paths)
    try:
        rules = rules_of(graph)
        flow = batch_flow(graph, rules, call.batch, count, num_groups=num_groups, estimates_sums=estimates_sums)
    except DivisionError as error:
        raise ValueError(_why_not_divided(call, count_name, error, estimates_sums=estimates_sums)) from None
    return MicrobatchedFunction(graph, flow, count, num_groups)


def _batch_name(count_name: str) -> str:
    """Returns how errors call the positions of the arguments that have the batch."""
    return count_name.replace("num_microbatches", "batch_argnums").replace("microbatches", "batch_argnums")


_MEANS = (
    "A product of means, as in a variance or the balancing loss of a mixture of experts, may be one of means over "
    "groups of examples: give the batch as `[groups, examples, ...]`, and each group counts as one example. Or let "
    'each micro-batch have a product of its own means, `Pipeline(batch_means="each_microbatch")`. '
)
_VARIANCE = (
    "Write a variance over the batch as the mean of squares less the square of the mean: with squared differences, "
    "each example needs the mean of all."
)


def _why_not_divided(call: TracedCall, count_name: str, error: DivisionError, *, estimates_sums: bool) -> str:
    """Returns why the batch of a function cannot be divided, and what to do."""
    if count_name == "num_microbatches":
        advice = f"Give 1, or compute each example without the others. {_VARIANCE}"
        return f"`num_microbatches` must be 1 for {call.name}: {error} {advice}"
    replaced = {argument for argument in call.feedback if argument is not None}
    if replaced.issuperset(call.batch):
        return (
            f"`{_batch_name(count_name)}` must name the arguments that have the batch, but {call.name} replaces all "
            f"arrays of those that it names, such as {call.paths[call.batch[0]]}, by results, as it does with a state. "
            f"Give the positions of the batch, from 0. What goes wrong: {error}"
        )
    return (
        f"{call.name} cannot be a pipeline, which computes micro-batches one after the other: {error} Search without "
        "`pipeline`, which shards such steps, or compute each example without the others, up to sums of losses and "
        "gradients: with layer normalisation, say, or a loss without comparisons between examples. "
        f"{'' if estimates_sums else _MEANS}{_VARIANCE}"
    )

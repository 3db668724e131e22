"""`in_microbatches`: a training step that computes its batch in parts, with the results of the whole."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from cost.real_numbers import whole_number
from diffshard.sharding_search.call import array_paths, split
from search_spaces.pipelines.batch_flow import batch_flow
from search_spaces.pipelines.batch_states import DivisionError
from search_spaces.pipelines.microbatches import MicrobatchedFunction
from search_spaces.sharding.rules import rules_of
from search_spaces.sharding.tracing import build_graph


def in_microbatches(
    fn: Callable[..., Any], num_microbatches: int, *, batch_argnums: int | Sequence[int] = 1
) -> Callable[..., Any]:
    """Makes a function that computes a batch in equal parts, one after the other, with the results of the whole batch.

    >>> step = diffshard.in_microbatches(train_step, 8)
    >>> state, loss = jax.jit(step)(state, batch)

    Activations then take an eighth of the memory. Gradients and other sums over the batch are added up, and what needs
    them, such as an optimiser's update, runs once. Random numbers are those of the whole batch, so that results differ
    from those of `fn` by the rounding of sums only. Nothing in `fn` changes: what belongs to the batch is found in its
    traced program.

    Args:
      fn: a function of arrays, usually a whole training step.
      num_microbatches: the number of parts; it divides the leading dimension of each array of the batch.
      batch_argnums: the positional arguments whose arrays have the batch as their leading dimension; scalars and random
        keys among them are the same for all parts.

    Returns:
      A function of the same positional arguments, for `jax.jit` or `diffshard.search`.

    Raises:
      ValueError: a number breaks its rule; or, when the result is called, the batch cannot be divided, or an operation
        mixes its examples before others need them one by one, such as batch normalisation; names the operation.
    """
    count = whole_number(num_microbatches)
    if count is None or count < 1:
        raise ValueError(f"`num_microbatches` must be a whole number, 1 or more, not {num_microbatches!r}.")
    argnums = tuple(batch_argnums) if isinstance(batch_argnums, Sequence) else (batch_argnums,)
    if not argnums or any((whole_number(n) is None or n < 0) for n in argnums):
        raise ValueError(f"`batch_argnums` must be positions of arguments, 0 or more, not {batch_argnums!r}.")

    @functools.wraps(fn)
    def call(*args: Any) -> Any:
        if max(argnums) >= len(args):
            raise ValueError(f"`batch_argnums` names argument {max(argnums)}, and the function was given {len(args)}.")
        arrays, structure = split(args)
        paths, batch = [], []
        for number, argument in enumerate(args):
            for path in array_paths(f"argument {number}", argument):
                if number in argnums and _has_batch(arrays[len(paths)]):
                    batch.append(len(paths))
                paths.append(path)
        for i in batch:
            if arrays[i].shape[0] % count:
                raise ValueError(
                    f"`num_microbatches` must divide the batch; got {count} and {paths[i]} of shape {arrays[i].shape}."
                )
        if not batch:
            raise ValueError(
                f"`batch_argnums` {argnums} must name arguments with arrays that have a leading dimension."
            )
        jaxpr, shapes = jax.make_jaxpr(lambda *flat: fn(*structure.unflatten(flat)), return_shape=True)(*arrays)
        graph = build_graph(jaxpr, [None] * len(jaxpr.jaxpr.outvars), paths)
        rules = rules_of(graph)
        try:
            flow = batch_flow(graph, rules, batch, count)
        except DivisionError as error:
            name = getattr(fn, "__name__", "the function")
            raise ValueError(f"`num_microbatches` must be 1 for {name}: {error}") from None
        results = MicrobatchedFunction(graph, flow, count)(*arrays)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return call


def _has_batch(array: Any) -> bool:
    is_key = jnp.issubdtype(getattr(array, "dtype", jnp.float32), jax.dtypes.prng_key)
    return not is_key and bool(getattr(array, "shape", ()))

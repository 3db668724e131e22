"""The arguments of a call that is divided into micro-batches, and which of their arrays have the batch."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cost.real_numbers import whole_number
from diffshard.sharding_search.call import array_paths
from diffshard.sharding_search.options import (
    argument_names,
    names_by_position,
    positional_names,
    positions,
    signature_of,
)


class BatchArguments(NamedTuple):
    """Which arguments of a function have the batch as the leading dimension of their arrays."""

    argnums: tuple[int, ...]
    argnames: tuple[str, ...]

    @classmethod
    def checked(cls, argnums: int | Sequence[int], argnames: str | Sequence[str]) -> "BatchArguments":
        """Returns them; raises `ValueError` if there are none, or a position is none."""
        found = cls(positions(argnums), argument_names(argnames))
        if any((whole_number(n) is None or n < 0) for n in found.argnums) or not (found.argnums or found.argnames):
            raise ValueError(f"`batch_argnums` must be positions of arguments, 0 or more, not {argnums!r}.")
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

"""Names for JAX's errors: what a search traces is a function of flat arrays, but a user knows another one.

JAX says which function it was tracing and on which of its arguments a value depends. It takes both from a function's
signature and from what it wraps.
"""

import inspect
import keyword
from collections.abc import Callable, Sequence
from typing import Any

from diffshard.sharding_search.options import Options


class _ArgumentPath(str):
    """The name of a flat argument, such as `state[0]/w`, that a signature takes for the name of a parameter."""

    __slots__ = ()

    def isidentifier(self) -> bool:
        """Returns True."""
        return True


def named_as_user(flat: Callable[..., list[Any]], options: Options, paths: Sequence[str]) -> Callable[..., list[Any]]:
    """Returns a function of flat arrays that JAX's errors call by the user's function and its arguments.

    Args:
      flat: the function of flat arrays.
      options: with the user's function.
      paths: a name for each flat array.
    """

    def named(*arrays: Any) -> list[Any]:
        return flat(*arrays)

    kind = inspect.Parameter.POSITIONAL_ONLY
    if len(set(paths)) == len(paths) and not any(map(keyword.iskeyword, paths)):
        parameters = [inspect.Parameter(_ArgumentPath(path), kind) for path in paths]
        named.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    if hasattr(inspect.unwrap(options.fn), "__code__"):  # of other objects JAX would write the value
        named.__wrapped__ = options.fn  # pyright: ignore[reportFunctionMemberAccess]
    named.__name__ = options.function_name
    return named


def renamed(fn: Callable[..., Any], like: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a function the names by which JAX calls another one, and returns it."""
    for name in ("__signature__", "__wrapped__", "__name__"):
        if hasattr(like, name):
            setattr(fn, name, getattr(like, name))
    return fn

"""Arguments that options name by position or by name, as `jax.jit` does: one rule for all front ends.

A name of an argument that has a position stands for this position, so that it makes no difference how a call gives it.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from cost.real_numbers import whole_number


class NamedArguments(NamedTuple):
    """Arguments of a function, each of them once, in order.

    Attributes:
      argnums: positions of those that have one.
      argnames: names of the others, which are taken by keyword only.
    """

    argnums: tuple[int, ...]
    argnames: tuple[str, ...]


def checked_arguments(
    fn: Callable[..., Any], given: Mapping[str, tuple[Sequence[Any], Sequence[Any]]]
) -> dict[str, NamedArguments]:
    """Returns the arguments that are given by positions and names, by a kind such as "donate".

    Raises:
      ValueError: a position or a name is none of an argument, or an argument is of two kinds.
    """
    signature, function = signature_of(fn), function_name(fn)
    found = {
        kind: _named(checked_positions(f"{kind}_argnums", numbers), names, kind, signature, function)
        for kind, (numbers, names) in given.items()
    }
    by_position = positional_names(signature)
    kind_of: dict[int | str, str] = {}
    for kind, named in found.items():
        for place in (*named.argnums, *named.argnames):
            if (other := kind_of.setdefault(place, kind)) != kind:
                name = by_position[place] if isinstance(place, int) and place < len(by_position) else place
                raise ValueError(
                    f"{_shown(other, *given[other])} and {_shown(kind, *given[kind])} share the argument {name!r} of "
                    f"{function}. Name it in one of them."
                )
    return found


def _shown(kind: str, numbers: Sequence[Any], names: Sequence[Any]) -> str:
    """Returns the options of a kind with their values, as `donate_argnums` (0,)."""
    by_form = {f"`{kind}_argnums`": tuple(numbers), f"`{kind}_argnames`": tuple(names)}
    return " with ".join(f"{option} {values}" for option, values in by_form.items() if values)


def _named(
    numbers: Sequence[int], names: Sequence[Any], kind: str, signature: inspect.Signature | None, function: str
) -> NamedArguments:
    by_position = positional_names(signature)
    takes_any = signature is None or _has(signature, inspect.Parameter.VAR_POSITIONAL)
    if not takes_any and any(number >= len(by_position) for number in numbers):
        raise ValueError(
            f"`{kind}_argnums` {tuple(numbers)} names a position that the {len(by_position)} arguments of {function} "
            f"with a position do not have; `{kind}_argnames` takes names, also of the others."
        )
    for name in names:
        check_is_argument(f"{kind}_argnames", name, signature, function)
    numbers = [*numbers, *(by_position.index(name) for name in names if name in by_position)]
    keywords = [name for name in names if name not in by_position]
    return NamedArguments(tuple(sorted({*numbers})), tuple(sorted({*keywords})))


def _has(signature: inspect.Signature, kind: Any) -> bool:
    return any(parameter.kind is kind for parameter in signature.parameters.values())


def function_name(fn: Callable[..., Any]) -> str:
    """Returns what a function is called in plans and messages."""
    return getattr(fn, "__qualname__", None) or getattr(fn, "__name__", None) or type(fn).__name__


def signature_of(fn: Callable[..., Any]) -> inspect.Signature | None:
    """Returns a function's signature; None for built-in functions, which have none."""
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError):
        return None


def positional_names(signature: inspect.Signature | None) -> list[str]:
    """Returns the names of the parameters that have a position, in order."""
    parameters = () if signature is None else signature.parameters.values()
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def names_by_position(signature: inspect.Signature | None, count: int) -> list[str]:
    """Returns the names of the first arguments of a function: those of `*batch` are `batch[0]`, `batch[1]`."""
    names = positional_names(signature)[:count]
    parameters = () if signature is None else signature.parameters.values()
    for rest in (p.name for p in parameters if p.kind is p.VAR_POSITIONAL):
        return [*names, *(f"{rest}[{i}]" for i in range(count - len(names)))]
    return [*names, *(f"argument_{i}" for i in range(len(names), count))]


def positions(argnums: Any) -> tuple[Any, ...]:
    """Returns positions of arguments as a tuple; a single one may be given as a number, and None is none."""
    if isinstance(argnums, Iterable) and not isinstance(argnums, str):
        return tuple(argnums)
    return () if argnums is None else (argnums,)


def argument_names(argnames: str | Sequence[str] | None) -> tuple[str, ...]:
    """Returns names of arguments as a tuple; a single one may be given as text, and None is none."""
    if isinstance(argnames, str):
        return (argnames,)
    return tuple(argnames) if isinstance(argnames, Iterable) else () if argnames is None else (argnames,)


def check_is_argument(option: str, name: Any, signature: inspect.Signature | None, function: str) -> None:
    """Raises `ValueError` unless a function may have an argument of a name that an option gives."""
    parameters = {} if signature is None else signature.parameters
    takes_any = signature is None or _has(signature, inspect.Parameter.VAR_KEYWORD)
    if isinstance(name, str) and name in parameters and parameters[name].kind is inspect.Parameter.VAR_POSITIONAL:
        raise ValueError(
            f"`{option}` has {name!r}, which is all further arguments of {function} together. Give their positions "
            f"by `{option[:-5]}nums`."
        )
    if not isinstance(name, str) or (name not in parameters and not takes_any):
        raise ValueError(
            f"`{option}` has {name!r}, which is no argument of {function}; it has {', '.join(parameters)}."
        )


def checked_positions(name: str, numbers: Sequence[Any]) -> tuple[int, ...]:
    """Returns positions of arguments as integers."""
    checked = [whole_number(number) for number in numbers]
    if any(number is None or number < 0 for number in checked):
        raise ValueError(
            f"`{name}` must be positions of arguments, 0 or more, not {tuple(numbers)!r}; "
            f"`{name[:-4]}names` takes names."
        )
    return tuple(number for number in checked if number is not None)

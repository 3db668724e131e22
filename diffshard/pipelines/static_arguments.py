"""Static arguments of a pipelined step: for each set of their values there is a step that does not take them."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from diffshard.pipelines.options import PipelineOptions
from diffshard.sharding_search.options import positional_names, signature_of


class StaticCall(NamedTuple):
    """A call whose static arguments are taken out.

    Attributes:
      values: the static arguments, by the position or the name by which they are given.
    """

    values: dict[int | str, Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def key(self) -> tuple[Any, ...]:
        """What two calls have in common that run the same step: 1 and 1.0 are equal, but different constants."""
        return tuple((place, _exact(value)) for place, value in sorted(self.values.items(), key=str))


def _exact(value: Any) -> Any:
    """Returns a key that is equal for values of one type, sign and contents only; tuples are looked into."""
    if isinstance(value, tuple):
        return type(value), tuple(map(_exact, value))
    return type(value), value, repr(value) if isinstance(value, float | complex) else ""


def static_call(options: PipelineOptions, args: Sequence[Any], kwargs: Mapping[str, Any]) -> StaticCall:
    """Takes the static arguments out of a call."""
    by_position = {n: args[n] for n in options.static_argnums if n < len(args)}
    by_name = {name: kwargs[name] for name in options.static_argnames if name in kwargs}
    for place, value in {**by_position, **by_name}.items():
        try:
            hash(value)
        except TypeError:
            raise TypeError(
                f"The static argument {place!r} is {type(value).__name__}, which is not hashable. Give a value that "
                "is, such as a tuple or a frozen dataclass."
            ) from None
    return StaticCall(
        {**by_position, **by_name},
        tuple(x for n, x in enumerate(args) if n not in by_position),
        {name: x for name, x in kwargs.items() if name not in by_name},
    )


def without_static(options: PipelineOptions, values: Mapping[int | str, Any]) -> PipelineOptions:
    """Returns the options of the step that does not take static arguments, which have these values."""
    names = positional_names(signature_of(options.fn))
    taken = {names.index(place) if place in names else place for place in values}

    def moved(positions: Sequence[int]) -> tuple[int, ...]:
        return tuple(n - sum(isinstance(s, int) and s < n for s in taken) for n in positions)

    batch = options.pipeline.batch
    return replace(
        options,
        fn=_bound(options.fn, values),
        pipeline=replace(options.pipeline, batch_argnums=moved(batch.argnums)),
        donate_argnums=moved(options.donate_argnums),
        static_argnums=(),
        static_argnames=(),
    )


def check_static(options: PipelineOptions) -> None:
    """Checks that static arguments are not donated, have no batch, and are none where a loss is measured."""
    names, batch = positional_names(signature_of(options.fn)), options.pipeline.batch
    others = {
        "donate_argnums": (*options.donate_argnums, *options.donate_argnames),
        "Pipeline.batch_argnums": (*batch.argnums, *batch.argnames),
    }
    static = {_name(names, place) for place in (*options.static_argnums, *options.static_argnames)}
    for option, places in others.items():
        for name in static & {_name(names, place) for place in places}:
            raise ValueError(f"`static_argnums` and `{option}` share the argument {name!r}.")
    if static and options.pipeline.loss_limit is not None:
        raise ValueError(
            "`Pipeline.loss_limit` cannot be given together with static arguments, such as the graphs of nnx modules, "
            f"which its runs do not have; got {sorted(map(str, static))}. Bind them by `functools.partial`, or split "
            "modules into graph and state."
        )


def _name(names: Sequence[str], place: int | str) -> int | str:
    return names[place] if isinstance(place, int) and place < len(names) else place


def _bound(fn: Callable[..., Any], values: Mapping[int | str, Any]) -> Callable[..., Any]:
    """Returns a function without some of its arguments, which have these values."""
    by_position = sorted((n, value) for n, value in values.items() if isinstance(n, int))
    by_name = {name: value for name, value in values.items() if isinstance(name, str)}

    @functools.wraps(fn)
    def bound(*args: Any, **kwargs: Any) -> Any:
        whole = list(args)
        for n, value in by_position:
            whole.insert(n, value)
        return fn(*whole, **kwargs, **by_name)

    signature = signature_of(fn)
    if signature is not None:
        names = positional_names(signature)
        taken = {*by_name, *(names[n] for n, _ in by_position if n < len(names))}
        left = [p for name, p in signature.parameters.items() if name not in taken]
        if all(p.kind is not inspect.Parameter.VAR_POSITIONAL for p in left):
            vars(bound)["__signature__"] = signature.replace(parameters=left)
    return bound

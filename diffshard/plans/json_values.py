"""Records as JSON values and back: each field is written as it is, and read by what its annotation says.

`from_json_values(Hardware, values)` needs nothing but the class. An annotation with a range, such as `Amount`, takes
numbers of this range only, and a `Literal` its names. So what a record may hold is said once, where its fields are.
"""

import dataclasses
import functools
import inspect
import math
import reprlib
import types
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NewType, Union, get_args, get_origin, get_type_hints

import numpy as np

JsonValues = NewType("JsonValues", object)
"""JSON values of the user's, which are read as they are."""
_NOT_FINITE = ("inf", "-inf", "nan")
_NUMBERS = {float: (int, float), int: (int,), bool: (bool,), str: (str,)}
_SHORT = reprlib.Repr()  # of a value in an error, which may be a whole table
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60


class MisfitError(TypeError):
    """JSON values are not what an annotation says; the text names the place and the value.

    Attributes:
      place: of the value in what was read, from the outermost part to the innermost: names of fields, `[number]`s.
    """

    def __init__(self, rule: str, *place: str):
        self.rule, self.place = rule, place
        name = "".join(part if part.startswith("[") else f".{part}" for part in place).removeprefix(".")
        super().__init__(f"`{name}` {rule}" if name else f"it {rule}")

    def inside(self, part: str) -> "MisfitError":
        """Returns the error about the same value, seen from the record or list that has it at a place."""
        return MisfitError(self.rule, part, *self.place)


def to_json_values(value: Any, writers: Mapping[type, Callable[[Any], Any]] | None = None) -> Any:
    """Returns records as JSON values. JSON has no numbers for infinity and NaN, so they are written as words.

    Args:
      value: records, numbers, texts, and lists and mappings of them.
      writers: functions that return other values as JSON values or records, by class.
    """
    for kind in type(value).__mro__ if writers else ():
        if writers and kind in writers:
            return to_json_values(writers[kind](value))
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if dataclasses.is_dataclass(value):
        return {item.name: to_json_values(getattr(value, item.name), writers) for item in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        fields: Any = value
        return {name: to_json_values(getattr(value, name), writers) for name in fields._fields}
    if isinstance(value, Mapping):
        return {str(k): to_json_values(v, writers) for k, v in value.items()}
    return [to_json_values(v, writers) for v in value] if isinstance(value, list | tuple) else value


def from_json_values(hint: Any, value: Any, converters: Mapping[Any, Any] | None = None) -> Any:
    """Returns JSON values as the type that an annotation states; for `Any`, lists become tuples.

    Words stand for infinity and NaN only where a number is expected: an argument may well be called `nan`.

    Args:
      hint: a type, an alias such as `tuple[int, ...]`, a union, a `Literal`, a dataclass or a named tuple; numbers may
        have a range of `cost.real_numbers`.
      converters: functions that restore values, by the annotation for which they are used.

    Raises:
      MisfitError: the values are of other types or out of range, or a record has unknown fields or lacks some.
      ValueError: a record refuses its fields.
    """
    converters = converters or {}
    if hint in converters:
        return converters[hint](value)
    if hint in _NUMBERS:
        return _number(hint, value)
    if (origin := get_origin(hint)) in _READERS:
        return _READERS[origin](hint, value, converters)
    if hint is Any:
        return _of_any_type(value)
    if hint is JsonValues:
        return value
    if dataclasses.is_dataclass(hint) or hasattr(hint, "_fields"):
        return _record(hint, value, converters)
    if hint is type(None) and value is None:
        return None
    raise _other_type(hint, value)


def _number(hint: Any, value: Any) -> Any:
    """Reads a number, a truth value or a text."""
    if isinstance(value, _NUMBERS[hint]) and (hint is bool or not isinstance(value, bool)):
        try:
            return float(value) if hint is float else value
        except OverflowError:
            raise MisfitError(f"is {str(value)[:20]}..., too large a number") from None
    if hint is float and value in _NOT_FINITE:
        return float(value)
    raise _other_type(hint, value)


def _of_any_type(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_of_any_type, value))
    return float(value) if value in _NOT_FINITE else value


def _in_range(hint: Any, value: Any, converters: Mapping[Any, Any]) -> Any:
    number = from_json_values(hint.__origin__, value, converters)
    for allowed in hint.__metadata__:
        if not allowed.holds(number):
            raise MisfitError(f"must be {allowed.words}, not {_SHORT.repr(number)}")
    return number


def _named(hint: Any, value: Any, converters: Mapping[Any, Any]) -> Any:
    del converters
    if value not in get_args(hint):
        raise MisfitError(f"is {_SHORT.repr(value)}, not one of {get_args(hint)}")
    return value


def _collection(hint: Any, value: Any, converters: Mapping[Any, Any]) -> Any:
    inner = get_args(hint)
    if get_origin(hint) is Mapping and isinstance(value, dict):
        read: dict[str, Any] = {}
        for key, item in value.items():
            try:
                read[key] = from_json_values(inner[1], item, converters)
            except MisfitError as error:
                raise error.inside(f"[{key!r}]") from None
        return read
    hints = [inner[0]] * len(value) if inner[-1:] == (Ellipsis,) and isinstance(value, list) else inner
    if not isinstance(value, list) or get_origin(hint) is not tuple or len(hints) != len(value):
        raise _other_type(hint, value)
    items = []
    try:
        for each, item in zip(hints, value, strict=True):
            items.append(from_json_values(each, item, converters))
    except MisfitError as error:
        raise error.inside(f"[{len(items)}]") from None
    return tuple(items)


def _one_of(hint: Any, value: Any, converters: Mapping[Any, Any]) -> Any:
    hints = get_args(hint)
    if value is None and type(None) in hints:
        return None
    hints = tuple(each for each in hints if each is not type(None))
    for each in hints[:-1]:
        try:
            return from_json_values(each, value, converters)
        except TypeError:
            continue
    return from_json_values(hints[-1], value, converters)


_READERS = {
    Annotated: _in_range,
    Literal: _named,
    tuple: _collection,
    Mapping: _collection,
    Union: _one_of,
    types.UnionType: _one_of,
}


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


@functools.cache
def _needed(kind: Any) -> tuple[str, ...]:
    """Returns the fields of a record that have no default."""
    return tuple(p.name for p in inspect.signature(kind).parameters.values() if p.default is p.empty)


def _record(kind: Any, value: Any, converters: Mapping[Any, Any]) -> Any:
    """Reads a dataclass or named tuple; a field that is not there has its default."""
    if not isinstance(value, dict):
        raise MisfitError(f"is {_SHORT.repr(value)}, not the fields of {kind.__name__}")
    hints, fields, name = _hints(kind), {}, ""
    try:
        for name, item in value.items():
            if name not in hints:
                raise MisfitError(f"is no field of {kind.__name__}")
            fields[name] = from_json_values(hints[name], item, converters)
    except MisfitError as error:
        raise error.inside(name) from None
    if missing := [f"`{name}`" for name in _needed(kind) if name not in fields]:
        raise MisfitError(f"lacks {', '.join(missing)} of {kind.__name__}")
    return kind(**fields)


def _other_type(hint: Any, value: Any) -> MisfitError:
    return MisfitError(f"is {_SHORT.repr(value)}, not of type {getattr(hint, '__name__', hint)}")

"""JSON documents, the form in which plans of all kinds are saved.

A document begins with its kind and version. Records are written field by field, and read back by the annotations of
their fields: `from_json_values(Hardware, values)` needs nothing but the class.
"""

import dataclasses
import functools
import inspect
import json
import math
import os
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from cost.base import Link
from diffshard.base import PlanError
from diffshard.files import write_whole

SHARDING, BILEVEL, PIPELINE = "diffshard plan", "diffshard bilevel plan", "diffshard pipeline plan"
TABLES = "diffshard plan of embedding tables"
EXPERT_GROUPS, EXPERT_ASSIGNMENT = "diffshard plan of expert groups", "diffshard assignment of experts"
_LOADED_BY = {
    SHARDING: "`diffshard.Plan.load`",
    BILEVEL: "`diffshard.BilevelPlan.load`",
    PIPELINE: "`diffshard.PipelinePlan.load`",
    TABLES: "`diffshard.TablePlan.load`",
    EXPERT_GROUPS: "`diffshard.GroupPlan.load`",
    EXPERT_ASSIGNMENT: "`diffshard.ExpertAssignment.load`",
}
_NOT_FINITE = ("inf", "-inf", "nan")
_T = TypeVar("_T")
_NUMBERS = {float: (int, float), int: (int,), bool: (bool,), str: (str,)}


def write(path: str | os.PathLike[str], document: Mapping[str, Any]) -> None:
    """Writes JSON values to a file, which is replaced whole or not at all."""
    write_whole(path, json.dumps(document, indent=None, separators=(",", ":"), allow_nan=False))


def read(path: str | os.PathLike[str]) -> Any:
    """Reads the JSON values of a file.

    Raises:
      PlanError: the file is not JSON.
      OSError: the file cannot be read.
    """
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (ValueError, RecursionError) as error:  # also a number of more digits than Python reads
        raise PlanError(f"`{os.fspath(path)}` is not a plan file: it is not JSON ({error}).") from None


def kind_of(document: Any) -> Any:
    """Returns what kind of plan a document says that it is; None if it does not say."""
    return document.get("format") if isinstance(document, dict) else None


def content(document: Any, name: str, kind: str, version: int, older: Sequence[int] = ()) -> dict[str, Any]:
    """Returns what a document holds beside its kind and version.

    Args:
      document: JSON values.
      name: where they come from, for errors.
      kind: the kind of plan that they must be.
      version: the newest version that can be read, which is also the one that is written.
      older: older versions that can still be read.

    Raises:
      PlanError: they are of another kind or version.
    """
    own_kind = kind_of(document)
    if isinstance(own_kind, str) and own_kind != kind and own_kind in _LOADED_BY:
        raise PlanError(f"`{name}` is a {own_kind}, not a {kind}: load it with {_LOADED_BY[own_kind]}.")
    if own_kind != kind:
        raise PlanError(f"`{name}` is not a plan file of diffshard: its `format` is not {kind!r}.")
    if type(document.get("version")) is not int or document["version"] not in (*older, version):
        readable = " and ".join(map(str, (*older, version)))
        raise PlanError(
            f"`{name}` has the plan version {document.get('version')!r}; this diffshard reads version {readable}. "
            "Update diffshard, or make the plan again."
        )
    return {key: value for key, value in document.items() if key not in ("format", "version")}


def write_record(
    path: str | os.PathLike[str], kind: str, version: int, record: Any, *, without: Sequence[str] = ()
) -> None:
    """Writes the fields of a dataclass as a document, except those named in `without`.

    The file is replaced whole or not at all.
    """
    fields = {f.name: getattr(record, f.name) for f in dataclasses.fields(record) if f.name not in without}
    write(path, {"format": kind, "version": version, **to_json_values(fields)})


def read_record(
    path: str | os.PathLike[str], kind: str, version: int, record: type[_T], check: Callable[[_T], None]
) -> _T:
    """Reads a dataclass that `write_record` wrote; fields that are not in the file have their defaults.

    Args:
      path: the file.
      kind: as in `content`.
      version: as in `content`.
      record: the dataclass.
      check: raises `ValueError` where fields do not fit each other; says what is wrong.

    Raises:
      PlanError: the file is of another kind or version, or is damaged.
      OSError: the file cannot be read.
    """
    values = content(read(path), os.fspath(path), kind, version)
    try:
        plan = from_json_values(record, values)
        check(plan)
    except (TypeError, ValueError) as error:
        raise PlanError(f"`{os.fspath(path)}` is damaged: {error}.") from None
    return plan


def to_json_values(value: Any) -> Any:
    """Returns records as JSON values. JSON has no numbers for infinity and NaN, so they are written as words."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if dataclasses.is_dataclass(value):
        return {item.name: to_json_values(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {name: to_json_values(getattr(value, name)) for name in value._fields}  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(value, Mapping):
        return {str(k): to_json_values(v) for k, v in value.items()}
    return [to_json_values(v) for v in value] if isinstance(value, list | tuple) else value


def from_json_values(hint: Any, value: Any, converters: Mapping[Any, Any] | None = None) -> Any:
    """Returns JSON values as the type that an annotation states; for `Any`, lists become tuples.

    Words stand for infinity and NaN only where a number is expected: an argument may well be called `nan`.

    Args:
      hint: a type, an alias such as `tuple[int, ...]`, a union, a dataclass or a named tuple.
      value: JSON values.
      converters: functions that restore values, by the annotation for which they are used.

    Raises:
      TypeError: the values are of other types, or a record has unknown fields or lacks some.
    """
    converters = converters or {}
    if hint in converters:
        return converters[hint](value)
    origin = get_origin(hint)
    if origin in (types.UnionType, Union):
        return _one_of(get_args(hint), value, converters)
    if hint is Any:
        if isinstance(value, list):
            return tuple(from_json_values(Any, item) for item in value)
        return float(value) if value in _NOT_FINITE else value
    if origin in (tuple, Mapping):
        return _collection(hint, value, converters)
    if dataclasses.is_dataclass(hint) or hasattr(hint, "_fields"):
        return _record(hint, value, converters)
    if hint is float and value in _NOT_FINITE:
        return float(value)
    if hint in _NUMBERS and isinstance(value, _NUMBERS[hint]) and (hint is bool or not isinstance(value, bool)):
        try:
            return float(value) if hint is float else value
        except OverflowError:
            raise TypeError(f"{str(value)[:20]}... is too large a number") from None
    if hint is type(None) and value is None:
        return None
    raise TypeError(f"{value!r} is not of type {getattr(hint, '__name__', hint)}")


def _collection(hint: Any, value: Any, converters: Mapping[Any, Any]) -> Any:
    inner = get_args(hint)
    if get_origin(hint) is Mapping and isinstance(value, dict):
        return {key: from_json_values(inner[1], item, converters) for key, item in value.items()}
    hints = [inner[0]] * len(value) if inner[-1] is Ellipsis and isinstance(value, list) else inner
    if not isinstance(value, list) or get_origin(hint) is not tuple or len(hints) != len(value):
        raise TypeError(f"{value!r} is not of type {hint}")
    return tuple(from_json_values(h, item, converters) for h, item in zip(hints, value, strict=True))


def _one_of(hints: tuple[Any, ...], value: Any, converters: Mapping[Any, Any]) -> Any:
    if value is None and type(None) in hints:
        return None
    hints = tuple(hint for hint in hints if hint is not type(None))
    for hint in hints[:-1]:
        try:
            return from_json_values(hint, value, converters)
        except TypeError:
            continue
    return from_json_values(hints[-1], value, converters)


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


@functools.cache
def _needed(kind: Any) -> tuple[str, ...]:
    """Returns the fields of a record that have no default."""
    return tuple(p.name for p in inspect.signature(kind).parameters.values() if p.default is p.empty)


def _record(kind: Any, value: Any, converters: Mapping[Any, Any]) -> Any:
    """Reads a dataclass or named tuple; a field that is not there has its default."""
    if not isinstance(value, dict):
        raise TypeError(f"{value!r} is not the fields of {kind.__name__}")
    hints, fields = _hints(kind), {}
    for name, item in value.items():
        if name not in hints:
            raise TypeError(f"{kind.__name__} has no field {name!r}")
        try:
            fields[name] = from_json_values(hints[name], item, converters)
        except TypeError as error:
            raise TypeError(f"`{name}`: {error}") from None
    if missing := [f"`{name}`" for name in _needed(kind) if name not in fields]:
        raise TypeError(f"{kind.__name__} lacks {', '.join(missing)}")
    return kind(**fields)


def link_from_json(values: Any) -> Link:
    """Returns a link from JSON values, also from those that were saved before links had lines by kind.

    Raises:
      TypeError: as `from_json_values`.
    """
    values = dict(values) if isinstance(values, dict) else values
    by_kind = {}
    for kind in ("all_to_all", "reduce_scatter"):
        s_per_byte = values.pop(f"{kind}_s_per_byte", None) if isinstance(values, dict) else None
        if s_per_byte is not None:
            by_kind[kind] = [{"latency_s": values.get("latency_s"), "s_per_byte": s_per_byte}]
    return from_json_values(Link, {**values, "by_kind": by_kind} if by_kind else values)

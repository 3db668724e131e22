"""Plans as versioned JSON. Files are replaced whole or not at all."""

import dataclasses
import json
import math
import os
from os import PathLike
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from cost.hardware import Hardware, Link
from diffshard.files import write_whole
from diffshard.plan import Operation, Plan, PlanError, PredictedCollective, Tensor

FORMAT = "diffshard plan"
VERSION = 1
_RECORDS = {"arguments": Tensor, "outputs": Tensor, "operations": Operation, "collectives": PredictedCollective}
_SPEC_FIELDS = {"spec", "next_best_spec"}
_SPECS_FIELDS = {"operands", "kept", "results", "held"}
_NUMBER_FIELDS = {
    item.name
    for kind in (Plan, Hardware, Link, *_RECORDS.values())
    for item in dataclasses.fields(kind)
    if "float" in str(item.type)
}


def save(plan: Plan, path: str | PathLike[str]) -> None:
    """Writes a plan; see `Plan.save`."""
    write_whole(path, json.dumps(to_json(plan), indent=None, separators=(",", ":"), allow_nan=False))


def load(path: str | PathLike[str], mesh: Mesh | AbstractMesh | None = None) -> Plan:
    """Reads a plan; see `Plan.load`."""
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise PlanError(f"`{os.fspath(path)}` is no plan: it is not JSON ({error}).") from None
    return from_json(found, os.fspath(path), mesh)


def to_json(plan: Plan) -> dict[str, Any]:
    """A plan as JSON values; specs are written once and referred to by number."""
    specs: dict[Any, int] = {}

    def number(spec: Any) -> Any:
        return None if spec is None else specs.setdefault(spec, len(specs))

    def record(item: Any) -> dict[str, Any]:
        fields = {f.name: getattr(item, f.name) for f in dataclasses.fields(item)}
        for name in fields.keys() & _SPEC_FIELDS:
            fields[name] = number(fields[name])
        for name in fields.keys() & _SPECS_FIELDS:
            fields[name] = [number(spec) for spec in fields[name]]
        return fields

    found: dict[str, Any] = {"format": FORMAT, "version": VERSION}
    for item in dataclasses.fields(plan):
        value = getattr(plan, item.name)
        if item.name == "mesh":
            continue
        if item.name in _RECORDS:
            value = [record(x) for x in value]
        elif item.name == "hardware":
            value = dataclasses.asdict(value)
        found[item.name] = value
    found["specs"] = list(specs)
    return _finite(found)


def from_json(found: Any, name: str, mesh: Mesh | AbstractMesh | None = None) -> Plan:
    """A plan from JSON values; `name` is where they come from, for errors.

    Raises:
      PlanError: they are not a plan, are damaged, or are newer than this version; or the mesh has other axes.
    """
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise PlanError(f"`{name}` is no plan of diffshard: its `format` is not {FORMAT!r}.")
    if found.get("version") != VERSION:
        raise PlanError(
            f"`{name}` has the plan version {found.get('version')!r}; this diffshard reads version {VERSION}. "
            "Update diffshard, or make the plan again."
        )
    try:
        plan = _plan(_restored(found), mesh)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise PlanError(f"`{name}` is a damaged plan: {type(error).__name__}: {error}.") from None
    if mesh is not None and dict(mesh.shape) != dict(plan.mesh_axes):
        raise PlanError(f"`mesh` has the axes {dict(mesh.shape)}; the plan in `{name}` is for {dict(plan.mesh_axes)}.")
    return plan


def _plan(found: dict[str, Any], mesh: Mesh | AbstractMesh | None) -> Plan:
    specs = [tuple(tuple(axes) for axes in spec) for spec in found["specs"]]

    def record(kind: type, item: dict[str, Any]) -> Any:
        fields = dict(item)
        for name in fields.keys() & _SPEC_FIELDS:
            fields[name] = None if fields[name] is None else specs[fields[name]]
        for name in fields.keys() & _SPECS_FIELDS:
            fields[name] = tuple(specs[i] for i in fields[name])
        if "shape" in fields:
            fields["shape"] = tuple(fields["shape"])
        _check_types(kind, fields)
        return kind(**fields)

    values: dict[str, Any] = {}
    for item in dataclasses.fields(Plan):
        if item.name == "mesh":
            continue
        value = found[item.name]
        if item.name in _RECORDS:
            value = tuple(record(_RECORDS[item.name], x) for x in value)
        elif item.name == "hardware":
            value = Hardware(**{**value, "links": {axis: Link(**link) for axis, link in value["links"].items()}})
        elif item.name == "history":
            value = tuple(tuple(point) for point in value)
        elif isinstance(value, list):
            value = tuple(value)
        values[item.name] = value
    _check_types(Plan, values)
    _check_collections(values)
    axes = values["mesh_axes"]
    if mesh is None:
        mesh = AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    return Plan(**values, mesh=mesh)


def _check_collections(values: dict[str, Any]) -> None:
    axes = values["mesh_axes"]
    if not isinstance(axes, dict) or not all(type(n) is int and n > 0 for n in axes.values()):
        raise TypeError(f"`mesh_axes` is {axes!r}, not axes with their numbers of devices")
    if any(type(n) is not int for n in (*values["static_argnums"], *values["donate_argnums"])):
        raise TypeError("`static_argnums` and `donate_argnums` are positions")


def _check_types(kind: type, values: dict[str, Any]) -> None:
    """Numbers are numbers and names are names, as the record's fields say."""
    expected = {float: (int, float), int: (int,), str: (str,), bool: (bool,)}
    for item in dataclasses.fields(kind):
        types = expected.get(item.type)  # pyright: ignore[reportArgumentType, reportCallIssue]
        value = values.get(item.name)
        if (
            types
            and item.name in values
            and (not isinstance(value, types) or (isinstance(value, bool) and bool not in types))
        ):
            raise TypeError(f"`{item.name}` is {value!r}, not of type {types[0].__name__}")


def _finite(value: Any) -> Any:
    """JSON has no infinity: it is written as a word."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value.item() if isinstance(value, np.generic) else value


def _restored(value: Any, is_number: bool = False) -> Any:
    """Words are numbers again in the fields of numbers only: an argument may well be called `nan`."""
    if is_number and isinstance(value, str) and value in ("inf", "-inf", "nan"):
        return float(value)
    if isinstance(value, dict):
        return {k: _restored(v, is_number or k in _NUMBER_FIELDS) for k, v in value.items()}
    return [_restored(v, is_number) for v in value] if isinstance(value, list) else value

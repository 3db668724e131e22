"""Plans as versioned JSON files, which are replaced whole or not at all.

Specs are many and few of them differ, so each is written once, and records refer to it by number.
"""

import dataclasses
import gc
import os
from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any, TypeVar, get_args

from jax.sharding import AbstractMesh, AxisType, Mesh

from cost.base import Link
from diffshard.base import PlanError
from diffshard.plans.base import Executor, Operation, PlanData, PredictedCollective, Tensor
from diffshard.plans.consistency import check_plan
from diffshard.plans.documents import SHARDING, content, from_json_values, link_from_json, read, to_json_values, write
from search_spaces.partition_specs import NamedSpec

VERSION = 2
_OLDER_VERSIONS = (1,)
_RENAMED_SINCE_1 = {"kept": "unreduced", "held": "value_specs"}  # fields of operations
_RECORDS = {"arguments": Tensor, "outputs": Tensor, "operations": Operation, "collectives": PredictedCollective}
_NOT_SAVED = ("stored_in", "mesh", "structures")
_PLACE = ("source", "scope")  # of an operation in the user's program
_SPEC_FIELDS = {"spec", "next_best_spec"}
_SPECS_FIELDS = {"operands", "unreduced", "results", "value_specs"}

PlanT = TypeVar("PlanT", bound=PlanData)


def save(plan: PlanData, path: str | PathLike[str]) -> None:
    """Writes a plan as JSON; the file is replaced whole or not at all."""
    write(path, to_json(plan))


def load(path: str | PathLike[str], kind: type[PlanT], mesh: Mesh | AbstractMesh | None = None) -> PlanT:
    """Reads a plan of a kind, `PlanData` or a class with its fields; `mesh` as in `Plan.load`.

    Raises:
      PlanError: as `from_json`.
      OSError: the file cannot be read.
    """
    return from_json(read(path), os.fspath(path), kind, mesh)


def to_json(plan: PlanData) -> dict[str, Any]:
    """Returns a plan as JSON values; specs are written once and referred to by number."""
    specs: dict[Any, int] = {}

    def number(spec: Any) -> Any:
        return None if spec is None else specs.setdefault(spec, len(specs))

    def record(item: Any) -> dict[str, Any]:
        fields = {f.name: getattr(item, f.name) for f in dataclasses.fields(item)}
        for name, value in fields.items():  # in order, so that equal plans number their specs alike
            if name in _SPEC_FIELDS:
                fields[name] = number(value)
            elif name in _SPECS_FIELDS:
                fields[name] = [number(spec) for spec in value]
        return fields

    document: dict[str, Any] = {"format": SHARDING, "version": VERSION}
    for item in dataclasses.fields(plan):
        if item.name not in _NOT_SAVED:
            value = getattr(plan, item.name)
            document[item.name] = [record(x) for x in value] if item.name in _RECORDS else value
    document["specs"] = list(specs)
    return to_json_values(document)


def from_json(document: Any, name: str, kind: type[PlanT], mesh: Mesh | AbstractMesh | None = None) -> PlanT:
    """Returns a plan of a kind from JSON values; `name` is where they come from, for errors.

    Raises:
      PlanError: they are not a plan, are damaged, or are newer than this version; or the mesh has other axes.
    """
    values = content(document, name, SHARDING, VERSION, _OLDER_VERSIONS)
    was_collecting = gc.isenabled()
    gc.disable()  # a large plan is many small objects without circles: looking for some takes as long as reading
    try:
        if document["version"] == 1:
            values["operations"] = [_with_new_names(operation) for operation in values["operations"]]
        plan = _plan_from_values(values, kind, mesh)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError) as error:
        raise PlanError(f"`{name}` is a damaged plan: {type(error).__name__}: {error}.") from None
    finally:
        if was_collecting:
            gc.enable()
    if mesh is not None and dict(mesh.shape) != dict(plan.mesh_axes):
        raise PlanError(f"`mesh` has the axes {dict(mesh.shape)}; the plan in `{name}` is for {dict(plan.mesh_axes)}.")
    return plan


def _with_new_names(operation: Mapping[str, Any]) -> dict[str, Any]:
    return {_RENAMED_SINCE_1.get(field, field): value for field, value in operation.items()}


def _plan_from_values(values: dict[str, Any], kind: type[PlanT], mesh: Mesh | AbstractMesh | None) -> PlanT:
    specs = [tuple(tuple(axes) for axes in spec) for spec in values.pop("specs")]
    converters = {
        NamedSpec: specs.__getitem__,
        NamedSpec | None: lambda i: None if i is None else specs[i],
        Executor: _executor,
        Link: link_from_json,
    }
    plan: PlanT = from_json_values(kind, values, {**converters, Operation: _operation_reader(converters)})
    check_plan(plan)
    axes = plan.mesh_axes
    if mesh is None:
        mesh = AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    return dataclasses.replace(plan, mesh=mesh)


def _operation_reader(converters: Mapping[Any, Any]) -> Callable[[Any], Operation]:
    """Returns a function that reads an operation.

    Layers repeat operations that differ in their place only, so each of these is read once. That takes a third of the
    time.
    """
    known: dict[str, Operation] = {}

    def read_operation(values: Any) -> Operation:
        if not isinstance(values, dict) or not all(isinstance(values.get(name), str) for name in _PLACE):
            return from_json_values(Operation, values, converters)  # says what is wrong
        place = {name: values[name] for name in _PLACE}
        text = repr({name: value for name, value in values.items() if name not in _PLACE})
        if text not in known:
            known[text] = from_json_values(Operation, values, converters)
        return dataclasses.replace(known[text], **place)

    return read_operation


def _executor(value: Any) -> Executor:
    if value not in get_args(Executor):
        raise ValueError(f"`executor` is {value!r}, not one of {get_args(Executor)}")
    return value

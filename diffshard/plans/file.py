"""Plans as versioned JSON files, which are replaced whole or not at all.

Specs are many and few of them differ, so each is written once, and records refer to it by number.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, TypeVar

from jax.sharding import AbstractMesh, AxisType, Mesh

from diffshard.base import checked_mesh
from diffshard.plans.base import Operation, PlanData, PredictedCollective, Tensor
from diffshard.plans.consistency import check_plan
from diffshard.plans.documents import SHARDING, made_of, read, write
from diffshard.plans.json_values import MisfitError, from_json_values, to_json_values
from search_spaces.partition_specs import NamedSpec

VERSION = 4
_RECORDS = {
    "arguments": Tensor, "outputs": Tensor, "residuals": Tensor,
    "operations": Operation, "collectives": PredictedCollective,
}  # fmt: skip
_NOT_SAVED = ("stored_in", "mesh", "structures")
_PLACE = ("source", "scope")  # of an operation in the user's program
_SPEC_FIELDS = {"spec", "next_best_spec"}
_SPECS_FIELDS = {"operands", "unreduced", "results", "value_specs"}

Place = tuple[str, str]
"""Source and scope of an operation."""
PlanT = TypeVar("PlanT", bound=PlanData)


def save(plan: PlanData, path: str | PathLike[str]) -> None:
    """Writes a plan as JSON; the file is replaced whole or not at all."""
    write(path, to_json(plan))


def load(path: str | PathLike[str], kind: type[PlanT], mesh: Mesh | AbstractMesh | None = None) -> PlanT:
    """Reads a plan of a kind, `PlanData` or a class with its fields; `mesh` as in `Plan.load`.

    Raises:
      TypeError, PlanError: as `from_json`.
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


def from_json(
    document: Any,
    name: str,
    kind: type[PlanT],
    mesh: Mesh | AbstractMesh | None = None,
    places: Sequence[Place] | None = None,
) -> PlanT:
    """Returns a plan of a kind from JSON values.

    Args:
      kind: `PlanData` or a class with its fields.
      places: where the function's operations are, if the values come from `without_places`.

    Raises:
      TypeError: `mesh` is no mesh.
      PlanError: the values are no plan, damaged, or of another version; or the mesh has other axes.
    """
    plan = made_of(document, name, SHARDING, VERSION, lambda values: _plan_from_values(values, kind, mesh, places))
    if mesh is not None:
        checked_mesh(mesh, plan.mesh_axes)
    return plan


def without_places(document: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the JSON values of a plan without the places of its operations, each of which is written once.

    The layers of a model repeat operations, so that this is smaller by about the number of layers.
    """
    distinct, order, _ = _distinct(document["operations"])
    return {**document, "operations": {"distinct": distinct, "order": order}}


def _plan_from_values(
    values: dict[str, Any], kind: type[PlanT], mesh: Mesh | AbstractMesh | None, places: Sequence[Place] | None
) -> PlanT:
    specs = from_json_values(tuple[NamedSpec, ...], values.pop("specs"))

    def spec(number: Any) -> NamedSpec:
        if type(number) is not int or not 0 <= number < len(specs):
            raise MisfitError(f"is {number!r}, not the number of one of the {len(specs)} `specs`")
        return specs[number]

    converters: dict[Any, Any] = {
        NamedSpec: spec,
        NamedSpec | None: lambda number: None if number is None else spec(number),
    }
    if places is None:
        distinct, order, places = _distinct(values["operations"])
    else:
        distinct, order = values["operations"]["distinct"], values["operations"]["order"]
    if len(order) != len(places) or not all(type(number) is int and 0 <= number < len(distinct) for number in order):
        raise ValueError(f"`operations` must be {len(places)} of the {len(distinct)} that are written")
    hint = tuple[Operation, ...]
    try:
        placeless = from_json_values(hint, [{**fields, "source": "", "scope": ""} for fields in distinct], converters)
    except MisfitError as error:  # which says which one of those that differ it is
        index = order.index(int(error.place[0].strip("[]")))
        raise MisfitError(error.rule, "operations", f"[{index}]", *error.place[1:]) from None
    operations = tuple([_at(place, placeless[number]) for number, place in zip(order, places, strict=True)])
    plan: PlanT = from_json_values(kind, values, {**converters, hint: lambda _: operations})
    first = {number: i for i, number in reversed([*enumerate(order)])}
    check_plan(plan, sorted(first.values()))
    axes = plan.mesh_axes
    if mesh is None:
        mesh = AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    return dataclasses.replace(plan, mesh=mesh)


def _distinct(operations: Any) -> tuple[list[dict[str, Any]], list[int], list[Place]]:
    """Returns the operations that differ in more than their place, the number of each one, and the places."""
    numbers: dict[str, int] = {}
    distinct, order, places = [], [], []
    for values in operations:
        if not isinstance(values, dict) or not all(name in values for name in _PLACE):
            raise TypeError(f"{values!r} is not the fields of an operation")
        source, scope = (from_json_values(str, values[name]) for name in _PLACE)
        fields = {name: value for name, value in values.items() if name not in _PLACE}
        text = repr(fields)
        if text not in numbers:
            numbers[text] = len(distinct)
            distinct.append(fields)
        order.append(numbers[text])
        places.append((source, scope))
    return distinct, order, places


def _at(place: Place, operation: Operation) -> Operation:
    """Returns an operation at another place; as `dataclasses.replace`, in a tenth of its time."""
    moved = object.__new__(Operation)
    vars(moved).update(vars(operation))
    vars(moved)["source"], vars(moved)["scope"] = place
    return moved

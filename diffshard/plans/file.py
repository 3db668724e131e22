"""Plans as versioned JSON. Files are replaced whole or not at all."""

import dataclasses
import os
from os import PathLike
from typing import Any

from jax.sharding import AbstractMesh, AxisType, Mesh

from diffshard.base import PlanError
from diffshard.plans.documents import SHARDING, content, plain, read, restored, write
from diffshard.plans.plan import Operation, Plan, PredictedCollective, Spec, Tensor

VERSION = 1
_RECORDS = {"arguments": Tensor, "outputs": Tensor, "operations": Operation, "collectives": PredictedCollective}
_SPEC_FIELDS = {"spec", "next_best_spec"}
_SPECS_FIELDS = {"operands", "kept", "results", "held"}


def save(plan: Plan, path: str | PathLike[str]) -> None:
    """Writes a plan; see `Plan.save`."""
    write(path, to_json(plan))


def load(path: str | PathLike[str], mesh: Mesh | AbstractMesh | None = None) -> Plan:
    """Reads a plan; see `Plan.load`."""
    return from_json(read(path), os.fspath(path), mesh)


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

    found: dict[str, Any] = {"format": SHARDING, "version": VERSION}
    for item in dataclasses.fields(plan):
        if item.name != "mesh":
            value = getattr(plan, item.name)
            found[item.name] = [record(x) for x in value] if item.name in _RECORDS else value
    found["specs"] = list(specs)
    return plain(found)


def from_json(found: Any, name: str, mesh: Mesh | AbstractMesh | None = None) -> Plan:
    """A plan from JSON values; `name` is where they come from, for errors.

    Raises:
      PlanError: they are not a plan, are damaged, or are newer than this version; or the mesh has other axes.
    """
    values = content(found, name, SHARDING, VERSION)
    try:
        plan = _plan(values, mesh)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError) as error:
        raise PlanError(f"`{name}` is a damaged plan: {type(error).__name__}: {error}.") from None
    if mesh is not None and dict(mesh.shape) != dict(plan.mesh_axes):
        raise PlanError(f"`mesh` has the axes {dict(mesh.shape)}; the plan in `{name}` is for {dict(plan.mesh_axes)}.")
    return plan


def _plan(found: dict[str, Any], mesh: Mesh | AbstractMesh | None) -> Plan:
    specs = [tuple(tuple(axes) for axes in spec) for spec in found.pop("specs")]
    plan: Plan = restored(
        Plan, found, {Spec: specs.__getitem__, Spec | None: lambda i: None if i is None else specs[i]}
    )
    axes = plan.mesh_axes
    if not all(n > 0 for n in axes.values()):
        raise ValueError(f"`mesh_axes` is {axes!r}, not axes with their numbers of devices")
    if mesh is None:
        mesh = AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    return dataclasses.replace(plan, mesh=mesh)

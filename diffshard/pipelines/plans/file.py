"""Plans of pipelines as versioned JSON, in the form that `diffshard.plans.documents` gives to all plans."""

import os
from collections.abc import Callable
from os import PathLike
from typing import Any, TypeVar, get_args

from cost.pipeline_schedules import Schedule
from cost.pipeline_steps import Overlap
from diffshard.base import PlanError
from diffshard.pipelines.plans.base import PipelinePlanData
from diffshard.pipelines.plans.consistency import check_pipeline_plan
from diffshard.plans.documents import PIPELINE, content, from_json_values, read, to_json_values, write

VERSION = 1

PlanT = TypeVar("PlanT", bound=PipelinePlanData)


def save(plan: PipelinePlanData, path: str | PathLike[str]) -> None:
    """Writes a plan; see `PipelinePlan.save`."""
    write(path, to_json(plan))


def load(path: str | PathLike[str], kind: type[PlanT]) -> PlanT:
    """Reads a plan; see `PipelinePlan.load`.

    Args:
      path: a file that `save` wrote.
      kind: the class of the plan.
    """
    return from_json(read(path), os.fspath(path), kind)


def to_json(plan: PipelinePlanData) -> dict[str, Any]:
    """Returns a plan as JSON values."""
    return {"format": PIPELINE, "version": VERSION, **to_json_values(plan)}


def from_json(document: Any, name: str, kind: type[PlanT]) -> PlanT:
    """Returns a plan from JSON values.

    Args:
      document: JSON values.
      name: where they come from, for errors.
      kind: the class of the plan.

    Raises:
      PlanError: they are not a plan of a pipeline, are damaged, or are newer than this version.
    """
    values = content(document, name, PIPELINE, VERSION)
    try:
        plan: PlanT = from_json_values(kind, values, {Schedule: _one_of(Schedule), Overlap: _one_of(Overlap)})
        check_pipeline_plan(plan)
    except (TypeError, ValueError, RecursionError) as error:
        raise PlanError(f"`{name}` is a damaged plan: {error}.") from None
    return plan


def _one_of(names: Any) -> Callable[[Any], Any]:
    """Returns what checks that a value is one of the names of a `Literal`."""

    def checked(value: Any) -> Any:
        if value not in get_args(names):
            raise TypeError(f"{value!r} is not one of {get_args(names)}")
        return value

    return checked

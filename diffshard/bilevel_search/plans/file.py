"""Plans of the bilevel search as versioned JSON, in the form that `diffshard.plans.documents` gives to all plans."""

import os
from collections.abc import Mapping
from os import PathLike
from typing import Any, TypeVar

from cost.base import Link
from diffshard.base import PlanError
from diffshard.bilevel_search.plans.base import BilevelPlanData
from diffshard.bilevel_search.plans.consistency import check_bilevel_plan
from diffshard.plans.documents import BILEVEL, content, from_json_values, link_from_json, read, to_json_values, write

VERSION = 3

PlanT = TypeVar("PlanT", bound=BilevelPlanData)


def save(plan: BilevelPlanData, path: str | PathLike[str]) -> None:
    """Writes a plan; see `BilevelPlan.save`."""
    write(path, to_json(plan))


def load(path: str | PathLike[str], kind: type[PlanT]) -> PlanT:
    """Reads a plan; see `BilevelPlan.load`.

    Args:
      path: a file that `save` wrote.
      kind: the class of the plan.
    """
    return from_json(read(path), os.fspath(path), kind)


def to_json(plan: BilevelPlanData) -> dict[str, Any]:
    """Returns a plan as JSON values."""
    return {"format": BILEVEL, "version": VERSION, **to_json_values(plan)}


def from_json(document: Any, name: str, kind: type[PlanT]) -> PlanT:
    """Returns a plan from JSON values.

    Args:
      document: JSON values.
      name: where they come from, for errors.
      kind: the class of the plan.

    Raises:
      PlanError: they are not a plan of `bilevel`, are damaged, or are newer than this version.
    """
    values = content(document, name, BILEVEL, VERSION, older=(1, 2))
    try:
        if "proof" not in values:  # without it what was measured would pass for a prediction
            raise ValueError("it has no `proof`")
        if document["version"] == 1:
            values = _from_version_1(values)
        if document["version"] < 3:
            values = _with_new_names(values, {"groups": "nodes"})
        plan: PlanT = from_json_values(kind, values, {Link: link_from_json})
        check_bilevel_plan(plan)
    except (TypeError, ValueError, RecursionError) as error:
        raise PlanError(f"`{name}` is a damaged plan: {error}.") from None
    return plan


def _from_version_1(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of version 1 under the names of version 2; damaged values stay and are refused later."""
    new_values = {_NEW_NAMES.get(name, name): value for name, value in values.items()}
    if isinstance(new_values.get("groups"), list):
        new_values["groups"] = [_group_from_version_1(group) for group in new_values["groups"]]
    if isinstance(proof := new_values["proof"], dict):  # the first files of version 1 repeat the first of the table
        table = [_with_new_names(candidate, {"row": "record"}) for candidate in proof.get("table", ())]
        new_values["proof"] = {**{k: v for k, v in proof.items() if k != "winner"}, "table": table}
    return new_values


_NEW_NAMES = {"lossless": "all_exact"}


def _group_from_version_1(group: Any) -> Any:
    if not isinstance(group, dict) or not isinstance(traffic := group.get("traffic"), dict):
        return group
    new_traffic = {name: value for name, value in traffic.items() if name != "exact_sent_bytes"}
    return {
        **group,
        "traffic": _with_new_names(new_traffic, {"times": "count"}),
        "exact_sent_bytes": traffic.get("exact_sent_bytes"),
    }


def _with_new_names(record: Any, names: Mapping[str, str]) -> Any:
    if not isinstance(record, dict):
        return record
    return {names.get(name, name): value for name, value in record.items()}

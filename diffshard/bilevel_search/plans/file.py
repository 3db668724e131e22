"""Plans of the bilevel search as versioned JSON, in the form that `diffshard.plans.documents` gives to all plans."""

import math
import os
from collections.abc import Mapping
from os import PathLike
from typing import Any, TypeVar

from cost.base import Link
from diffshard.base import PlanError
from diffshard.bilevel_search.plans.base import BilevelPlanData, NodePlan, Proof
from diffshard.plans.documents import BILEVEL, content, from_json_values, link_from_json, read, to_json_values, write
from search_spaces.base import Choice

VERSION = 3
_DIRECTIONS = ("forward", "backward", "gradient", "")
"""The directions that traffic may have; the empty one is of spaces that do not tell directions apart."""

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
        _check(plan)
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


def _check(plan: BilevelPlanData) -> None:
    """Checks that the values are in the ranges that a search produces.

    Raises:
      ValueError: names the first that is not.
    """
    if not plan.nodes:
        raise ValueError("it has no `nodes`")
    _check_choice("", plan.choice, len(plan.nodes))
    if any(devices < 1 for devices in plan.mesh_axes.values()):
        raise ValueError(f"`mesh_axes` is {dict(plan.mesh_axes)}, not axes with their numbers of devices")
    if not 0 <= plan.exact_share < 1:
        raise ValueError(f"`exact_share` is {plan.exact_share}, not from 0 to below 1")
    if plan.max_loss_increase is not None and not 0 < plan.max_loss_increase < math.inf:
        raise ValueError(f"`max_loss_increase` is {plan.max_loss_increase}, not a positive finite number")
    _check_amounts("", seconds=plan.seconds, cost_ratio=plan.cost_ratio)
    for node in plan.nodes:
        _check_node(node)
    if plan.proof is not None:
        _check_proof(plan.proof, len(plan.nodes))


def _check_node(node: NodePlan) -> None:
    where = f" of node {node.name!r}"
    _check_amounts(where, seconds=node.seconds, exact_seconds=node.exact_seconds)
    _check_amounts(where, exact_sent_bytes=node.exact_sent_bytes)
    if (traffic := node.traffic) is not None:
        if traffic.direction not in _DIRECTIONS:
            raise ValueError(f"`direction`{where} is {traffic.direction!r}, none of {', '.join(_DIRECTIONS[:-1])}")
        _check_amounts(where, count=traffic.count, sent_bytes=traffic.sent_bytes)


def _check_proof(proof: Proof, num_nodes: int) -> None:
    if not proof.finalists:
        raise ValueError("no candidate of `proof` was trained to the end")
    _check_amounts(" of `proof`", steps=proof.steps)
    for candidate in proof.table:
        where = f" of candidate {candidate.name!r}"
        _check_choice(where, candidate.choice, num_nodes)
        _check_amounts(where, seconds=candidate.seconds, steps=candidate.record.steps)
        if not 0 <= candidate.exact_share <= 1:
            raise ValueError(f"`exact_share`{where} is {candidate.exact_share}, not from 0 to 1")


def _check_choice(where: str, choice: Choice, num_nodes: int) -> None:
    if len(choice) != num_nodes:
        raise ValueError(f"`choice`{where} has {len(choice)} numbers for {num_nodes} nodes")
    if min(choice) < 0:
        raise ValueError(f"`choice`{where} is {choice}, with a number below 0")


def _check_amounts(where: str, **amounts: float) -> None:
    for name, amount in amounts.items():
        if not 0 <= amount < math.inf:
            raise ValueError(f"`{name}`{where} is {amount}, not a finite number from 0 on")

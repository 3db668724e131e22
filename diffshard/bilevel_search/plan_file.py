"""Plans of the bilevel search as versioned JSON, in the form that `diffshard.plans.documents` gives to all plans."""

import math
import os
from os import PathLike
from typing import Any, get_args

from diffshard.base import PlanError
from diffshard.bilevel_search.plan import BilevelPlan
from diffshard.bilevel_search.proof import Proof
from diffshard.bilevel_search.space import Choice
from diffshard.plans.documents import BILEVEL, content, plain, read, restored, write
from search_spaces.communication.base import Direction

VERSION = 1


def save(plan: BilevelPlan, path: str | PathLike[str]) -> None:
    """Writes a plan; see `BilevelPlan.save`."""
    write(path, to_json(plan))


def load(path: str | PathLike[str]) -> BilevelPlan:
    """Reads a plan; see `BilevelPlan.load`."""
    return from_json(read(path), os.fspath(path))


def to_json(plan: BilevelPlan) -> dict[str, Any]:
    """A plan as JSON values."""
    return {"format": BILEVEL, "version": VERSION, **plain(plan)}


def from_json(found: Any, name: str) -> BilevelPlan:
    """A plan from JSON values; `name` is where they come from, for errors.

    Raises:
      PlanError: they are no plan of `bilevel`, are damaged, or are newer than this version.
    """
    values = content(found, name, BILEVEL, VERSION)
    try:
        if "proof" not in values:  # without it what was measured would pass for a prediction
            raise ValueError("it has no `proof`")
        if isinstance(proof := values["proof"], dict):  # older files repeat the first of its table
            values["proof"] = {field: value for field, value in proof.items() if field != "winner"}
        plan: BilevelPlan = restored(BilevelPlan, values)
        _check(plan)
    except (TypeError, ValueError, RecursionError) as error:
        raise PlanError(f"`{name}` is a damaged plan: {error}.") from None
    return plan


def _check(plan: BilevelPlan) -> None:
    """Refuses values that no search gives.

    Raises:
      ValueError: names the first.
    """
    if not plan.groups:
        raise ValueError("it has no `groups`")
    _check_choice("", plan.choice, len(plan.groups))
    if any(devices < 1 for devices in plan.mesh_axes.values()):
        raise ValueError(f"`mesh_axes` is {dict(plan.mesh_axes)}, not axes with their numbers of devices")
    if not 0 <= plan.exact_share < 1:
        raise ValueError(f"`exact_share` is {plan.exact_share}, not from 0 to below 1")
    if plan.max_loss_increase is not None and not 0 < plan.max_loss_increase < math.inf:
        raise ValueError(f"`max_loss_increase` is {plan.max_loss_increase}, not a positive finite number")
    _check_amounts("", seconds=plan.seconds, cost_ratio=plan.cost_ratio)
    for group in plan.groups:
        where = f" of group {group.name!r}"
        _check_amounts(where, seconds=group.seconds, exact_seconds=group.exact_seconds)
        if (sent := group.traffic) is not None:
            if sent.direction not in get_args(Direction):
                raise ValueError(f"`direction`{where} is {sent.direction!r}, none of {', '.join(get_args(Direction))}")
            amounts = {"times": sent.times, "sent_bytes": sent.sent_bytes, "exact_sent_bytes": sent.exact_sent_bytes}
            _check_amounts(where, **amounts)
    if plan.proof is not None:
        _check_proof(plan.proof, len(plan.groups))


def _check_proof(proof: Proof, num_groups: int) -> None:
    if not proof.finalists:
        raise ValueError("no candidate of `proof` was trained to the end")
    _check_amounts(" of `proof`", steps=proof.steps)
    for tried in proof.table:
        where = f" of candidate {tried.name!r}"
        _check_choice(where, tried.choice, num_groups)
        _check_amounts(where, seconds=tried.seconds, steps=tried.row.steps)
        if not 0 <= tried.exact_share <= 1:
            raise ValueError(f"`exact_share`{where} is {tried.exact_share}, not from 0 to 1")


def _check_choice(where: str, choice: Choice, num_groups: int) -> None:
    if len(choice) != num_groups:
        raise ValueError(f"`choice`{where} has {len(choice)} numbers for {num_groups} groups")
    if min(choice) < 0:
        raise ValueError(f"`choice`{where} is {choice}, with a number below 0")


def _check_amounts(where: str, **amounts: float) -> None:
    for name, amount in amounts.items():
        if not 0 <= amount < math.inf:
            raise ValueError(f"`{name}`{where} is {amount}, not a finite number from 0 on")

"""Plans of the bilevel search as versioned JSON, in the form that `diffshard.plan_json` gives to all plans."""

import os
from os import PathLike
from typing import Any

from diffshard.bilevel.plan import BilevelPlan
from diffshard.plan import PlanError
from diffshard.plan_json import BILEVEL, content, plain, read, restored, write

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
        plan: BilevelPlan = restored(BilevelPlan, values)
        if len(plan.choice) != len(plan.groups):
            raise ValueError(f"{len(plan.choice)} choices for {len(plan.groups)} groups")
        if plan.proof is not None and not plan.proof.finalists:
            raise ValueError("no candidate of `proof` was trained to the end")
        if not 0 <= plan.exact_share < 1:
            raise ValueError(f"`exact_share` is {plan.exact_share}, not from 0 to below 1")
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise PlanError(f"`{name}` is a damaged plan: {type(error).__name__}: {error}.") from None
    return plan

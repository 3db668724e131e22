"""A folder of plans that earlier searches found, so that the second start of a job does not search again.

A plan's file is named by a hash of everything that the plan depends on. Many processes may write at the same time: each
writes a file of its own and renames it, so that readers find a whole plan or none. Operations that differ only in their
place are written once.
"""

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from diffshard.base import PlanError
from diffshard.files import folder_path, replace_file
from diffshard.plans.documents import DAMAGE, check_checksum, check_stored, read, text_of
from diffshard.plans.file import from_json, to_json, without_places
from diffshard.sharding_search.fingerprints import digest_of, facts_of
from diffshard.sharding_search.plan import Plan
from diffshard.sharding_search.request import PlanRequest
from diffshard.sharding_search.warm_start import is_made_for

_FORMAT, _VERSION = "diffshard stored plan", 2
_KEPT = ("optimal", "finished", "time limit")
"""How a search ends whose plan is kept: one that was interrupted might have found a better one."""


@dataclass(frozen=True)
class PlanStore:
    """A folder of plans.

    Args:
      folder: where the files are; it is made when the first plan is kept.
    """

    folder: str

    def path(self, key: str) -> str:
        """Returns the file of a plan."""
        return os.path.join(self.folder, f"{key}.json")

    def plan_or_search(self, find: Callable[[PlanRequest], Plan], request: PlanRequest) -> Plan:
        """Returns the plan of an earlier search, or else searches and keeps the plan.

        A plan that the options begin with is not kept if it was made for the same question and so may have been taken
        as it is: other options, such as a shorter time limit, may have found it. A file that is damaged, or not one of
        this store, is told in a warning and replaced.
        """
        key = key_of(request)
        plan = self.plan(key, request)
        if plan is not None:
            return plan
        plan = find(request)
        start = request.options.start
        if plan.status in _KEPT and (start is None or not is_made_for(start, request)):
            self.keep(key, plan)
        return plan

    def plan(self, key: str, request: PlanRequest) -> Plan | None:
        """Returns the plan of a key; None if there is none, or if its file cannot be used."""
        path = self.path(key)
        try:
            plan = _from_document(read(path), key, path, request)
        except FileNotFoundError:
            return None
        except (PlanError, OSError) as error:
            warnings.warn(f"A plan in the store cannot be used, and is searched again: {error}", stacklevel=2)
            return None
        return replace(plan, stored_in=path)

    def keep(self, key: str, plan: Plan) -> None:
        """Writes a plan's file; where that is not possible, it is told in a warning."""
        document = {"format": _FORMAT, "version": _VERSION, "key": key, "plan": without_places(to_json(plan))}
        try:
            os.makedirs(self.folder, exist_ok=True)
            replace_file(self.path(key), text_of(document))
        except OSError as error:
            warnings.warn(f"The plan cannot be kept in the store: {error}", stacklevel=2)


def checked_folder(folder: Any) -> str:
    """Returns the path of a folder.

    Raises:
      TypeError: it is not a path.
      ValueError: it is empty, or there is a file in its place.
    """
    path = folder_path("cache", folder)
    if os.path.exists(path) and not os.path.isdir(path):
        raise ValueError(f"`cache` must be a folder, and {path!r} is a file.")
    return path


def key_of(request: PlanRequest) -> str:
    """Returns a hash of everything that the plan of a request depends on."""
    facts = facts_of(request.options, request.traced_function)
    return digest_of({**facts, "`time_limit_s`": repr(request.options.time_limit_s)})


def _from_document(document: Any, key: str, path: str, request: PlanRequest) -> Plan:
    """Returns the plan of a store's document."""
    check_stored(document, _FORMAT, _VERSION, key, path)
    content = document.get("plan")
    axes = content.get("mesh_axes") if isinstance(content, dict) else None
    try:
        check_checksum(document)
        mesh = request.options.candidate_with(axes).mesh
        # The key does not depend on the lines of the program: operations are where they are today.
        graph = request.with_recomputed(_recomputed(content), _offloaded(content)).traced_function.graph
    except DAMAGE as error:
        raise PlanError(f"`{path}` is a damaged plan: {error}.") from None
    places = [(vertex.source, vertex.scope) for vertex in graph.vertices]
    return from_json(content, path, Plan, mesh, places)


def _recomputed(content: Any) -> list[int]:
    """Returns the steps that a plan's document runs again; none if it is damaged, which reading it will tell."""
    remat = content.get("remat") if isinstance(content, dict) else None
    recomputed = remat.get("recomputed") if isinstance(remat, dict) else None
    is_list = isinstance(recomputed, list) and all(isinstance(key, int) for key in recomputed)
    return recomputed if is_list and recomputed else []


def _offloaded(content: Any) -> list[tuple[int, int, int]]:
    """Returns what a plan's document offloads; nothing if it is damaged, which reading it will tell."""
    remat = content.get("remat") if isinstance(content, dict) else None
    offloaded = remat.get("offloaded") if isinstance(remat, dict) else None
    is_list = isinstance(offloaded, list) and all(
        isinstance(numbers, list) and len(numbers) == 3 and all(isinstance(n, int) for n in numbers)
        for numbers in offloaded
    )
    return [(a, b, c) for a, b, c in offloaded] if is_list and offloaded else []

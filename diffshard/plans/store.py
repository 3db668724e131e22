"""Folders that keep plans of earlier searches: a file for each, named by a hash of everything that the plan depends on.

Many processes may write at the same time: each writes a file of its own and renames it, so that readers find a whole
plan or none.
"""

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from diffshard.base import PlanError
from diffshard.files import folder_path, replace_file
from diffshard.plans.documents import DAMAGE, check_checksum, read, text_of

_PlanT = TypeVar("_PlanT")


@dataclass(frozen=True)
class Store:
    """A folder of plans of one kind.

    Attributes:
      folder: where the files are; it is made when the first plan is kept.
      format, version: of the files.
    """

    folder: str
    format: str
    version: int

    def path(self, key: str) -> str:
        """Returns the file of a plan."""
        return os.path.join(self.folder, f"{key}.json")

    def plan(self, key: str, plan_from: Callable[[Any, str], _PlanT]) -> _PlanT | None:
        """Returns the plan of a key; None if there is none, or its file cannot be used, which is told in a warning.

        Args:
          plan_from: makes a plan, a dataclass with `stored_in`, of its JSON values and the path of their file.
        """
        path = self.path(key)
        try:
            plan: Any = plan_from(self._values(read(path), key, path), path)
        except FileNotFoundError:
            return None
        except (PlanError, OSError) as error:
            warnings.warn(f"A plan in the store cannot be used, and is searched again: {error}", stacklevel=2)
            return None
        return replace(plan, stored_in=path)

    def keep(self, key: str, values: Mapping[str, Any]) -> None:
        """Writes the file of a plan's JSON values; where that is not possible, it is told in a warning."""
        document = {"format": self.format, "version": self.version, "key": key, "plan": values}
        try:
            os.makedirs(self.folder, exist_ok=True)
            replace_file(self.path(key), text_of(document))
        except OSError as error:
            warnings.warn(f"The plan cannot be kept in the store: {error}", stacklevel=2)

    def _values(self, document: Any, key: str, path: str) -> Any:
        """Returns the JSON values of the plan in a document that was written for a key."""
        if not isinstance(document, dict) or document.get("format") != self.format:
            raise PlanError(f"`{path}` is not a file of this store.")
        if document.get("version") != self.version or document.get("key") != key:
            raise PlanError(f"`{path}` was written for another function, or by another version.")
        try:
            check_checksum(document)
            return document["plan"]
        except DAMAGE as error:
            raise PlanError(f"`{path}` is a damaged plan: {error}.") from None


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

"""Plan files: JSON documents that begin with their kind and version and end with a checksum of all that is between.

A disk, a copy or an editor may change a number into another one that a search might have found as well. Only the
checksum tells that; whatever else cannot be is named by the field in which it is. A file whose checksum was
removed on purpose is read without it.

A store is a folder with the plans of earlier searches: a file for each, named by a hash of everything that the plan
depends on. Many processes may write at the same time: each writes a file of its own and renames it, so that readers
find a whole plan or none.
"""

import dataclasses
import json
import os
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, get_args

from diffshard.base import PlanError
from diffshard.files import checked_path, folder_path, replace_file, write_whole
from diffshard.garbage_collection import rare_collections
from diffshard.plans.json_values import from_json_values, to_json_values

SHARDING, BILEVEL, PIPELINE = "diffshard plan", "diffshard bilevel plan", "diffshard pipeline plan"
TABLES, HARDWARE = "diffshard plan of embedding tables", "diffshard hardware"
EXPERT_GROUPS, EXPERT_ASSIGNMENT = "diffshard plan of expert groups", "diffshard assignment of experts"
PLACEMENT, BUDGET = "diffshard placement", "diffshard budget"
_LOADED_BY = {
    SHARDING: "`diffshard.Plan.load`",
    BILEVEL: "`diffshard.BilevelPlan.load`",
    PIPELINE: "`diffshard.PipelinePlan.load`",
    TABLES: "`diffshard.tables.TablePlan.load`",
    HARDWARE: "`diffshard.hardware.load_hardware`",
    EXPERT_GROUPS: "`diffshard.experts.GroupPlan.load`",
    EXPERT_ASSIGNMENT: "`diffshard.experts.ExpertAssignment.load`",
    PLACEMENT: "`diffshard.pipelines.Placement.load`",
    BUDGET: "`diffshard.elastic.Budget.load`",
}
_CHECKSUM = "checksum"
_NO_CONTENT = ("format", "version", _CHECKSUM)
DAMAGE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What reading the values of a damaged document may trip over."""
_T = TypeVar("_T")


class _VersionError(PlanError):
    """A file, or a plan inside of it, is of another version than this diffshard reads."""


def text_of(document: Mapping[str, Any]) -> str:
    """Returns JSON values as the text of a file, with their checksum."""
    whole = {**document, _CHECKSUM: checksum_of(document)}
    return json.dumps(whole, separators=(",", ":"), allow_nan=False)


def write(path: str | os.PathLike[str], document: Mapping[str, Any]) -> None:
    """Writes JSON values to a file, which is replaced whole or not at all."""
    write_whole(checked_path(path), text_of(document))


def read(path: str | os.PathLike[str]) -> Any:
    """Reads the JSON values of a file.

    Raises:
      PlanError: the file is not JSON.
      OSError: the file cannot be read.
      TypeError: the path is none.
    """
    path = checked_path(path)
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (ValueError, RecursionError) as error:  # also a number of more digits than Python reads
        raise PlanError(f"`{os.fspath(path)}` is not a plan file: it is not JSON ({error}).") from None


def checksum_of(document: Mapping[str, Any]) -> int:
    """Returns the checksum of JSON values; the order of keys counts, as that of a mesh's axes does."""
    return zlib.crc32(json.dumps(document, separators=(",", ":")).encode())


def check_checksum(document: Mapping[str, Any]) -> None:
    """Checks that a document holds what was written, if it says by a checksum what that was."""
    values = {key: value for key, value in document.items() if key != _CHECKSUM}
    if _CHECKSUM in document and document[_CHECKSUM] != checksum_of(values):
        raise ValueError(
            "its `checksum` is another one than that of its values, so that one of them has changed since it was "
            "written. If that was on purpose, remove the `checksum`"
        )


def kind_of(document: Any) -> Any:
    """Returns the kind of plan that a document states; None if it states none."""
    return document.get("format") if isinstance(document, dict) else None


def content(document: Any, name: str, kind: str, version: int) -> dict[str, Any]:
    """Returns the content of a document without its kind, version and checksum.

    Args:
      kind: the kind of plan that they must be.
      version: the version that is written, and the only one that can be read.
    """
    own_kind = kind_of(document)
    if isinstance(own_kind, str) and own_kind != kind and own_kind in _LOADED_BY:
        raise PlanError(f"`{name}` is a {own_kind}, not a {kind}: load it with {_LOADED_BY[own_kind]}.")
    if own_kind != kind:
        raise PlanError(f"`{name}` is not a plan file of diffshard: its `format` is not {kind!r}.")
    if type(document.get("version")) is not int or document["version"] != version:
        raise _VersionError(
            f"`{name}` has the plan version {document.get('version')!r}; this diffshard reads version {version}. "
            "Update diffshard, or make the plan again."
        )
    return {key: value for key, value in document.items() if key not in _NO_CONTENT}


def made_of(document: Any, name: str, kind: str, version: int, make: Callable[[dict[str, Any]], _T]) -> _T:
    """Returns the object that is made of a document's content.

    Args:
      make: makes it of the content; raises one of `DAMAGE` where it cannot.
    """
    values = content(document, name, kind, version)
    try:
        with rare_collections():
            made = make(values)
            check_checksum(document)
    except _VersionError as error:  # of a plan inside
        raise _VersionError(f"`{name}` was made by another version of diffshard: {error}") from None
    except DAMAGE as error:
        reason = str(error) if isinstance(error, TypeError | ValueError) else f"{type(error).__name__}: {error}"
        raise PlanError(f"`{name}` is a damaged plan: {reason}.") from None
    return made


@dataclass(frozen=True)
class RecordFile:
    """A kind of files, each with the fields of one record: a dataclass or a named tuple.

    Attributes:
      check: raises `ValueError` where fields of a record do not fit each other; says what is wrong. It is for records
        whose class does not check its own fields.
      needed: fields that a file must have, although the record has a default for them.
      parts: of classes that are not written field by field, how their values are written as JSON values or records,
        and read back from JSON values; by the annotation of the fields that have them.
    """

    kind: str
    version: int
    check: Callable[[Any], None] = lambda record: None
    without: Sequence[str] = ()
    needed: Sequence[str] = ()
    parts: Mapping[Any, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = field(default_factory=dict)

    def to_json(self, record: Any) -> dict[str, Any]:
        """Returns a record as JSON values."""
        writers = {kind: write for hint, (write, _) in self.parts.items() for kind in get_args(hint) or (hint,)}
        is_tuple = isinstance(record, tuple)
        names = getattr(record, "_fields", ()) if is_tuple else [item.name for item in dataclasses.fields(record)]
        fields = {name: getattr(record, name) for name in names if name not in self.without}
        return {"format": self.kind, "version": self.version, **to_json_values(fields, writers)}

    def from_json(self, document: Any, name: str, record: type[_T]) -> _T:
        """Returns a record of JSON values; fields that are not there have their defaults.

        Raises:
          PlanError: they are of another kind or version, or damaged.
        """
        readers = {hint: read_part for hint, (_, read_part) in self.parts.items()}

        def make(values: dict[str, Any]) -> _T:
            if missing := [f"`{field}`" for field in self.needed if field not in values]:
                raise ValueError(f"it has no {' and no '.join(missing)}")
            made: _T = from_json_values(record, values, readers)
            self.check(made)
            return made

        return made_of(document, name, self.kind, self.version, make)

    def save(self, record: Any, path: str | os.PathLike[str]) -> None:
        """Writes a record to a file, which is replaced whole or not at all.

        Raises:
          OSError: the file cannot be written.
        """
        write(path, self.to_json(record))

    def load(self, path: str | os.PathLike[str], record: type[_T]) -> _T:
        """Reads a record back; raises as `read` and `from_json`."""
        return self.from_json(read(path), os.fspath(path), record)


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

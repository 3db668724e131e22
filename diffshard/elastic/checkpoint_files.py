"""What a folder of checkpoints holds, and which of them is the last whole one.

Orbax writes a checkpoint into a temporary folder and renames it when everything is there, so that an interrupted save
leaves no folder with a checkpoint's name. It does not notice everything that may happen to the files afterwards, and so
every checkpoint has a manifest: what it holds, and whether that is still what was written.

The numbers of an array have no checksum in orbax's files. So the last file that is written before a checkpoint gets its
name is a manifest, which has the size and the checksum of every other file and of itself.
"""

import json
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

from cost.real_numbers import Count, Index
from diffshard.base import FileError, ProcessesError
from diffshard.files import replace_file
from diffshard.pipelines.plan import PipelinePlan
from diffshard.plans.documents import DAMAGE, PIPELINE, kind_of, read
from diffshard.plans.file import load, save
from diffshard.plans.json_values import JsonValues, from_json_values
from diffshard.processes import Processes
from diffshard.sharding_search.plan import Plan

FORMAT, VERSION = "diffshard checkpoint", 1
MANIFEST, PLAN = "checkpoint.json", "plan.json"
CHANGED_LATER = "_CHECKPOINT_METADATA"
"""A file in which orbax notes something when it renames the folder."""
Files = Mapping[str, tuple[Index, Index]]
"""Size and checksum of each file of a checkpoint, by its path in the folder."""
_CHUNK_BYTES = 1 << 22


class CheckpointError(FileError):
    """A checkpoint is damaged, or does not fit the function that is to go on from it."""


class IncompatibleError(CheckpointError):
    """A checkpoint is whole, but of another version, or in a folder with the name of another step."""


@dataclass(frozen=True)
class SavedArray:
    """An array of a saved state.

    Attributes:
      shape, dtype: of the whole array; the dtype of random keys is written as `key<fry>`.
    """

    path: str
    shape: tuple[Index, ...]
    dtype: str

    def __str__(self) -> str:
        return f"`{self.path}` of {self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint; `residuals` are those of `formats.Carried`, by their keys."""

    folder: str
    num_steps: Count
    arrays: tuple[SavedArray, ...]
    data: JsonValues
    residuals: tuple[SavedArray, ...] = ()

    def plan(self) -> Plan | PipelinePlan:
        """Reads the plan that the training ran with."""
        path = os.path.join(self.folder, PLAN)
        return PipelinePlan.load(path) if kind_of(read(path)) == PIPELINE else load(path, Plan)


class _Manifest(NamedTuple):
    """The contents of `MANIFEST` beside its kind and its own checksum."""

    num_steps: Count
    arrays: tuple[SavedArray, ...]
    data: JsonValues
    files: Files
    residuals: tuple[SavedArray, ...] = ()


def step_folder(directory: str, num_steps: int) -> str:
    """Returns the folder of a checkpoint."""
    return os.path.join(directory, f"{num_steps:08d}")


def write_manifest(
    folder: str,
    plan: Plan | PipelinePlan,
    num_steps: int,
    arrays: Sequence[SavedArray],
    data: Any,
    residuals: Sequence[SavedArray] = (),
) -> None:
    """Finishes a checkpoint whose arrays are written: adds the plan and, last, the manifest."""
    path = os.path.join(folder, PLAN)
    if isinstance(plan, PipelinePlan):
        plan.save(path)
    else:
        save(plan, path)  # in the first process, which does not wait for others here
    files = {name: _size_and_checksum(os.path.join(folder, name)) for name in _files_in(folder)}
    document = {
        "format": FORMAT,
        "version": VERSION,
        "num_steps": num_steps,
        "arrays": [asdict(array) for array in arrays],
        "data": data,
        "files": files,
        "residuals": [asdict(array) for array in residuals],
    }
    replace_file(os.path.join(folder, MANIFEST), json.dumps({"checksum": _checksum_of(document), **document}))


def read_manifest(folder: str) -> tuple[Checkpoint, Files]:
    """Reads what a checkpoint is, and size and checksum of each of its files."""
    path = os.path.join(folder, MANIFEST)
    try:
        with open(path, encoding="utf-8") as file:
            document = json.load(file)
        checksum = document.pop("checksum")
        if checksum != _checksum_of(document):
            raise ValueError("its checksum is wrong")
        kind, version = document.pop("format"), document.pop("version")
        if (kind, repr(version)) != (FORMAT, repr(VERSION)):  # True is no version 1
            raise IncompatibleError(
                f"`{folder}` is a {kind} of version {version}; this diffshard reads version {VERSION} of a {FORMAT}. "
                "Update diffshard, or train on with the version that wrote it."
            )
        manifest = _manifest_of(document)
    except FileNotFoundError:
        raise CheckpointError(f"`{folder}` has no {MANIFEST}: diffshard did not write it, or not to the end") from None
    except IncompatibleError:
        raise
    except DAMAGE as error:
        raise CheckpointError(f"`{path}` is damaged: {type(error).__name__}: {error}") from None
    own_folder = step_folder(os.path.dirname(folder), manifest.num_steps)
    if os.path.basename(folder) != os.path.basename(own_folder):
        raise IncompatibleError(
            f"`{folder}` is the checkpoint of step {manifest.num_steps} under another name. Give it its own name back, "
            f"`{os.path.basename(own_folder)}`, or move it out of the directory."
        )
    checkpoint = Checkpoint(folder, manifest.num_steps, manifest.arrays, manifest.data, manifest.residuals)
    return checkpoint, manifest.files


def _manifest_of(values: Any) -> _Manifest:
    """Returns the content of a manifest.

    Raises:
      TypeError, ValueError: the values are none.
    """
    manifest: _Manifest = from_json_values(_Manifest, values)
    if PLAN not in manifest.files:
        raise ValueError(f"`files` lacks {PLAN!r}")
    for name in manifest.files:
        if os.path.isabs(name) or ".." in name.split(os.sep):
            raise ValueError(f"`files` has {name!r}, which is not in the folder")
    return manifest


def damage_of(folder: str, files: Files) -> str | None:
    """Returns a sentence about the first damaged file of a checkpoint; None if there is none."""
    for name in sorted(files):
        path = os.path.join(folder, name)
        try:
            found = _size_and_checksum(path)
        except OSError as error:
            return f"`{path}` cannot be read: {error.strerror}"
        if found[0] != files[name][0]:
            return f"`{path}` has {found[0]:,} bytes, not {files[name][0]:,}"
        if found != files[name]:
            return f"`{path}` has another checksum than when it was written"
    return None


def _files_in(folder: str) -> list[str]:
    """Returns the paths of all files in a folder that no one changes any more, relative to it."""
    paths = []
    for parent, _, names in os.walk(folder):
        paths += [os.path.relpath(os.path.join(parent, name), folder) for name in names]
    return sorted(path for path in paths if path != CHANGED_LATER)


def _size_and_checksum(path: str) -> tuple[int, int]:
    size, checksum = 0, 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            size, checksum = size + len(chunk), zlib.crc32(chunk, checksum)
    return size, checksum


def _checksum_of(document: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(document, sort_keys=True).encode())


_STEP = re.compile(r"[0-9]{8}|[1-9][0-9]{8,17}")
_UNFINISHED = re.compile(r"[0-9]{8,}(\.orbax-checkpoint-tmp|\.[0-9a-f]{8}\.removed$)")
"""Names of folders that orbax writes, and of old ones that are being removed."""
_MARKS = (MANIFEST, CHANGED_LATER, "_METADATA", "manifest.ocdbt")
"""Files by which a checkpoint is known, also one that has lost some of its files; the last three are orbax's."""
_CHECK = "check the last checkpoint"


def saved_steps(directory: str) -> list[int]:
    """Returns the numbers of steps of all checkpoints that were finished, damaged ones included, ascending.

    A folder with nothing of a checkpoint in it, whatever its name is, such as a date, is the user's.
    """
    if not os.path.isdir(directory):
        return []
    names = (name for name in os.listdir(directory) if _STEP.fullmatch(name))
    return sorted(int(name) for name in names if is_checkpoint(os.path.join(directory, name)))


def is_checkpoint(folder: str) -> bool:
    """Returns whether a folder has, or has had, a checkpoint."""
    return any(os.path.exists(os.path.join(folder, name)) for name in _MARKS)


def last_whole_checkpoint(directory: str, processes: Processes) -> tuple[Checkpoint | None, dict[int, str]]:
    """Reads the last whole checkpoint of a directory, and changes nothing there.

    The first process reads what there is, and the files whose checksums are compared are divided among all: so it takes
    a part of the time, and every process has read from the directory before it trusts it.

    Returns:
      The checkpoint, None if there are none; and what is wrong with newer ones that are damaged, by number of steps.
      The same in all processes.

    Raises:
      CheckpointError: there are checkpoints, but none is whole; or the last whole one is of a newer version.
      OSError: the directory cannot be read.
      ProcessesError: a process does not see the checkpoint, or reads other bytes than the first one.
    """
    damages: dict[int, str] = {}
    for num_steps in reversed(processes.shared(_CHECK, partial(saved_steps, directory), kind=tuple[int, ...])):
        look = partial(_manifest_or_damage, step_folder(directory, num_steps))
        found = processes.shared(_CHECK, look, kind=str | tuple[Checkpoint, Files])
        if isinstance(found, str):
            damages[num_steps] = found
            continue
        checkpoint, files = found
        damage = _damage_seen_by_all(checkpoint.folder, files, processes)
        if damage is None:
            return checkpoint, damages
        damages[num_steps] = damage
    if damages:
        raise CheckpointError(
            f"None of the checkpoints in `{directory}` is whole: {'; '.join(damages.values())}. Bring back a copy, or "
            "give an empty directory to begin anew."
        )
    return None, {}


def divided(files: Files, count: int) -> list[dict[str, tuple[int, int]]]:
    """Divides files into parts of about equal size: the largest first, each to the part that has least."""
    parts: list[dict[str, tuple[int, int]]] = [{} for _ in range(count)]
    sizes = [0] * count
    for name in sorted(files, key=lambda name: (-files[name][0], name)):
        least = sizes.index(min(sizes))
        parts[least][name] = files[name]
        sizes[least] += files[name][0]
    return parts


def _damage_seen_by_all(folder: str, files: Files, processes: Processes) -> str | None:
    """Returns `damage_of` the files of a checkpoint, of which each process reads a part."""
    processes.check_alike(_CHECK, {f"whether there is a folder `{folder}`": str(os.path.isdir(folder))})
    parts, first = divided(files, len(processes.indices)), processes.indices[0]
    damages = processes.gathered(_CHECK, lambda: damage_of(folder, parts[processes.place]))
    for process, part, damage in zip(processes.indices, parts, damages, strict=True):
        if damage is None:
            continue
        in_first = damage
        if process != first:
            in_first = processes.shared(_CHECK, partial(damage_of, folder, part), kind=str | None)
        if in_first is not None:
            return in_first
        raise ProcessesError(
            f"Process {process} finds that {damage}, but process {first} finds that file whole. The machine of process "
            f"{process} reads wrong bytes or an old state of the directory; the checkpoint is left as it is."
        )
    return None


def _manifest_or_damage(folder: str) -> tuple[Checkpoint, Files] | str:
    """Returns the result of `read_manifest`, or a sentence about the damage of the manifest.

    Raises:
      IncompatibleError: a newer version of diffshard wrote the checkpoint.
    """
    try:
        return read_manifest(folder)
    except IncompatibleError:
        raise
    except CheckpointError as error:
        return str(error)


def remove(directory: str, num_steps: int) -> None:
    """Removes a checkpoint; if that is interrupted, what is left does not look like one."""
    folder = step_folder(directory, num_steps)
    unnamed = f"{folder}.{secrets.token_hex(4)}.removed"
    os.rename(folder, unnamed)
    shutil.rmtree(unnamed)


def set_aside(directory: str, num_steps: int) -> None:
    """Renames a damaged checkpoint, so that its number of steps is free for a new one."""
    folder = step_folder(directory, num_steps)
    os.rename(folder, f"{folder}.{secrets.token_hex(4)}.damaged")


def remove_unfinished(directory: str) -> None:
    """Removes what saves and removals that were interrupted have left."""
    for name in os.listdir(directory):
        if _UNFINISHED.match(name):
            shutil.rmtree(os.path.join(directory, name), ignore_errors=True)

"""What a folder of checkpoints holds, and whether a checkpoint is whole.

Orbax writes a checkpoint into a temporary folder and renames it when everything is there, so that an interrupted save
leaves no folder with a checkpoint's name. It does not notice everything that may happen to the files afterwards: the
numbers of an array have no checksum. So the last file that is written before the renaming is a manifest, which has the
size and the checksum of every other file and of itself.
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
from typing import Any

from diffshard.base import ProcessesError
from diffshard.files import write_whole
from diffshard.plans.base import PlanData
from diffshard.plans.file import load, save
from diffshard.processes import Processes
from diffshard.sharding_search.plan import Plan

FORMAT, VERSION = "diffshard checkpoint", 1
MANIFEST, PLAN = "checkpoint.json", "plan.json"
_STEP = re.compile(r"\d{8,}")
_UNFINISHED = re.compile(r"\d{8,}(\.orbax-checkpoint-tmp|\.[0-9a-f]{8}\.removed$)")
"""Names of folders that orbax writes, and of old ones that are being removed."""
_CHANGED_LATER = "_CHECKPOINT_METADATA"  # orbax notes there when it renames the folder
_MARKS = (MANIFEST, _CHANGED_LATER, "_METADATA", "manifest.ocdbt")
"""Files by which a checkpoint is known, also one that has lost some of its files; the last three are orbax's."""
_CHUNK_BYTES = 1 << 22
_CHECK = "check the last checkpoint"


class CheckpointError(ValueError):
    """A checkpoint is damaged, or does not fit the function that is to go on from it."""


class IncompatibleError(CheckpointError):
    """A checkpoint is whole, but of another version."""


@dataclass(frozen=True)
class SavedArray:
    """An array of a saved state.

    Attributes:
      path: its place in the state.
      shape, dtype: of the whole array; the dtype of random keys is written as `key<fry>`.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"`{self.path}` of {self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint.

    Attributes:
      folder: where it is.
      num_steps: that the training had made.
      arrays: of the state, in order.
      data: what the user saved beside the state, JSON values.
    """

    folder: str
    num_steps: int
    arrays: tuple[SavedArray, ...]
    data: Any

    def plan(self) -> Plan:
        """Reads the plan that the training ran with."""
        return load(os.path.join(self.folder, PLAN), Plan)


def step_folder(directory: str, num_steps: int) -> str:
    """Returns the folder of a checkpoint."""
    return os.path.join(directory, f"{num_steps:08d}")


def saved_steps(directory: str) -> list[int]:
    """Returns the numbers of steps of all checkpoints that were finished, damaged ones included, ascending.

    A folder with nothing of a checkpoint in it, whatever its name is, such as a date, is the user's.
    """
    if not os.path.isdir(directory):
        return []
    names = (name for name in os.listdir(directory) if _STEP.fullmatch(name))
    return sorted(int(name) for name in names if is_checkpoint(os.path.join(directory, name)))


def is_checkpoint(folder: str) -> bool:
    """Tells whether a folder has, or has had, a checkpoint."""
    return any(os.path.exists(os.path.join(folder, name)) for name in _MARKS)


def write_manifest(folder: str, plan: PlanData, num_steps: int, arrays: Sequence[SavedArray], data: Any) -> None:
    """Finishes a checkpoint whose arrays are written: adds the plan and, last, the manifest."""
    save(plan, os.path.join(folder, PLAN))
    files = {name: _size_and_checksum(os.path.join(folder, name)) for name in _files_in(folder)}
    document = {
        "format": FORMAT,
        "version": VERSION,
        "num_steps": num_steps,
        "arrays": [asdict(array) for array in arrays],
        "data": data,
        "files": files,
    }
    write_whole(os.path.join(folder, MANIFEST), json.dumps({"checksum": _checksum_of(document), **document}))


def read_manifest(folder: str) -> tuple[Checkpoint, dict[str, tuple[int, int]]]:
    """Reads what a checkpoint is, and size and checksum of each of its files.

    Raises:
      CheckpointError: the manifest is missing or damaged, or a newer version of diffshard wrote it.
    """
    path = os.path.join(folder, MANIFEST)
    try:
        with open(path, encoding="utf-8") as file:
            document = json.load(file)
        checksum = document.pop("checksum")
        if checksum != _checksum_of(document):
            raise ValueError("its checksum is wrong")
    except FileNotFoundError:
        raise CheckpointError(f"`{folder}` has no {MANIFEST}: diffshard did not write it, or not to the end") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"`{path}` is damaged: {error}") from None
    if document["format"] != FORMAT or document["version"] != VERSION:
        raise IncompatibleError(
            f"`{folder}` is a {document['format']} of version {document['version']}; this diffshard reads version "
            f"{VERSION} of a {FORMAT}. Update diffshard, or train on with the version that wrote it."
        )
    arrays = tuple(SavedArray(a["path"], tuple(a["shape"]), a["dtype"]) for a in document["arrays"])
    files = {name: (size, checksum) for name, (size, checksum) in document["files"].items()}
    return Checkpoint(folder, document["num_steps"], arrays, document["data"]), files


def damage_of(folder: str, files: Mapping[str, tuple[int, int]]) -> str | None:
    """Returns what is wrong with the files of a checkpoint; None if nothing is.

    Args:
      folder: of the checkpoint.
      files: size and checksum of each file, from its manifest.
    """
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


def last_whole_checkpoint(directory: str, processes: Processes) -> tuple[Checkpoint | None, dict[int, str]]:
    """Reads the last whole checkpoint of a directory, and changes nothing there.

    The first process reads what there is, and the files whose checksums are compared are divided among all: so it takes
    a part of the time, and every process has read from the directory before it trusts it.

    Args:
      directory: that all processes see.
      processes: that call this together.

    Returns:
      The checkpoint, None if there are none; and what is wrong with newer ones that are damaged, by number of steps.
      The same in all processes.

    Raises:
      CheckpointError: there are checkpoints, but none is whole; or the last whole one is of a newer version.
      OSError: the directory cannot be read.
      ProcessesError: a process does not see the checkpoint, or reads other bytes than the first one.
    """
    damages: dict[int, str] = {}
    for num_steps in reversed(processes.shared(_CHECK, partial(saved_steps, directory))):
        found = processes.shared(_CHECK, partial(_manifest_or_damage, step_folder(directory, num_steps)))
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


def divided(files: Mapping[str, tuple[int, int]], count: int) -> list[dict[str, tuple[int, int]]]:
    """Divides files into parts of about equal size: the largest first, each to the part that has least.

    Args:
      files: size and checksum of each.
      count: of parts.
    """
    parts: list[dict[str, tuple[int, int]]] = [{} for _ in range(count)]
    sizes = [0] * count
    for name in sorted(files, key=lambda name: (-files[name][0], name)):
        least = sizes.index(min(sizes))
        parts[least][name] = files[name]
        sizes[least] += files[name][0]
    return parts


def _damage_seen_by_all(folder: str, files: Mapping[str, tuple[int, int]], processes: Processes) -> str | None:
    """Returns what is wrong with the files of a checkpoint, of which each process reads a part; None if nothing is.

    Raises:
      ProcessesError: a process does not see the folder, or finds wrong what the first one reads without a fault.
    """
    processes.check_alike(_CHECK, {f"whether there is a folder `{folder}`": str(os.path.isdir(folder))})
    parts, first = divided(files, len(processes.indices)), processes.indices[0]
    damages = processes.gathered(_CHECK, lambda: damage_of(folder, parts[processes.place]))
    for process, part, damage in zip(processes.indices, parts, damages, strict=True):
        if damage is None:
            continue
        in_first = damage if process == first else processes.shared(_CHECK, partial(damage_of, folder, part))
        if in_first is not None:
            return in_first
        raise ProcessesError(
            f"Process {process} finds that {damage}, but process {first} finds that file whole. The machine of process "
            f"{process} reads wrong bytes or an old state of the directory; the checkpoint is left as it is."
        )
    return None


def _manifest_or_damage(folder: str) -> tuple[Checkpoint, dict[str, tuple[int, int]]] | str:
    """Returns what `read_manifest` does, or what is wrong with the manifest.

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


def _files_in(folder: str) -> list[str]:
    """Returns the paths of all files in a folder that no one changes any more, relative to it."""
    paths = []
    for parent, _, names in os.walk(folder):
        paths += [os.path.relpath(os.path.join(parent, name), folder) for name in names]
    return sorted(path for path in paths if path != _CHANGED_LATER)


def _size_and_checksum(path: str) -> tuple[int, int]:
    size, checksum = 0, 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            size, checksum = size + len(chunk), zlib.crc32(chunk, checksum)
    return size, checksum


def _checksum_of(document: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(document, sort_keys=True).encode())

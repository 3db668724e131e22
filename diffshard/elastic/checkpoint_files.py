"""What a folder of checkpoints holds, and which of them is the last whole one.

Orbax writes a checkpoint into a temporary folder and renames it when everything is there, so that an interrupted save
leaves no folder with a checkpoint's name. It does not notice everything that may happen to the files afterwards, and so
every checkpoint has a manifest (`manifests.py`).
"""

import os
import re
import secrets
import shutil
from functools import partial

from diffshard.base import ProcessesError
from diffshard.elastic.manifests import (
    CHANGED_LATER,
    MANIFEST,
    Checkpoint,
    CheckpointError,
    Files,
    IncompatibleError,
    damage_of,
    read_manifest,
    step_folder,
)
from diffshard.processes import Processes

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
    """Returns what is wrong with the files of a checkpoint, of which each process reads a part; None if nothing is."""
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

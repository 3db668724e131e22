"""Files that are written whole: a temporary file beside the old one takes its place, which no reader sees half done."""

import os
import secrets
import stat
from typing import Any


def folder_path(argument: str, folder: Any) -> str:
    """Returns the absolute path of a folder that the user gives.

    Args:
      argument: its name, for errors.
      folder: the path.

    Raises:
      TypeError: it is not a path.
      ValueError: it is empty, as a variable that was not set.
    """
    if not isinstance(folder, str | os.PathLike):
        raise TypeError(f"`{argument}` must be the path of a folder, not {folder!r}.")
    path = os.fspath(folder)
    if not path:
        raise ValueError(f"`{argument}` is empty. Give the path of a folder, '.' for the one that the program runs in.")
    return os.path.abspath(path)


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Writes a file so that a reader finds the old one or the new one, never a part of one. Text is written as UTF-8.

    A path that exists and is not a plain file, such as a pipe or `/dev/stdout`, is written to and not replaced. What a
    symbolic link points to is replaced, not the link, and a file that exists keeps its permissions.

    Raises:
      OSError: the file cannot be written; an old one is unchanged, and no temporary file stays behind.
    """
    raw = content.encode() if isinstance(content, str) else content
    if os.path.exists(path) and not os.path.isfile(path):
        with open(path, "wb") as file:
            file.write(raw)
        return
    target = os.path.realpath(path)
    folder = os.path.dirname(target)
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"`{os.fspath(path)}` cannot be written: there is no folder {folder!r}.")
    temporary = os.path.join(folder, f".{secrets.token_hex(8)}.part")
    try:
        # Files of `tempfile` can be read by their owner only; this one gets the mode that any new file gets.
        with open(temporary, "xb") as file:
            file.write(raw)
        if os.path.exists(target):
            os.chmod(temporary, stat.S_IMODE(os.stat(target).st_mode))
        os.replace(temporary, target)
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise

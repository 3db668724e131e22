"""Files that are written whole: a temporary file beside the old one takes its place, which no reader sees half done."""

import contextlib
import os
import secrets
import stat
from typing import Any


def folder_path(argument: str, folder: Any) -> str:
    """Returns the absolute path of a folder that the user gives."""
    if not isinstance(folder, str | os.PathLike):
        raise TypeError(f"`{argument}` must be the path of a folder, not {folder!r}.")
    path = os.fspath(folder)
    if not path:
        raise ValueError(f"`{argument}` is empty. Give the path of a folder, '.' for the one that the program runs in.")
    return os.path.abspath(path)


def checked_path(path: Any) -> str:
    """Returns the path of a file as text."""
    if not isinstance(path, str | os.PathLike) or not isinstance(text := os.fspath(path), str):
        raise TypeError(f"`path` must be the path of a file, such as 'plan.json', not {path!r}.")
    return text


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Writes a file so that a reader finds the old one or the new one, never a part of one. Text is written as UTF-8.

    A path that exists and is not a plain file, such as a pipe or `/dev/stdout`, is written to and not replaced. What a
    symbolic link points to is replaced, not the link, and a file that exists keeps its permissions.

    Raises:
      OSError: the file cannot be written; an old one is unchanged, and no temporary file stays behind.
    """
    if os.path.isdir(path):
        raise IsADirectoryError(f"`{os.fspath(path)}` cannot be written: it is a folder. Give the path of a file.")
    if os.path.exists(path) and not os.path.isfile(path):
        with open(path, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        return
    target = os.path.realpath(path)
    if not os.path.isdir(folder := os.path.dirname(target)):
        raise FileNotFoundError(f"`{os.fspath(path)}` cannot be written: there is no folder {folder!r}.")
    replace_file(target, content)


def replace_file(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Writes a file as `write_whole` does, but replaces whatever has its name, also a symbolic link or a pipe.

    It is for files in folders that others may write to, which nobody named: a link there would lead to any file.
    """
    raw = content.encode() if isinstance(content, str) else content
    temporary = os.path.join(os.path.dirname(path), f".{secrets.token_hex(8)}.part")
    try:
        # Files of `tempfile` can be read by their owner only; this one gets the mode that any new file gets. It must
        # not be there yet, so that a link which somebody has put in its place is an error.
        with open(temporary, "xb") as file:
            file.write(raw)
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISREG(mode := os.lstat(path).st_mode):
                os.chmod(temporary, stat.S_IMODE(mode))
        os.replace(temporary, path)
    except FileExistsError:  # which is not ours to remove
        raise
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise

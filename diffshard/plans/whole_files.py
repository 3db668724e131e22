"""Files that are replaced whole or not at all."""

import os
import secrets


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Writes a file so that a reader finds the old one or the new one, never a part; text as UTF-8.

    What is there and is no plain file (a pipe, `/dev/stdout`) is written to instead: replacing would lose it.

    Raises:
      OSError: it cannot be written; what was there is as it was, and nothing is left beside it.
    """
    raw = content.encode() if isinstance(content, str) else content
    if os.path.exists(path) and not os.path.isfile(path):
        with open(path, "wb") as file:
            file.write(raw)
        return
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"`{os.fspath(path)}` cannot be written: there is no folder {folder!r}.")
    temporary = os.path.join(folder, f".{secrets.token_hex(8)}.part")
    try:
        # Not `tempfile`, whose files are for the owner's eyes only: this one gets the mode that any new file gets.
        with open(temporary, "xb") as file:
            file.write(raw)
        os.replace(temporary, path)
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise

"""How Python is started again: with the modules that this process imports, and nothing that merely lies about.

Python by itself imports from the working directory, or from the folder of the script, before its own library: a file
`json.py` there would run.
"""

import os
import sys
import sysconfig
from pathlib import Path


def python_command(*words: str) -> list[str]:
    """Returns the command that runs Python with these words, such as `-m` and a module."""
    return [sys.executable, "-P", *words]


def python_environment() -> dict[str, str]:
    """Returns the environment in which `python_command` finds the modules that this process finds, in the same order.

    But Python's own library comes first, and of what a prompt finds in the working directory only this package counts.
    """
    own = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
    own |= {os.path.join(folder, "lib-dynload") for folder in own}
    package = str(Path(__file__).resolve().parents[1])
    paths = sys.path if package in sys.path else [package, *sys.path]
    paths = sorted(filter(None, paths), key=lambda path: path not in own)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}

"""Runs Python programs in new processes that have imported JAX and diffshard already.

To import them takes two processor seconds, more than most programs of tests need for all else. So one process of each
test runner imports them, starts no backend, and is forked for each program, which then has its own environment, folder,
files of output and exit status as if it had been started from a shell.
"""

import atexit
import importlib
import multiprocessing
import os
import runpy
import sys
import threading
import warnings
from collections.abc import Mapping
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path

from diffshard import endings

ROOT = Path(__file__).resolve().parents[1]
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.warm_imports"])


def start_program(
    program: Path, *, folder: Path, environment: Mapping[str, str], stdout: Path, stderr: Path
) -> BaseProcess:
    """Starts a program like `python program`, and returns its process, which has `join`, `kill` and `exitcode`.

    Args:
      program: a file of Python.
      folder: where it runs.
      environment: all its variables. Those of JAX, whose names begin with JAX_, have to be those of this process: they
        were read when JAX was imported.
      stdout, stderr: files that its output is written to.

    Raises:
      ValueError: variables of JAX differ.
    """
    changed = sorted(name for name in {*os.environ, *environment} if _differs(name, environment))
    if changed:
        raise ValueError(f"`environment` changes {', '.join(changed)}: start such a program with `subprocess`.")
    _start_server()
    arguments = str(program), str(folder), dict(environment), str(stdout), str(stderr)
    process = _CONTEXT.Process(target=_run, args=arguments)
    process.start()
    return process


def _differs(name: str, environment: Mapping[str, str]) -> bool:
    return name.startswith("JAX_") and os.environ.get(name) != environment.get(name)


def _start_server() -> None:
    """Starts the process that others are forked from, if it does not run yet; it finds the packages of this checkout."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(ROOT)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before


def _run(program: str, folder: str, environment: dict[str, str], stdout: str, stderr: str) -> None:
    """Runs a program as `python program` would, to the end of its threads and of what it does at exit."""
    for descriptor, path in ((1, stdout), (2, stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv, sys.path[:] = [program], [str(Path(program).parent), str(ROOT), *sys.path]
    if "PYTHONWARNINGS" in environment:
        warnings.simplefilter(environment["PYTHONWARNINGS"])  # type: ignore[arg-type]
    importlib.reload(endings)  # its note at the end is of the process that has imported it
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit:
        raise
    except BaseException as error:
        sys.last_value = error
        sys.excepthook(*sys.exc_info())
        raise SystemExit(1) from None
    finally:
        sys.stdout.flush()
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()

"""Runs Python programs in new processes that have imported JAX and diffshard already.

To import them takes two processor seconds, more than most programs of tests need for all else. So two processes of each
test runner import them, start no backend, and are forked for each program, which then has its own environment, folder,
files of output and exit status as if it had been started from a shell. They are two because the processes of a job have
to agree although each has another seed of hashes, and those forked from one process have the same.
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

from diffshard import exit_notices

ROOT = Path(__file__).resolve().parents[1]
_CONTEXT = multiprocessing.get_context("forkserver")
_SERVERS = forkserver.ForkServer(), forkserver.ForkServer()


def start_program(
    program: Path, *, folder: Path, environment: Mapping[str, str], stdout: Path, stderr: Path, number: int = 0
) -> BaseProcess:
    """Starts a program like `python program`, and returns its process, which has `join`, `kill` and `exitcode`.

    Args:
      program: a file of Python.
      folder: where it runs.
      environment: all its variables. Those of JAX, whose names begin with JAX_, have to be those of this process: they
        were read when JAX was imported.
      stdout: a file for its output.
      stderr: a file for its errors.
      number: of the process in its job; even and odd ones have different seeds of hashes.

    Raises:
      ValueError: variables of JAX differ.
    """
    changed = sorted(name for name in {*os.environ, *environment} if _differs(name, environment))
    if changed:
        raise ValueError(f"`environment` changes {', '.join(changed)}: start such a program with `subprocess`.")
    arguments = str(program), str(folder), dict(environment), str(stdout), str(stderr)
    process = _CONTEXT.Process(target=_run, args=arguments)
    server = _running_server(number % len(_SERVERS))
    usual = forkserver.connect_to_new_process
    forkserver.connect_to_new_process = server.connect_to_new_process
    try:
        process.start()
    finally:
        forkserver.connect_to_new_process = usual
    return process


def _differs(name: str, environment: Mapping[str, str]) -> bool:
    return name.startswith("JAX_") and os.environ.get(name) != environment.get(name)


def _running_server(index: int) -> forkserver.ForkServer:
    """Returns a process that others are forked from; starts it at first, with the packages of this checkout."""
    server, before = _SERVERS[index], os.environ.get("PYTHONPATH")
    server.set_forkserver_preload(["tests.warm_imports"])
    os.environ["PYTHONPATH"] = str(ROOT)
    try:
        server.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before
    return server


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
    importlib.reload(exit_notices)  # its note at the end is of the process that has imported it
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit:
        raise
    except BaseException as error:
        sys.last_value = error  # as Python does where nobody has caught it
        sys.excepthook(type(error), error, error.__traceback__)
        raise SystemExit(1) from None
    finally:
        sys.stdout.flush()
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()

"""One job at a time writes to a directory of checkpoints: it has a file there that says who it is, and touches it.

A job that is killed leaves its file. A later job on the same machine sees that its process is gone. One on another
machine watches the file for a while: a file that is not touched has no owner any more. No clocks are compared, because
those of two machines may differ. Whoever is taken over although it lives, such as a process that was stopped for
minutes, notices that at its next save, because the file is another one then.
"""

import gc
import json
import os
import secrets
import socket
import threading
import time
import warnings
import weakref
from dataclasses import asdict, dataclass

from cost.real_numbers import Index
from diffshard.base import printable
from diffshard.elastic.checkpoint_files import CheckpointError
from diffshard.files import replace_file
from diffshard.plans.documents import DAMAGE
from diffshard.plans.json_values import from_json_values

OWNER = "diffshard-owner.json"
"""The name of the file."""
TOUCH_S = 3.0
"""Seconds between two touches of the file: nothing for a file system, whatever else it does."""
PATIENCE_S = 15.0
"""Seconds without a touch after which an owner on another machine is gone: several touches that did not come."""
_LOOK_S = 0.5
_HELD: "weakref.WeakValueDictionary[str, Ownership]" = weakref.WeakValueDictionary()
"""What this process has taken and not given back, by its token."""


class InUseError(CheckpointError):
    """Another job writes to a directory of checkpoints."""


@dataclass(frozen=True)
class Owner:
    """A process that writes to a directory.

    Attributes:
      token: random, and different for each time that a directory is taken.
      machine: tells machines and containers apart, whose names and numbers of processes may be equal; "" if unknown.
      start: when it started, in the machine's own count; tells it from a later process of the same number.
      since: when it took the directory, for people.
    """

    token: str
    host: str
    machine: str
    pid: Index
    start: str
    since: str

    def __str__(self) -> str:
        host, since = self.host or "an unknown machine", self.since or "an unknown time"
        return printable(f"process {self.pid} on {host}, since {since}")

    @property
    def process(self) -> tuple[str, int, str]:
        """A key that is equal for two owners that are the same process."""
        return self.machine, self.pid, self.start


class Ownership:
    """A directory that this process has taken. It is given back by `release`, and at the latest when the process ends.

    Raises:
      InUseError: another job writes there, or another training of this process; the error says which.
      OSError: the directory cannot be written to.
    """

    def __init__(self, directory: str):
        path = os.path.join(directory, OWNER)
        own, before = _this_process(), _owner_in(path)
        if before is not None and before.token in _HELD and before.process == own.process:
            gc.collect()  # a training that is used no more may wait for it
            if before.token in _HELD:
                raise InUseError(
                    f"`directory` {directory!r} is written to by another training of this process, since "
                    f"{before.since}. Close that one first, by `close()` or at the end of its `with`."
                )
            before = None
        if before is not None and before.process != own.process and _is_alive(before, own, path):
            raise InUseError(
                f"`directory` {directory!r} is written to by another job: {before}. Two jobs in one directory remove "
                f"each other's checkpoints: end that one, or give another directory. If the directory is a copy, "
                f"remove `{path}`."
            )
        replace_file(path, json.dumps(asdict(own)))
        self._directory, self._path, self._token = directory, path, own.token
        _HELD[own.token] = self
        self._has_ended = threading.Event()
        self._release = weakref.finalize(self, _give_back, path, own.token, os.getpid(), self._has_ended)
        threading.Thread(target=_touch, args=(path, own.token, self._has_ended), daemon=True).start()

    @property
    def is_lost(self) -> bool:
        """Whether another job has taken the directory meanwhile."""
        return not _has_token(self._path, self._token)

    def check(self) -> None:
        """Checks that the directory is still this process's."""
        if self.is_lost:
            other = _owner_in(self._path)
            who = "and nobody has it now" if other is None else f"by {other}"
            raise InUseError(
                f"`directory` {self._directory!r} was taken from this job, {who}. Nothing more is saved there, because "
                "two jobs in one directory remove each other's checkpoints."
            )

    def release(self) -> None:
        """Gives the directory back; if another job has taken it, it is left to that."""
        self._release()
        _HELD.pop(self._token, None)


def _this_process() -> Owner:
    pid = os.getpid()
    since = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    return Owner(secrets.token_hex(8), socket.gethostname(), _machine(), pid, _start_of(pid), since)


def _machine() -> str:
    """Returns a text for the running system and the space of its process numbers; "" where neither is known."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
            return f"{socket.gethostname()} {file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_of(pid: int) -> str:
    """Returns when a process of this machine started; "" if there is none of this number."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            state, *numbers = file.read().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else numbers[18]  # a process that has ended may wait for its parent


def _owner_in(path: str) -> Owner | None:
    """Returns who has a directory; None if nobody has. Of a file that is half written nothing is known."""
    try:
        with open(path, encoding="utf-8") as file:
            return from_json_values(Owner, json.load(file))
    except FileNotFoundError:
        return None
    except DAMAGE:
        return Owner("", "", "", 0, "", "")


def _has_token(path: str, token: str) -> bool:
    owner = _owner_in(path)
    return owner is not None and owner.token == token


def _is_alive(owner: Owner, own: Owner, path: str) -> bool:
    """Returns whether the owner of a directory still runs; for another machine that takes at most `PATIENCE_S`."""
    if owner.machine and owner.machine == own.machine:
        return bool(owner.start) and _start_of(owner.pid) == owner.start
    touched = _touched_at(path)
    warnings.warn(
        f"`{path}` was left by {owner}. Whether that still runs cannot be seen from here: waiting up to "
        f"{PATIENCE_S:.0f} s for it to touch the file.",
        stacklevel=2,
    )
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        time.sleep(_LOOK_S)
        if _touched_at(path) != touched:
            return _owner_in(path) is not None
    return False


def _touched_at(path: str) -> int | None:
    try:
        with open(path, "rb") as file:  # network file systems ask the server when a file is opened
            return os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None


def _touch(path: str, token: str, has_ended: threading.Event) -> None:
    """Touches an owner's file until it has ended, or has lost the directory."""
    while not has_ended.wait(TOUCH_S):
        try:
            if not _has_token(path, token):
                return
            os.utime(path, follow_symlinks=False)
        except OSError:  # a server may be away for a moment
            continue


def _give_back(path: str, token: str, process_id: int, has_ended: threading.Event) -> None:
    if os.getpid() != process_id:  # a forked child is not the owner
        return
    has_ended.set()
    try:
        if _has_token(path, token):
            os.unlink(path)
    except OSError:  # the directory may be gone
        return

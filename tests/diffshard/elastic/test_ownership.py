"""Of two jobs in one directory the second one is refused, and a job that was killed is in nobody's way."""

import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from diffshard.elastic import ownership
from diffshard.elastic.ownership import OWNER, InUseError, Ownership
from tests.diffshard.elastic.small_training import resumed

_HOLD = """
    import sys, time
    from diffshard.elastic.ownership import Ownership

    ownership = Ownership(sys.argv[1])
    print("taken", flush=True)
    time.sleep(600)
"""


def write_owner(directory: Path, **changes: object) -> Path:
    """Writes the file of an owner on another machine."""
    owner = {"token": "a", "host": "elsewhere", "machine": "other", "pid": 7, "start": "1", "since": "noon", **changes}
    (directory / OWNER).write_text(json.dumps(owner))
    return directory / OWNER


def test_a_job_that_lives_keeps_its_directory_and_one_that_was_killed_does_not(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", textwrap.dedent(_HOLD), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "taken\n"
        with pytest.raises(InUseError, match=f"written to by another job: process {process.pid} on .*, since 2"):
            resumed(tmp_path)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # leaves it to be waited for by its parent
        with resumed(tmp_path) as training:
            training.save(1, training.restore())
    assert [path.name for path in tmp_path.iterdir()] == ["00000001"]


def test_a_later_process_of_the_same_number_is_not_the_owner(tmp_path):
    own = ownership._this_process()
    write_owner(tmp_path, machine=own.machine, pid=os.getppid(), start="1")
    Ownership(str(tmp_path)).release()
    write_owner(tmp_path, machine=own.machine, pid=os.getppid(), start=ownership._start_of(os.getppid()))
    with pytest.raises(InUseError):
        Ownership(str(tmp_path))


_UNREADABLE = ["", '{"token": ', "[" * 100_000, "null", '{"token": "a"}', '{"pid": "7"}', "1" * 10_000]


@pytest.mark.parametrize("content", _UNREADABLE)
def test_a_file_that_cannot_be_read_is_of_an_unknown_owner(tmp_path, content):
    (tmp_path / OWNER).write_text(content)
    assert str(ownership._owner_in(str(tmp_path / OWNER))) == "process 0 on an unknown machine, since an unknown time"


def test_names_of_an_owner_are_safe_to_print(tmp_path):
    path = write_owner(tmp_path, host="\x1b[31mred", since="\x07")
    assert str(ownership._owner_in(str(path))) == r"process 7 on \x1b[31mred, since \x07"


def test_a_link_in_the_place_of_the_file_is_replaced_and_what_it_leads_to_is_left_alone(tmp_path, monkeypatch):
    (tmp_path / "thesis").write_text("all of it")
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / OWNER).symlink_to(tmp_path / "thesis")
    monkeypatch.setattr(ownership, "PATIENCE_S", 0.0)
    with pytest.warns(UserWarning, match="was left by"):
        owner = Ownership(str(tmp_path / "job"))
    assert not (tmp_path / "job" / OWNER).is_symlink()
    assert (tmp_path / "thesis").read_text() == "all of it"
    owner.release()
    assert not list((tmp_path / "job").iterdir())


@pytest.mark.parametrize("content", [None, "", '{"token": '])
def test_an_owner_that_cannot_be_seen_counts_while_it_touches_its_file(tmp_path, monkeypatch, content):
    monkeypatch.setattr(ownership, "PATIENCE_S", 2.0)
    path = write_owner(tmp_path)
    if content is not None:
        path.write_text(content)
    has_ended = threading.Event()

    def touch() -> None:
        while not has_ended.wait(0.1):
            os.utime(path)

    thread = threading.Thread(target=touch)
    thread.start()
    with pytest.warns(UserWarning, match="waiting up to 2 s"), pytest.raises(InUseError):
        Ownership(str(tmp_path))
    has_ended.set()
    thread.join()
    with pytest.warns(UserWarning, match="waiting up to 2 s"):
        Ownership(str(tmp_path)).release()
    assert not path.exists()


def test_an_owner_touches_its_file_until_it_gives_the_directory_back(tmp_path, monkeypatch):
    monkeypatch.setattr(ownership, "TOUCH_S", 0.01)
    owner = Ownership(str(tmp_path))
    path = tmp_path / OWNER
    os.utime(path, (1, 1))
    end = time.monotonic() + 20
    while path.stat().st_mtime == 1 and time.monotonic() < end:
        time.sleep(0.01)
    assert path.stat().st_mtime > 1
    del owner  # as at the end of a process that does not close its training
    assert not path.exists()


def test_who_was_taken_over_saves_nothing_more(tmp_path):
    with resumed(tmp_path) as first:
        state = first.restore()
        first.save(1, state)
        write_owner(tmp_path)
        with pytest.raises(InUseError, match="was taken from this job, by process 7 on elsewhere"):
            first.save(2, state)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000001", OWNER]  # which is the other one's


def test_a_second_training_of_the_same_process_waits_for_the_first_to_be_closed_or_dropped(tmp_path):
    with resumed(tmp_path) as first:
        with pytest.raises(InUseError, match=r"by another training of this process, since 2.* Close that one first"):
            resumed(tmp_path)
        assert first.save(1, first.restore())
    dropped = resumed(tmp_path)
    assert dropped.num_steps == 1
    itself = [dropped]
    itself.append(itself)  # pyright: ignore[reportArgumentType]  # a cycle, which waits for the garbage collector
    del dropped, itself
    with resumed(tmp_path) as last:
        assert last.save(2, last.restore())

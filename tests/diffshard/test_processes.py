"""Processes agree or fail together; their program is one script, so that they start once."""

import signal
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh

from diffshard.processes import Processes, processes_of
from diffshard.rendezvous import differences
from tests.processes import run_processes

_AGREE = """
from diffshard.base import InfeasibleError, ProcessesError
from diffshard.processes import Processes, all_processes, errors_for_all

everyone = all_processes()


def tell(act):
    try:
        print(repr(act()))
    except Exception as error:
        print(f"{type(error).__name__}: {error}")


def fail_to_search():
    raise InfeasibleError("no plan fits")


def fail_to_trace():
    if process == 1:
        raise TypeError("no such argument")
    return process


class Private(Exception):
    def __init__(self, first, second):
        super().__init__(first)


def fail_in(failing):
    with errors_for_all(None, "search"):
        if process == failing:
            raise ValueError("no such hardware")
        return everyone.alike("search", lambda: process, lambda made: {})


def fail_after_an_exchange():
    with errors_for_all(None, "search"):
        everyone.shared("search", fail_to_search)


def fail_privately():
    raise Private("hidden", 2)


tell(lambda: everyone.check_alike("search", {"`a`": "1"}))
tell(lambda: everyone.check_alike("search", {"`a`": "1", "`b`": str(process)}))
tell(lambda: everyone.check_alike(f"search {process}", {}))
tell(lambda: everyone.alike("trace", fail_to_trace, lambda made: {}))
tell(lambda: everyone.shared("search", lambda: process + 10))
tell(lambda: len(everyone.shared("make bytes", lambda: b"x" * 5_000_000, pack=bytes, unpack=bytes)))
tell(lambda: everyone.shared("search", fail_to_search))
tell(lambda: everyone.shared("search", fail_privately))
tell(lambda: fail_in(1))
tell(lambda: fail_in(0))
tell(lambda: fail_in(process))  # each on its own, so that nobody waits
tell(fail_after_an_exchange)
tell(lambda: everyone.gathered("count", lambda: [process, 2 * process]))
tell(lambda: everyone.gathered("trace", fail_to_trace))
tell(lambda: Processes((process,)).shared("search", lambda: process))
if process > 0:  # two of three agree without the first one
    tell(lambda: Processes((1, 2)).shared("search", lambda: process + 20))
tell(lambda: everyone.check_alike("end", {}))

import time

from diffshard import rendezvous

rendezvous.ARRIVAL_LIMIT_S = 2.0
time.sleep(5.0 if process == 2 else 0.0)
tell(lambda: everyone.check_alike("meet", {}))
rendezvous.ARRIVAL_LIMIT_S = 600.0
if process == 2:
    raise KeyError("gone")
tell(lambda: everyone.check_alike("part", {}))
"""


def test_processes_agree_or_fail_together(tmp_path: Path):
    processes = run_processes(_AGREE, 3, tmp_path, devices_each=1, check=False)
    assert [(i, process.stderr) for i, process in enumerate(processes[:2]) if process.status] == []
    outputs = [process.stdout.splitlines() for process in processes]
    alike = [
        "None",
        "ProcessesError: The processes cannot search: `b` is 0 in process 0 and 1 in process 1",
    ]
    late = "ProcessesError: The processes cannot meet: process 2 did not come within 2 s"
    gone = "ProcessesError: The processes cannot part: process 2 has ended with KeyError: 'gone'"
    for process, lines in enumerate(outputs):
        assert lines[:2] == alike
        assert lines[2].endswith("one is about to search 0 in process 0 and search 1 in process 1")
        failed = "ProcessesError: The processes cannot trace: process 1 failed with TypeError: no such argument"
        assert lines[3] == ("TypeError: no such argument" if process == 1 else failed)
        assert lines[4:7] == ["10", "5000000", "InfeasibleError: no plan fits"]
        assert lines[7] == (
            "Private: hidden" if process == 0 else "ProcessesError: Process 0 failed with Private: hidden"
        )
        for failing, line in zip((1, 0, process), lines[8:11], strict=True):
            of_other = f"ProcessesError: The processes cannot search: process {failing} failed with ValueError"
            assert line == f"{'ValueError' if process == failing else of_other}: no such hardware"
        assert lines[11:13] == ["InfeasibleError: no plan fits", "[[0, 0], [1, 2], [2, 4]]"]
        assert lines[13:15] == [lines[3] if process == 1 else f"{lines[3]}.", str(process)]
        assert lines[15:17] == ["None", late] if process == 0 else ["21", "None"]
        assert lines[-1] == (late if process == 2 else gone)


_KILLED = """
import signal
import time

from diffshard import rendezvous
from diffshard.processes import Processes, all_processes

rendezvous.PULSE_S, rendezvous.SILENCE_S = 0.2, 3.0
all_processes().check_alike("begin", {})
if process == 2:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    all_processes().check_alike("go on", {})
except Exception as error:
    print(f"{type(error).__name__}: {error}", flush=True)
Processes((0, 1)).check_alike("end", {})
time.sleep(1.0 if process == 0 else 0.0)  # the first one has the service
os._exit(0)  # JAX's own end would wait for the process that was killed
"""


def test_the_others_are_told_of_a_process_that_was_killed(tmp_path: Path):
    *others, killed = run_processes(_KILLED, 3, tmp_path, devices_each=1, check=False)
    assert killed.status == -signal.SIGKILL
    lost = "process 2 has been killed or stands still, as it gave no sign of life for 3 s"
    for process in others:
        assert process.stdout.splitlines() == [f"ProcessesError: The processes cannot go on: {lost}"], process.stderr


def test_a_mesh_without_devices_is_of_one_process():
    assert processes_of(AbstractMesh((2, 2), ("x", "y"))).is_one
    assert processes_of(None).is_first
    assert processes_of(jax.make_mesh((2, 4), ("x", "y"))) == Processes((0,))


class _Device:
    """A device of a host, of a client that either runs in this process or only compiles."""

    platform, device_kind = "cpu", "cpu"

    def __init__(self, number, client):
        self.id, self.process_index, self.client = number, number // 2, client


@pytest.mark.parametrize(("is_running", "indices"), [(True, (0, 1)), (False, (0,))])
def test_only_devices_of_a_running_backend_belong_to_processes(is_running, indices):
    client = jax.devices()[0].client if is_running else object()
    mesh = Mesh(np.array([_Device(number, client) for number in range(4)]), ("x",))
    assert processes_of(mesh) == Processes(indices)


def test_a_process_alone_makes_everything_itself():
    alone = Processes((0,))
    assert alone.is_one
    assert alone.shared("make", lambda: object) is object
    assert alone.alike("make", lambda: 3, lambda made: {}) == 3
    alone.check_alike("search", {"a": "b"})


def test_differences_name_the_fact_and_both_texts():
    own = {"`a`": "1", "`b`": "2", "the program": "x\ny\nz", "`gone`": "3"}
    theirs = {"`a`": "1", "`b`": "4", "the program": "x\nw"}
    assert differences(own, theirs, 0, 3) == [
        "`b` is 2 in process 0 and 4 in process 3",
        "the program is at line 2 y in process 0 and w in process 3",
        "`gone` is 3 in process 0 and missing in process 3",
    ]


def test_many_differences_are_counted():
    own, theirs = {f"`{i}`": "1" for i in range(8)}, {f"`{i}`": "2" for i in range(8)}
    *shown, last = differences(own, theirs, 0, 1)
    assert len(shown) == 5
    assert last == "and 3 more differ"


def test_long_texts_are_cut():
    (sentence,) = differences({"a": "x" * 1000}, {"a": "y" * 1000}, 0, 1)
    assert len(sentence) < 500

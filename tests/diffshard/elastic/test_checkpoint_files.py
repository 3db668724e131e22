"""Whatever happens to a save or to its files, the last checkpoint that is whole is found, and nothing else is."""

import ast
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import zlib
from pathlib import Path

import numpy as np
import pytest

from diffshard.elastic.checkpoint_files import CheckpointError, divided, last_whole_checkpoint, read_manifest
from diffshard.elastic.resume import take_over
from diffshard.processes import Processes
from tests.diffshard.elastic.small_training import resumed, train
from tests.processes import run_processes

ALONE = Processes((0,))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A directory with checkpoints of steps 1 and 2."""
    directory = tmp_path_factory.mktemp("trained")
    train(directory, 2)
    return directory


@pytest.fixture
def directory(trained, tmp_path):
    """A copy of it, to be damaged."""
    return shutil.copytree(trained, tmp_path / "copy")


def files_of(folder: Path) -> list[Path]:
    """Files that hold something of a checkpoint; orbax's notes of the time and the success are not needed."""
    notes = ("_CHECKPOINT_METADATA", "commit_success.txt")
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in notes)


def contents_of(directory: Path) -> dict[Path, bytes]:
    """Everything in a directory, by path."""
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def cut(raw: bytes) -> bytes:
    return raw[:-1]


def empty(raw: bytes) -> bytes:
    return b""


def with_a_flipped_bit(raw: bytes) -> bytes:
    return raw[: len(raw) // 2] + bytes([raw[len(raw) // 2] ^ 1]) + raw[len(raw) // 2 + 1 :]


@pytest.mark.parametrize("damage", [cut, empty, with_a_flipped_bit, None])
def test_damage_to_any_file_is_noticed_and_the_checkpoint_before_is_taken(directory, damage):
    folder = directory / "00000002"
    whole = directory.parent / "whole"
    shutil.copytree(folder, whole)
    for path in files_of(folder):
        name = path.relative_to(folder)
        if damage is None:
            path.unlink()
        else:
            path.write_bytes(damage(path.read_bytes()))
        with pytest.warns(UserWarning, match=r"00000002.*The training goes on from step 1\."):
            checkpoint = take_over(str(directory), ALONE)
        assert checkpoint is not None, name
        assert checkpoint.num_steps == 1, name
        assert not folder.exists()  # its number is free again
        shutil.copytree(whole, folder)
    checkpoint = take_over(str(directory), ALONE)
    assert checkpoint is not None
    assert checkpoint.num_steps == 2  # the copy is whole


@pytest.mark.parametrize("damage", [empty, None])
def test_notes_that_orbax_writes_about_a_save_are_not_needed(directory, damage):
    for name in ("_CHECKPOINT_METADATA", "commit_success.txt"):
        path = directory / "00000002" / name
        path.unlink() if damage is None else path.write_bytes(damage(path.read_bytes()))
    with resumed(directory) as training:
        assert training.num_steps == 2
        assert np.isfinite(training.restore()["params"]["up"]).all()


def test_a_save_that_stops_at_any_byte_leaves_no_checkpoint(directory):
    source, target = directory / "00000002", directory / "00000003.orbax-checkpoint-tmp"
    files = files_of(source)
    sizes = [path.stat().st_size for path in files]
    for stop in np.linspace(0, sum(sizes), 25).astype(int).tolist():
        left = stop
        for path, size in zip(files, sizes, strict=True):
            if left > 0:
                copy = target / path.relative_to(source)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(path.read_bytes()[:left])
            left -= size
        checkpoint = take_over(str(directory), ALONE)
        assert checkpoint is not None
        assert checkpoint.num_steps == 2
        assert not target.exists()


def test_reading_the_last_checkpoint_changes_nothing_in_the_directory(directory):
    unfinished = directory / "00000003.orbax-checkpoint-tmp"
    shutil.copytree(directory / "00000002", unfinished)  # as of a job that still writes
    path = files_of(directory / "00000002")[0]
    path.write_bytes(cut(path.read_bytes()))
    before = contents_of(directory)
    checkpoint, damages = last_whole_checkpoint(str(directory), ALONE)
    assert checkpoint is not None
    assert checkpoint.num_steps == 1
    assert list(damages) == [2]
    assert str(path) in damages[2]
    assert contents_of(directory) == before
    missing = directory / "missing"
    assert last_whole_checkpoint(str(missing), ALONE) == (None, {})
    assert not missing.exists()


def test_a_directory_that_cannot_be_taken_over_is_left_as_it_is(directory):
    for name in ("00000001", "00000002"):
        (directory / name / "checkpoint.json").unlink()
    shutil.copytree(directory / "00000002", directory / "00000003.orbax-checkpoint-tmp")
    before = contents_of(directory)
    with pytest.raises(CheckpointError, match="None of the checkpoints"):
        take_over(str(directory), ALONE)
    assert contents_of(directory) == before


def test_training_goes_on_after_damage_and_saves_the_same_step_again(directory):
    path = next(path for path in files_of(directory / "00000002") if "/d/" in str(path))
    path.write_bytes(cut(path.read_bytes()))
    with pytest.warns(UserWarning, match="goes on from step 1"):
        losses = train(directory, 3)
    assert list(losses) == [1, 2]
    assert resumed(directory).num_steps == 3
    damaged = [path.name for path in directory.iterdir() if "damaged" in path.name]
    assert len(damaged) == 1  # kept, for whoever wants to look


def test_without_any_whole_checkpoint_nothing_is_started_anew(directory):
    for name in ("00000001", "00000002"):
        (directory / name / "plan.json").unlink()
    with pytest.raises(CheckpointError, match=r"None of the checkpoints in .*00000002/plan.json.*00000001/plan.json"):
        resumed(directory)
    assert (directory / "00000002").exists()


def test_a_checkpoint_of_a_newer_version_is_not_taken_for_damaged(directory):
    with_manifest(directory, lambda document: {**document, "version": 99})
    with pytest.raises(CheckpointError, match=r"version 99; this diffshard reads version 1.*Update diffshard"):
        take_over(str(directory), ALONE)
    assert (directory / "00000002").exists()


@pytest.mark.parametrize("name", ["00000009", "100000009", "00000000"])
def test_a_checkpoint_under_the_name_of_another_step_is_refused_and_left_alone(directory, name):
    if name == "00000000":
        shutil.rmtree(directory / "00000001")
    (directory / "00000002").rename(directory / name)
    before = contents_of(directory)
    message = rf"{name}` is the checkpoint of step 2 under another name. Give it its own name back, `00000002`, or move"
    with pytest.raises(CheckpointError, match=message):
        take_over(str(directory), ALONE)
    assert contents_of(directory) == before


def test_manifests_that_say_what_cannot_be_are_damaged(directory):
    """Also with the right checksum, which anybody can compute."""
    whole = json.loads((directory / "00000002" / "checkpoint.json").read_text())
    del whole["checksum"]
    for key in whole:
        others = [
            {**whole, key: other} for other in (None, -1, 1.5, True, "zzz", [], {}, [1], {"a": 1}, {"../a": [1, 1]})
        ]
        for document in (*others, {k: v for k, v in whole.items() if k != key}):
            if ("data" in document and key == "data") or document.get("arrays") == []:
                continue  # data are the user's own, and without arrays it is a checkpoint of something else
            if document in (whole, {k: v for k, v in whole.items() if k != "residuals"}):
                continue  # there are no residuals, with the key or without
            with_manifest(directory, lambda _, document=document: document)
            with pytest.raises(CheckpointError):
                read_manifest(str(directory / "00000002"))
    for text in ("[" * 100_000, "null", "[]", "1" * 10_000, '{"checksum": 1}', "\xff"):
        (directory / "00000002" / "checkpoint.json").write_text(text, encoding="latin-1")
        with pytest.raises(CheckpointError, match=r"checkpoint.json` is damaged"):
            read_manifest(str(directory / "00000002"))


def with_manifest(directory: Path, change) -> None:
    """Changes the manifest of the newest checkpoint, and its checksum with it."""
    path = directory / "00000002" / "checkpoint.json"
    document = json.loads(path.read_text())
    document.pop("checksum", None)
    document = change(document)
    checksum = zlib.crc32(json.dumps(document, sort_keys=True).encode())
    path.write_text(json.dumps({"checksum": checksum, **document}))


_CHECK = """
from diffshard.elastic import checkpoint_files
from diffshard.processes import all_processes

directory, everyone = os.environ["CHECKPOINTS"], all_processes()
size_and_checksum, names = checkpoint_files._size_and_checksum, []


def recorded(path):
    names.append(os.path.relpath(path, directory))
    size, checksum = size_and_checksum(path)
    return size, checksum + (process == 1 and is_faulty and "/d/" in path)


def check():
    names.clear()
    try:
        checkpoint, damages = checkpoint_files.last_whole_checkpoint(directory, everyone)
        print(checkpoint.num_steps, sorted(damages), sorted(names), sep="; ")
    except Exception as error:
        print(f"{type(error).__name__}: {error}")


checkpoint_files._size_and_checksum, is_faulty = recorded, False
check()
is_faulty = True
check()
is_faulty = False
if process == 0:
    os.truncate(os.environ["DAMAGED"], 3)
everyone.check_alike("damage a file", {})
check()
"""


def test_processes_divide_the_files_and_one_that_reads_other_bytes_is_no_damage(directory, tmp_path):
    files = {path for path in files_of(directory / "00000002") if path.name != "checkpoint.json"}
    damaged = max(files, key=lambda path: path.stat().st_size)
    (tmp_path / "job").mkdir()
    environment = {"CHECKPOINTS": str(directory), "DAMAGED": str(damaged)}
    outputs = run_processes(_CHECK, 2, tmp_path / "job", devices_each=1, environment=environment)
    lines = [output.stdout.splitlines() for output in outputs]
    read = [set(ast.literal_eval(line.split("; ")[2])) for line in (lines[0][0], lines[1][0])]
    assert not read[0] & read[1]
    names = {str(path.relative_to(directory)) for path in files}
    assert names <= read[0] | read[1] <= names | {"00000002/commit_success.txt"}
    for process in lines:
        assert process[0].startswith("2; []; ")
        assert "Process 1 finds that" in process[1]
        assert "but process 0 finds that file whole" in process[1]
        assert process[2].startswith("1; [2]; ")


def test_files_are_divided_into_parts_of_about_equal_size():
    files = {name: (size, 0) for name, size in zip("abcdef", (5, 1, 4, 3, 0, 1), strict=True)}
    parts = divided(files, 3)
    assert max(sum(size for size, _ in part.values()) for part in parts) == 5
    assert {name: entry for part in parts for name, entry in part.items()} == files


_SAVING = """
    import sys, jax.numpy as jnp, diffshard
    from experiments.host_devices import host_mesh

    def step(state, batch):
        return {name: w + batch for name, w in state.items()}, batch

    def init():
        return {f"w{i}": jnp.zeros((256, 256)) for i in range(6)}

    training = diffshard.resume(
        sys.argv[1], step, host_mesh((8,)), init, jnp.ones(()), hardware="h100", progress="none", max_to_keep=1
    )
    state = training.restore()
    for w in state.values():
        assert (w == training.num_steps).all(), training.num_steps
    print("restored", training.num_steps, flush=True)
    for number in range(training.num_steps, 10_000):
        state, _ = training.step(state, jnp.ones(()))
        training.save(number + 1, state)
"""


def test_a_process_that_is_killed_while_it_saves_leaves_its_last_checkpoint(tmp_path):
    numbers = [0]
    command = [sys.executable, "-c", textwrap.dedent(_SAVING), str(tmp_path)]
    rng = np.random.default_rng(0)
    for _ in range(3):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("restored "), line
            least = int(line.split()[1])
            assert least >= numbers[-1]
            while not (saved := [path.name for path in tmp_path.iterdir() if path.name.isdigit()]) or (
                max(map(int, saved)) < least + 2
            ):
                time.sleep(0.01)
            try:
                process.wait(rng.uniform(0, 0.3))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
        numbers.append(max(int(path.name) for path in tmp_path.iterdir() if path.name.isdigit()))
        checkpoint = take_over(str(tmp_path), ALONE)
        assert checkpoint is not None
        assert checkpoint.num_steps == numbers[-1]
    assert numbers == sorted(set(numbers))  # every run got further

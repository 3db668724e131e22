"""Files are replaced whole: contents, modes, and what a failure leaves behind."""

import os
import secrets
import threading

import numpy as np
import pytest

from cost.base import Problem
from diffshard.files import replace_file, write_whole
from diffshard.solving import contest


@pytest.mark.parametrize("content", ["schön\n", b"\x00\x01\r\n"])
def test_text_and_bytes_replace_what_was_there(tmp_path, content):
    path = tmp_path / "file"
    path.write_text("a longer text that was there before")
    write_whole(path, content)
    assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert os.listdir(tmp_path) == ["file"]


def test_a_new_file_has_the_mode_of_any_new_file(tmp_path):
    (tmp_path / "usual").touch()
    write_whole(tmp_path / "whole", "text")
    assert (tmp_path / "whole").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_a_folder_is_not_written_to(tmp_path):
    with pytest.raises(IsADirectoryError, match=r"cannot be written: it is a folder. Give the path of a file"):
        write_whole(tmp_path, "text")


def test_a_failure_leaves_the_old_file_alone_and_nothing_beside_it(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_text("old")

    def refuse(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="no space left"):
        write_whole(path, "new")
    problem = Problem([np.zeros(1, int)], np.zeros((0, 2), int), [], np.zeros(0, int), [], np.zeros((0, 2), int), 1)
    with pytest.raises(OSError, match="no space left"):
        contest.write(problem, path)
    assert os.listdir(tmp_path) == ["file"]
    assert path.read_text() == "old"


def test_a_pipe_is_written_to_and_stays(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    read = []
    reader = threading.Thread(target=lambda: read.append(path.read_text()), daemon=True)
    reader.start()
    write_whole(path, "text")
    reader.join(timeout=10)
    assert read == ["text"]
    assert path.is_fifo()


def test_a_link_stays_a_link_and_a_private_file_private(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    target.chmod(0o600)
    link.symlink_to(target)
    write_whole(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert target.stat().st_mode & 0o777 == 0o600
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "target"]


def test_a_file_that_takes_a_name_replaces_a_link_and_not_what_it_leads_to(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    target.chmod(0o600)
    link.symlink_to(target)
    (tmp_path / "usual").touch()
    replace_file(link, "new")
    assert not link.is_symlink()
    assert link.read_text() == "new"
    assert link.stat().st_mode == (tmp_path / "usual").stat().st_mode
    assert target.read_text() == "old"


def test_a_link_in_the_place_of_the_temporary_file_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(secrets, "token_hex", lambda _: "guessed")
    (tmp_path / "target").write_text("old")
    (tmp_path / ".guessed.part").symlink_to(tmp_path / "target")
    with pytest.raises(FileExistsError):
        replace_file(tmp_path / "file", "new")
    assert (tmp_path / ".guessed.part").is_symlink()
    assert (tmp_path / "target").read_text() == "old"


def test_a_link_to_nothing_makes_what_it_points_to(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "target")
    write_whole(link, "new")
    assert link.is_symlink()
    assert (tmp_path / "target").read_text() == "new"

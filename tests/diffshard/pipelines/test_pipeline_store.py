"""A pipeline whose search was kept in a folder runs without a search in the next process, and as it did before."""

import json

import jax
import pytest

import diffshard
from diffshard.pipelines import search as pipeline_search
from diffshard.pipelines.options import SearchProgress
from diffshard.plans.documents import text_of
from tests.diffshard.pipelines.small_pipeline import arguments, check_close, train_step
from tests.diffshard.pipelines.test_applied_pipelines import refuse_to_search
from tests.diffshard.pipelines.test_pipelined_function import leave, search


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A plan that was searched, and the only file of the folder that keeps it."""
    leave(monkeypatch, 1, 2)
    plan = search(train_step, cache=tmp_path).plan(*arguments())
    assert plan.stored_in == ""
    (file,) = tmp_path.iterdir()
    return plan, file


def test_a_kept_pipeline_is_the_same_and_runs_without_a_search(kept, tmp_path, monkeypatch):
    plan, file = kept
    refuse_to_search(monkeypatch)
    again = search(train_step, cache=tmp_path)
    assert again.plan(*arguments()) == plan
    assert again.plan(*arguments()).stored_in == str(file)
    assert "taken from a store of plans" in str(again.plan(*arguments()))
    check_close(again(*arguments()), jax.jit(train_step)(*arguments()))
    assert list(tmp_path.iterdir()) == [file]


def test_another_question_is_searched(kept, tmp_path, monkeypatch):
    refuse_to_search(monkeypatch)
    (params, opt_state, key), (tokens, labels) = arguments()
    for question in (
        lambda: search(train_step, cache=tmp_path, memory_limit_bytes=1e9).plan(*arguments()),
        lambda: search(train_step, cache=tmp_path).plan((params, opt_state, key), (tokens[:8], labels[:8])),
        lambda: search(lambda s, b: train_step(s, b, remat=True), cache=tmp_path).plan(*arguments()),
    ):
        with pytest.raises(AssertionError, match="it is searched"):
            question()


def test_a_damaged_file_is_told_and_replaced(kept, tmp_path):
    plan, file = kept
    whole = file.read_text()
    file.write_text(whole.replace("1f1b", "1f1c", 1))
    with pytest.warns(UserWarning, match=r"A plan in the store cannot be used.*`checksum`"):
        assert search(train_step, cache=tmp_path).plan(*arguments()).stages == plan.stages
    assert search(train_step, cache=tmp_path).plan(*arguments()).stored_in == str(file)


def test_decisions_that_do_not_fit_are_decided_again(kept, tmp_path):
    plan, file = kept
    document = json.loads(file.read_text())
    del document["checksum"]
    document["plan"]["decisions"][0]["content"]["stages"][0]["end"] = 99
    file.write_text(text_of(document))
    with pytest.warns(UserWarning, match="An earlier plan of a pipeline is searched again: The decisions of the plan"):
        again = search(train_step, cache=tmp_path).plan(*arguments())
    assert again.stages == plan.stages
    assert again.stored_in == ""
    assert search(train_step, cache=tmp_path).plan(*arguments()).stored_in == str(file)


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="`cache` must be a folder"):
        diffshard.search(train_step, devices=4, hardware="h100", pipeline=diffshard.Pipeline(), cache=tmp_path / "file")


def test_an_interrupted_search_is_not_kept(tmp_path, monkeypatch):
    leave(monkeypatch, 1, 2)

    class Interrupted(SearchProgress):
        """One of which Ctrl-C has ended a stage."""

        def __init__(self, line, time_limit_s):
            super().__init__(line, time_limit_s)
            self.is_interrupted = True

    monkeypatch.setattr(pipeline_search, "SearchProgress", Interrupted)
    search(train_step, cache=tmp_path).plan(*arguments())
    assert list(tmp_path.iterdir()) == []

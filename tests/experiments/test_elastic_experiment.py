"""The experiment with interrupted trainings: a process reports what it did, and losses that differ are noticed."""

from pathlib import Path

import pytest

from experiments.elastic import Elastic, Jobs, Killed, losses_of, planned, print_killed, print_losses, restored


def reports(first: int, last: int, factor: float = 1.0) -> list[dict]:
    steps = [{"event": "step", "number": n, "loss": factor / (n + 1)} for n in range(first, last)]
    return [{"event": "planned", "seconds": 1.0, "num_steps": first}, {"event": "restored", "seconds": 2.0}, *steps]


@pytest.mark.parametrize(("factor", "is_equal"), [(1.0, True), (1 + 1e-7, True), (1.001, False)])
def test_losses_that_differ_by_more_than_rounding_are_noticed(factor, is_equal, capsys):
    killed, fewer, more = reports(0, 4), reports(3, 5, factor), reports(4, 6)
    losses = {**losses_of(killed), **losses_of(fewer), **losses_of(more)}
    elastic = Elastic(losses, 1, Killed(killed, 3.0, ["ended with -6"]), [(1, fewer), (2, more)])
    assert print_losses(losses_of(reports(0, 6)), elastic) == is_equal
    print_killed(elastic)
    printed = capsys.readouterr().out
    assert "before, then 1 processes" in printed
    assert "process 0: ended with -6" in printed


def test_a_process_of_a_job_restores_what_it_saved(tmp_path: Path):
    jobs = Jobs(tmp_path, devices_each=2)
    settings = {"sizes": None, "rows": 48, "save_interval_steps": 1}
    first = jobs.run({**settings, "until": 1}, 1, "wide")[0]
    second = jobs.run({**settings, "until": 2}, 1, "wide")[0]
    assert (planned(first)["num_steps"], planned(second)["num_steps"]) == (0, 1)
    assert (list(losses_of(first)), list(losses_of(second))) == ([0], [1])
    assert restored(first)["total_bytes"] == 48 * 2**16
    assert restored(second)["read_bytes"] > 48 * 2**16 * 0.8  # the parts of both devices, from files
    assert [report["event"] for report in second] == ["planned", "restored", "step", "closed"]


def test_a_job_that_fails_says_why(tmp_path: Path):
    with pytest.raises(RuntimeError, match=r"Process 0 ended with 1: (.|\n)*KeyError: 'until'"):
        Jobs(tmp_path, devices_each=1).run({"sizes": None, "rows": 48, "save_interval_steps": 1}, 1)

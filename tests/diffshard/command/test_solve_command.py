"""`diffshard solve` from its words to its exit code, files and both output streams."""

import json
import os

import numpy as np
import pytest

from cost.base import Problem
from diffshard.base import Solution
from diffshard.command.line import main
from diffshard.solving import contest


def instance(path, limit):
    """Two nodes and an edge; the best choice (0, 1) costs 1 + 2 + 3 and needs 5 + 6 bytes at time 1."""
    costs = [np.array([1, 9]), np.array([9, 2])]
    problem = Problem(
        costs, np.array([[0, 1]]), [np.array([[50, 3], [4, 50]])], np.arange(2),
        [np.array([5, 2]), np.array([3, 6])], np.array([[0, 2], [1, 3]]), limit,
    )  # fmt: skip
    contest.write(problem, path)


def test_solve_writes_the_solution(tmp_path, capsys):
    instance(tmp_path / "two.json.gz", 11)
    words = ["solve", str(tmp_path / "two.json.gz"), "--solver", "exhaustive", "--time-limit", "20"]
    assert main([*words, "--output", str(tmp_path / "solution.json")]) == 0
    found = json.loads((tmp_path / "solution.json").read_text())
    assert found["choice"] == [0, 1]
    assert (found["cost"], found["lower_bound"], found["feasible"]) == (6, 6, True)
    assert 0 < found["seconds"] < 20
    out, err = capsys.readouterr()
    assert out == ""
    assert "optimal: cost 6" in err
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["choice"] == [0, 1]


def test_infeasible_instances_have_code_1_and_still_the_least_bad_choice(tmp_path, capsys):
    instance(tmp_path / "two.json", 4)
    assert main(["solve", str(tmp_path / "two.json"), "--solver", "exhaustive"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["feasible"] is False
    assert json.loads(out)["excess"] == 1  # 2 + 3 bytes
    assert "infeasible: the best choice exceeds the limit by 1" in err
    assert "At time 1 the memory exceeds the limit by 1; its largest users are nodes 1 (3), 0 (2)." in err


def test_damaged_instances_have_code_2(tmp_path, capsys):
    (tmp_path / "bad.json.gz").write_bytes(b"\x1f\x8bnot gzip")
    assert main(["solve", str(tmp_path / "bad.json.gz")]) == 2
    assert "is not gzipped JSON" in capsys.readouterr().err
    assert main(["solve", str(tmp_path / "none.json")]) == 2


def test_the_bound_of_a_cost_that_floats_round_up_is_not_above_it(tmp_path, capsys):
    cost = [np.array([10**18 - 1])] * 3
    none = np.zeros(0, int)
    problem = Problem(cost, np.zeros((0, 2), int), [], none, [], np.zeros((0, 2), int), 0)
    contest.write(problem, tmp_path / "three.json")
    assert main(["solve", str(tmp_path / "three.json")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["cost"], found["status"]) == (3 * 10**18 - 3, "optimal")
    assert found["cost"] - 10**6 <= found["lower_bound"] <= found["cost"]


def test_plot_is_a_picture_and_its_name_is_checked_first(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    instance(tmp_path / "two.json", 11)
    words = ["solve", str(tmp_path / "two.json"), "--solver", "exhaustive", "--plot"]
    assert main([*words, str(tmp_path / "curve.svg")]) == 0
    drawn = (tmp_path / "curve.svg").read_text()
    assert "<svg" in drawn
    assert "two.json" in drawn  # the title, which the picture keeps as a comment
    capsys.readouterr()
    assert main([*words, str(tmp_path / "curve.xyz")]) == 2
    assert "must end in one of" in capsys.readouterr().err


def test_a_solver_that_refuses_the_instance_has_code_2(tmp_path, monkeypatch, capsys):
    def refuses(*_, **__):
        raise ValueError("`problem` is too wide.")

    instance(tmp_path / "two.json", 11)
    monkeypatch.setattr("diffshard.command.solve_command.solve", refuses)
    assert main(["solve", str(tmp_path / "two.json")]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "diffshard solve: `problem` is too wide."


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a file that is always full")
def test_a_solution_that_cannot_be_written_goes_to_stdout(tmp_path, monkeypatch, capsys):
    instance(tmp_path / "two.json", 11)
    monkeypatch.setattr("diffshard.command.solve_command.check_writable", lambda *_: None)  # `/dev` is for root alone
    assert main(["solve", str(tmp_path / "two.json"), "--output", "/dev/full"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["choice"] == [0, 1]
    assert err.splitlines()[-1] == "diffshard solve: --output /dev/full: No space left on device"


def test_one_file_for_two_results_is_refused(tmp_path, capsys):
    instance(tmp_path / "two.json", 11)
    same = str(tmp_path / "same.svg")
    assert main(["solve", str(tmp_path / "two.json"), "--output", same, "--plot", same]) == 2
    assert "--output and --plot are the same file" in capsys.readouterr().err
    assert not os.path.exists(same)


def test_without_a_bound_there_is_no_gap(tmp_path, monkeypatch, capsys):
    instance(tmp_path / "two.json", 11)
    unbounded = Solution((0, 1), 6, -np.inf, np.inf, True, 0.0, ((0.1, 6.0, -np.inf),), "finished")
    monkeypatch.setattr("diffshard.command.solve_command.solve", lambda *_, **__: unbounded)
    assert main(["solve", str(tmp_path / "two.json")]) == 0
    assert capsys.readouterr().err.splitlines()[-1] == "finished: cost 6, no bound"


def test_interrupting_before_there_is_a_choice_has_code_130(monkeypatch, tmp_path, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    instance(tmp_path / "two.json", 11)
    monkeypatch.setattr("diffshard.command.solve_command.solve", interrupted)
    assert main(["solve", str(tmp_path / "two.json")]) == 130
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith("diffshard solve: interrupted\n")

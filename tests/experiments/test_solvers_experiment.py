"""The comparison of solvers, on one small problem."""

import math

from experiments import solvers
from tests.diffshard.solving.random_problems import layered_problem


def test_all_solvers_are_compared_on_a_small_problem(capsys):
    runs = solvers.main(["--quick", "--solvers", "gradient", "exact", "greedy", "dynamic_programming"])
    assert [run.solver for run in runs] == ["gradient", "exact", "greedy", "dynamic_programming"]
    best = solvers.best_cost(runs)
    assert best > 0
    for run in runs:
        assert run.solution is not None
        assert run.solution.feasible
        assert run.solution.cost >= best
        assert run.solution.lower_bound <= best
        assert run.solver != "exact" or run.solution.status == "optimal"
    printed = capsys.readouterr().out
    assert "Solvers at 1 s each" in printed
    assert printed.count("mlp small") == len(runs)


def test_the_default_is_shown_beside_highs(capsys):
    runs = solvers.main(["--quick", "--exact"])
    assert [run.solver for run in runs] == ["gradient", "exact"]
    ours, highs = solvers.side_by_side(runs)
    assert ours[2] == highs[2]  # the same cost, which is optimal
    assert (ours[3], ours[5], ours[7]) == (highs[3], highs[5], highs[7]) == ("1.0000", "0.00%", "optimal")
    assert "The default beside HiGHS at 1 s each" in capsys.readouterr().out
    (refused,) = solvers.compare("x", layered_problem(1, 2, binding=0.6), ["exhaustive"], 1.0)
    assert solvers.side_by_side([refused])[0][2] == "not taken"


def test_a_missing_instance_is_left_out(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(solvers, "INSTANCES", tmp_path)
    assert solvers.main(["--problems", "G"]) == []
    assert "G is left out: there is no" in capsys.readouterr().out


def test_a_problem_that_a_solver_does_not_take_is_said():
    (run,) = solvers.compare("x", layered_problem(1, 2, binding=0.6), ["exhaustive"], 1.0)
    assert run.solution is None
    assert solvers.cells(run, math.inf)[:3] == ("x", "exhaustive", "not taken")
    assert "takes at most" in run.refusal

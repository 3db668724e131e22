"""The comparison of solvers, on one small problem."""

import math

from experiments import solvers
from tests.diffshard.solving.random_problems import layered_problem


def test_all_solvers_are_compared_on_a_small_problem(capsys):
    rows = solvers.main(["--quick", "--solvers", "gradient", "exact", "greedy", "dynamic_programming"])
    assert [row.solver for row in rows] == ["gradient", "exact", "greedy", "dynamic_programming"]
    best = solvers.best_cost(rows)
    assert best > 0
    for row in rows:
        assert row.solution is not None
        assert row.solution.feasible
        assert row.solution.cost >= best
        assert row.solution.lower_bound <= best
        assert row.solver != "exact" or row.solution.status == "optimal"
    printed = capsys.readouterr().out
    assert "Solvers at 1 s each" in printed
    assert printed.count("mlp small") == len(rows)


def test_the_default_is_shown_beside_highs(capsys):
    rows = solvers.main(["--quick", "--exact"])
    assert [row.solver for row in rows] == ["gradient", "exact"]
    ours, highs = solvers.side_by_side(rows)
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
    (row,) = solvers.compare("x", layered_problem(1, 2, binding=0.6), ["exhaustive"], 1.0)
    assert row.solution is None
    assert solvers.cells(row, math.inf)[:3] == ("x", "exhaustive", "not taken")
    assert "takes at most" in row.refusal

"""The comparison of solvers, on one small problem."""

import math

from diffshard.base import Solution
from experiments import solvers
from tests.diffshard.solving.random_problems import layered_problem

NO_LIMIT = ["--quick", "--seconds", "600"]
"""One small problem, and more seconds than any solver of these tests takes, on a busy machine too."""


def test_all_solvers_are_compared_on_a_small_problem(capsys):
    runs = solvers.main([*NO_LIMIT, "--solvers", "gradient", "exact", "dynamic_programming"])
    assert [run.solver for run in runs] == ["gradient", "exact", "dynamic_programming"]
    best = solvers.best_cost(runs)
    assert best > 0
    for run in runs:
        assert run.solution is not None
        assert run.solution.feasible
        assert run.solution.cost >= best
        assert run.solution.lower_bound <= best
        assert run.solver != "exact" or run.solution.status == "optimal"
    printed = capsys.readouterr().out
    assert "Solvers at 600 s each" in printed
    assert printed.count("mlp small") == len(runs)
    (greedy,) = solvers.main(
        ["--quick", "--seconds", "1", "--solvers", "greedy"]
    )  # it begins anew until its time is over
    assert greedy.solution is not None
    assert greedy.solution.feasible
    assert greedy.solution.cost >= best


def test_the_default_is_shown_beside_highs(capsys):
    runs = solvers.main([*NO_LIMIT, "--exact"])
    assert [run.solver for run in runs] == ["gradient", "exact"]
    ours, highs = solvers.side_by_side(runs)
    assert ours[2] == highs[2]  # the same cost, which is optimal
    assert (ours[3], ours[5], ours[7]) == (highs[3], highs[5], highs[7]) == ("1.0000", "0.00%", "optimal")
    assert "The default beside HiGHS at 600 s each" in capsys.readouterr().out
    (refused,) = solvers.compare("x", layered_problem(1, 2, binding=0.6), ["exhaustive"], 1.0)
    assert solvers.side_by_side([refused])[0][2] == "not taken"


def test_the_small_problem_gives_each_solver_a_second_unless_told_otherwise(capsys):
    solvers.main(["--quick", "--solvers", "greedy"])
    assert "Solvers at 1 s each" in capsys.readouterr().out


def test_a_missing_instance_is_left_out(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(solvers, "INSTANCES", tmp_path)
    assert solvers.main(["--problems", "G"]) == []
    assert "G is left out: there is no" in capsys.readouterr().out


def solution(cost, bound, feasible, *history):
    gap = (cost - bound) / cost
    return Solution((0,), cost, bound, gap, feasible, 0.0 if feasible else 8.0, history, "finished")


def test_the_best_is_the_least_cost_that_is_feasible_and_the_others_are_shown_over_it():
    first = solution(5.0, 3.0, True, (0.1, math.inf, 1.0), (0.2, 9.0, 3.0), (0.3, 5.04, 3.0), (0.9, 5.0, 3.0))
    answers = {"a": first, "b": solution(4.0, 2.0, True, (0.5, 4.0, 2.0)), "c": solution(1.0, 1.0, False), "d": None}
    runs = [solvers.SolverRun("x", name, answer, 2.0) for name, answer in answers.items()]
    assert solvers.best_cost(runs) == 4.0
    assert solvers.best_cost(runs[2:]) == math.inf
    assert solvers.near_s(first) == 0.3  # within 1% of the last
    assert [solvers.cells(run, 4.0)[1:5] for run in runs] == [
        ("a", "1.2500", "0.7500", "0.3"),
        ("b", "1.0000", "0.5000", "0.5"),
        ("c", "infeasible by 8", "0.2500", ""),
        ("d", "not taken", "", ""),
    ]
    assert [row[2:4] for row in solvers.side_by_side(runs)[:3]] == [
        ("5", "1.2500"),
        ("4", "1.0000"),
        ("infeasible by 8", ""),
    ]


def test_a_problem_that_a_solver_does_not_take_is_said():
    (run,) = solvers.compare("x", layered_problem(1, 2, binding=0.6), ["exhaustive"], 1.0)
    assert run.solution is None
    assert solvers.cells(run, math.inf)[:3] == ("x", "exhaustive", "not taken")
    assert "takes at most" in run.refusal

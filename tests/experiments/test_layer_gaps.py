"""The sources of a gap: bounds of one problem stand in the order in which they get tighter."""

import pytest

from diffshard.solving.solve import solve
from experiments import layer_gaps
from experiments.layered import layered_problem


def test_the_dual_after_the_ascent_is_below_the_linear_program_and_this_below_the_optimum():
    problem = layered_problem(3, 3, width=8, most=4, binding=0.7)
    bound = layer_gaps.ascended(problem, 100).certified_bound()
    relaxed = layer_gaps.relaxed_optimum(problem)
    optimum = solve(problem, solver="exact", time_limit_s=30).cost
    assert 0 < bound <= relaxed * (1 + 1e-9)
    assert relaxed <= optimum * (1 + 1e-9)
    assert bound == pytest.approx(relaxed, rel=0.2)


def test_the_table_has_a_row_for_each_size(capsys):
    layer_gaps.main(["--nodes", "40"])
    out = capsys.readouterr().out
    assert "linear program" in out
    assert " 40 " in out

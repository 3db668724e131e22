"""The placement experiment on its smallest cases."""

from experiments import placement


def test_prints_costs_beside_the_optima(capsys):
    placement.main(["--quick", "--solvers", "gradient", "exact"])
    out = capsys.readouterr().out
    assert "6 layers, 3 devices" in out
    assert "12 unit layers, 4 stages" in out


def test_all_cases_have_their_optimum_within_reach():
    for case in (placement.WORKED, *placement.PIPELINES[:2]):
        assert placement.place_case(case, "gradient").cost == case.optimum

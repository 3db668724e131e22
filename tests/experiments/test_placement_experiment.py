"""The placement experiment on its smallest cases."""

from experiments import placement
from tests.experiments.printed_tables import printed_rows


def test_prints_costs_beside_the_optima(capsys):
    placement.main(["--quick", "--solvers", "gradient", "exact"])
    rows = printed_rows(capsys.readouterr().out)
    names = ["6 layers, 3 devices", "12 unit layers, 4 stages, 3 micro-batches"]
    assert [tuple(row[:3]) for row in rows] == [
        (name, solver, optimum)
        for name, optimum in zip(names, ("12", "12"), strict=True)
        for solver in ("gradient", "exact")
    ]
    for _, _, optimum, cost, transfer, compute, bound, seconds in rows:
        assert cost == optimum
        assert float(transfer) + float(compute) == float(cost)
        assert bound == "none" or float(bound) <= float(cost)
        assert float(seconds) >= 0


def test_all_cases_have_their_optimum_within_reach():
    assert placement.place_case(placement.WORKED, "gradient").step_s == placement.WORKED.optimum
    for case in placement.PIPELINES:
        assert placement.place_case(case, placement.DYNAMIC_PROGRAM).step_s == case.optimum

"""Cases whose best plan is known by hand."""

import pytest

from experiments import known_good
from experiments.known_good import CASES, all_reduce_bytes, slow_bytes


def test_bytes_are_counted_as_alpa_counts_them():
    assert all_reduce_bytes(100, 4) == 150
    assert slow_bytes({"data": 100.0, "model": 50.0}, {"data": 1e-6, "model": 1e-7}) == pytest.approx(105)
    kernels, biases, activation = 6 * 32 * 32 * 4 / 2, 6 * 32 * 4, 256 * 32 * 4 / 2
    bytes_by_axis = {"data": all_reduce_bytes(kernels + biases, 2), "model": all_reduce_bytes(5 * activation, 2)}
    collectives = 12 + 5
    objective = slow_bytes(bytes_by_axis, CASES[2].links) + collectives * 1.01
    assert round(objective) == CASES[2].known_bytes == 21265


@pytest.mark.parametrize("case", range(len(CASES)))
def test_the_plan_found_is_as_good_as_the_known_one(case: int):
    assert known_good.main(["--cases", str(case), "--time-limit", "10"]) == 0

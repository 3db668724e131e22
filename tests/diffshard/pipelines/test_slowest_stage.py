"""The least sum with the slowest stage against all divisions of small chains."""

import numpy as np
import pytest

from diffshard.pipelines.stage_dynamic_program import Submesh, least_sum_and_slowest, limited_sum_objective, slowest_of
from tests.diffshard.pipelines.test_stage_dynamic_program import all_divisions, value_of


@pytest.mark.parametrize("weight", [0, 1, 7])
@pytest.mark.parametrize("seed", range(6))
def test_the_least_of_all_divisions(seed, weight):
    rng = np.random.default_rng(seed)
    num_layers, devices = 5, [4]
    submeshes = [Submesh(0, 1), Submesh(0, 2), Submesh(0, 3)]
    tables = rng.integers(1, 12, (4, num_layers, num_layers + 1, 3)).astype(float)
    tables[rng.random(tables.shape) < 0.3] = np.inf
    link_s = rng.integers(0, 5, (num_layers, 3, 3)).astype(float)

    def stage_s(number):
        return tables[number - 1]

    values = []
    for stages in all_divisions(num_layers, devices, submeshes, 4, True):
        seconds = [stage_s(len(stages) - i)[stage] for i, stage in enumerate(stages)]
        if np.isfinite(max(seconds)):
            values.append(value_of(stages, stage_s, link_s, limited_sum_objective(np.inf)) + weight * max(seconds))
    division = least_sum_and_slowest(num_layers, devices, submeshes, stage_s, link_s, weight, max_stages=4)
    if not values:
        assert division is None
        return
    assert division is not None
    assert division.value == min(values)
    sums = value_of(division.stages, stage_s, link_s, limited_sum_objective(np.inf))
    assert division.value == sums + weight * slowest_of(division, stage_s)


@pytest.mark.parametrize("weight", [-1, np.inf, np.nan, "1"])
def test_a_weight_that_is_no_weight_is_refused(weight):
    with pytest.raises(ValueError, match="`slowest_weight` must be a finite number"):
        least_sum_and_slowest(
            1, [1], [Submesh(0, 1)], lambda _: np.zeros((1, 2, 1)), np.zeros((1, 1, 1)), weight, max_stages=1
        )

"""The formula of a step on expert-parallel groups, against numbers worked out elsewhere and by hand."""

import dataclasses

import numpy as np
import pytest

from cost.expert_groups import ExpertStep, ExpertWorkers, all_reduce_s, group_s, step_s

SAME_NODE = np.kron(np.eye(4), np.ones((4, 4))) > 0
WORKERS = ExpertWorkers(
    np.full(16, 0.43 * 312e12),
    np.full(16, 32),
    np.where(SAME_NODE, 0.009e-3, 0.03e-3),
    np.where(SAME_NODE, 0.014e-9, 0.054e-9),
)


def golden_step(num_experts: int) -> ExpertStep:
    return ExpertStep((16 * 4 * 2048 * 1024**2,) * num_experts, 16e6, 4, 512e6, 24, 2, 1, 256, 4)


@pytest.mark.parametrize(
    ("num_experts", "size", "ms"),
    [
        (64, 16, 1210.43),
        (64, 8, 1589.75),
        (64, 4, 2514.28),
        (64, 2, 4839.12),
        (64, 1, np.inf),
        (16, 16, 767.87),
        (16, 8, 704.63),
        (16, 4, 744.05),
        (16, 2, 1298.66),
        (16, 1, 2413.05),
    ],
)
def test_equal_contiguous_groups_take_the_published_milliseconds(num_experts, size, ms):
    groups = np.arange(16).reshape(-1, size).tolist()
    assert round(1e3 * step_s(WORKERS, golden_step(num_experts), groups), 2) == ms


def test_two_unequal_workers_by_hand():
    workers = ExpertWorkers(
        np.array([2.0, 6.0]), np.array([1, 1]), np.array([[9.0, 1], [2, 9]]), np.array([[9.0, 3], [5, 9]])
    )
    step = ExpertStep((4.0, 4.0), 2.0, 3.0, 7.0, 6, 3, 1, 4, 1)
    # γ = (2 + 1)·(6 / 3)·4 / (2·1) = 12; the second worker's link is slower: 3·(2 + 2 / 2·5) = 21
    assert group_s(workers, step, (0, 1)) == 12 * (8 / 8 + 21)
    assert group_s(workers, step, (0,)) == np.inf
    roomy = dataclasses.replace(workers, capacity=np.array([2, 2]))
    assert group_s(roomy, step, (0,)) == 12 * 8 / 2
    assert all_reduce_s(roomy, step, [(0,), (1,)]) == 2 * (2 + 7 / 2 * 5)


def test_only_links_between_groups_delay_the_all_reduce():
    latency = np.full((3, 3), 1.0)
    latency[0, 1] = 50.0
    workers = ExpertWorkers(np.ones(3), np.full(3, 2), latency, np.zeros((3, 3)))
    step = ExpertStep((1.0,), 1.0, 1.0, 1.0, 1, 1, 0, 3, 1)
    assert all_reduce_s(workers, step, [(0, 1), (2,)]) == 2.0
    assert all_reduce_s(workers, step, [(0, 2), (1,)]) == 100.0
    assert all_reduce_s(workers, step, [(0, 1, 2)]) == 0.0

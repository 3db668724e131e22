"""`assign_experts`: proven assignments of small groups, the rules of any, and its errors."""

import itertools

import numpy as np
import pytest

import diffshard

EXPERTS, SPEEDS, ROOM = (3, 3, 3, 2, 2, 3, 2, 3), (42, 56, 68, 22), (1, 5, 1, 3)


@pytest.fixture(scope="module")
def published():
    return diffshard.experts.assign_experts(EXPERTS, SPEEDS, ROOM)


def test_published_case_is_optimal_where_greedy_is_not(published):
    assert round(published.greedy_s, 4) == 0.2321
    assert round(published.step_s, 4) == 0.1964
    assert published.gap < 1e-5
    assert ", optimal" in str(published)
    assert "196 ms" in str(published)


@pytest.mark.parametrize(("num_experts", "num_workers"), [(16, 4), (64, 16)])
def test_equal_workers_hold_four_equal_experts_each(num_experts, num_workers):
    plan = diffshard.experts.assign_experts(np.full(num_experts, 5.0), np.full(num_workers, 2.0), 32)
    assert [len(experts) for experts in plan.experts] == [4] * num_workers
    assert plan.gap < 1e-5


@pytest.mark.parametrize("seed", range(4))
def test_small_assignments_are_the_best_of_all(seed):
    rng = np.random.default_rng(seed)
    works, speeds, room = rng.integers(1, 9, 6), rng.integers(1, 5, 3), rng.integers(2, 5, 3)
    plan = diffshard.experts.assign_experts(works, speeds, room)
    makespans = [
        max(sum(works[list(np.flatnonzero(np.array(worker) == w))]) / speeds[w] for w in range(3))
        for worker in itertools.product(range(3), repeat=6)
        if (np.bincount(worker, minlength=3) <= room).all()
    ]
    assert plan.step_s == pytest.approx(min(makespans))
    assert plan.lower_bound_s <= min(makespans) * (1 + 1e-9)


def test_capacity_is_kept_and_each_expert_is_on_one_worker():
    rng = np.random.default_rng(0)
    room = rng.integers(2, 6, 12)
    works = rng.uniform(1, 4, int(room.sum()) - 1)
    plan = diffshard.experts.assign_experts(works, rng.uniform(1, 4, 12), room)
    assert sorted(x for experts in plan.experts for x in experts) == list(range(len(works)))
    assert (np.bincount(plan.worker, minlength=12) <= room).all()
    assert plan.lower_bound_s <= plan.step_s <= plan.greedy_s


def test_order_of_workers_and_faster_workers(published):
    order = [2, 0, 3, 1]
    renamed = diffshard.experts.assign_experts(EXPERTS, [SPEEDS[w] for w in order], [ROOM[w] for w in order])
    assert renamed.step_s == pytest.approx(published.step_s)
    for worker in range(4):
        faster = [speed * (1.5 if w == worker else 1) for w, speed in enumerate(SPEEDS)]
        assert diffshard.experts.assign_experts(EXPERTS, faster, ROOM).step_s <= published.step_s * (1 + 1e-9)


def test_solver_by_name_finds_the_optimum():
    plan = diffshard.experts.assign_experts(EXPERTS, SPEEDS, ROOM, solver="gradient")
    assert round(plan.step_s, 4) == 0.1964


def test_file_gives_the_same_assignment(published, tmp_path):
    published.save(tmp_path / "plan.json")
    assert diffshard.experts.ExpertAssignment.load(tmp_path / "plan.json") == published
    with pytest.raises(diffshard.PlanError, match=r"ExpertAssignment\.load"):
        diffshard.experts.GroupPlan.load(tmp_path / "plan.json")
    text = (
        (tmp_path / "plan.json").read_text().replace('"worker":[0', '"worker":[9').replace('"worker":[1', '"worker":[9')
    )
    (tmp_path / "bad.json").write_text(text.replace('"worker":[2', '"worker":[9').replace('"worker":[3', '"worker":[9'))
    with pytest.raises(diffshard.PlanError, match="damaged"):
        diffshard.experts.ExpertAssignment.load(tmp_path / "bad.json")


def test_missing_room_says_how_many_experts():
    with pytest.raises(
        diffshard.InfeasibleError, match=r"`capacity` of all 2 workers together is 5, 3 less than the 8"
    ):
        diffshard.experts.assign_experts(EXPERTS, [1, 2], [2, 3])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"expert_flops": []}, "`expert_flops` must have one number for each expert"),
        ({"expert_flops": [1, -2]}, r"`expert_flops\[1\]` must be positive and finite.*got -2"),
        ({"flops_per_s": [1, 0]}, r"`flops_per_s\[1\]` must be positive"),
        ({"flops_per_s": "fast"}, "`flops_per_s` must be numbers"),
        ({"capacity": [1, 2, 3]}, r"`capacity` must be a whole number or one for each of 2 workers"),
        ({"expert_flops": [1e300, 2e300]}, r"`expert_flops` are too many for `flops_per_s`.*3e\+300 s"),
        ({"time_limit_s": -1}, "`time_limit_s` must be a positive number of seconds or None, not -1"),
        ({"key": "x"}, "`key` must be a seed"),
        ({"progress": 3}, "`progress` must be a function .* not 3"),
        (
            {"time_limit": 3},
            r"`time_limit` is no argument of .*; those for the solver are .*\. Did you mean 'time_limit_s'\?",
        ),
        ({"solver": "magic"}, "magic"),
        ({"capacity": [1.5, 2]}, r"`capacity\[0\]` must be a whole number of experts"),
    ],
)
def test_wrong_arguments_are_named(changed, message):
    arguments = {"expert_flops": [1, 2], "flops_per_s": [1, 1], "capacity": 2, **changed}
    with pytest.raises((TypeError, ValueError), match=message):
        diffshard.experts.assign_experts(**arguments)

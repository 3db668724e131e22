"""`group_experts`: the published cases, all divisions as the oracle of small ones, the rules of any, and its errors."""

import dataclasses

import numpy as np
import pytest

import diffshard
from cost.expert_groups import ExpertStep, ExpertWorkers, group_ms, step_ms
from diffshard.expert_groups.bounds import lower_bounds_ms
from diffshard.expert_groups.exhaustive import best_division
from diffshard.expert_groups.merging import divisions_by_merging
from experiments.expert_groups import STEP, group, irregular_cluster
from search_spaces.expert_groups import ExpertGroupSpace
from tests.cost.test_expert_groups_cost import WORKERS, golden_step


def small_step(num_experts: int, num_workers: int) -> ExpertStep:
    return ExpertStep((1.4e11,) * num_experts, global_batch=16 * num_workers, **STEP)


def golden_plan(num_experts: int) -> diffshard.GroupPlan:
    step = dataclasses.asdict(golden_step(num_experts))
    flops = step.pop("expert_flops")
    return diffshard.group_experts(
        flops, WORKERS.flops_per_ms, WORKERS.capacity, WORKERS.latency_ms, WORKERS.ms_per_mb, **step
    )


@pytest.fixture(scope="module")
def two_groups():
    return golden_plan(16)


def test_64_experts_want_one_group_of_16():
    plan = golden_plan(64)
    assert plan.groups == (tuple(range(16)),)
    assert round(plan.step_ms, 2) == 1210.43
    assert [plan.expert_workers[0].count(worker) for worker in range(16)] == [4] * 16
    assert plan.gap < 1e-5


def test_16_experts_want_two_groups_of_whole_nodes(two_groups):
    assert round(two_groups.step_ms, 2) == 704.63
    assert [len(members) for members in two_groups.groups] == [8, 8]
    assert all({w // 4 * 4 + i for w in members for i in range(4)} == set(members) for members in two_groups.groups)
    assert two_groups.gap < 1e-5
    assert "16 experts on 16 workers in 2 groups" in str(two_groups)
    assert "705 ms" in str(two_groups)


@pytest.mark.parametrize("seed", range(3))
def test_few_workers_get_the_best_of_all_divisions_and_bounds_hold(seed):
    workers, step = irregular_cluster(6, seed), small_step(6, 6)
    best = best_division(workers, step)
    recursive = [[]]
    for worker in range(6):  # all divisions, written another way than the solver's
        recursive = [
            [*groups[:i], [*groups[i], worker], *groups[i + 1 :]] if i < len(groups) else [*groups, [worker]]
            for groups in recursive
            for i in range(len(groups) + 1)
        ]
    times = [step_ms(workers, step, groups) for groups in recursive]
    assert len(times) == 203
    assert best.ms == pytest.approx(min(times))
    bounds = lower_bounds_ms(workers, step)
    for groups, ms in zip(recursive, times, strict=True):
        assert bounds[len(groups) - 1] <= ms
    merged = list(divisions_by_merging(workers, step))
    for division in merged:
        assert division.ms == pytest.approx(step_ms(workers, step, division.groups))
    assert best.ms <= min(division.ms for division in merged)


def test_solver_over_all_groups_of_a_size_finds_the_best_of_them():
    workers, step = irregular_cluster(6, 1), small_step(4, 6)
    triples = [(a, b, c) for a in range(6) for b in range(a + 1, 6) for c in range(b + 1, 6)]
    others = [tuple(w for w in range(6) if w not in triple) for triple in triples]
    space = ExpertGroupSpace(workers, step, 2, triples)
    decoded = space.decode(diffshard.solve(space.problem, solver="exhaustive").choice)
    slowest = [max(group_ms(workers, step, g) for g in pair) for pair in zip(triples, others, strict=True)]
    assert max(group_ms(workers, step, g) for g in decoded.groups) == pytest.approx(min(slowest))
    assert decoded.step_ms == pytest.approx(step_ms(workers, step, decoded.groups))


@pytest.mark.parametrize("num_workers", [8, 24])
def test_plans_keep_every_rule(num_workers):
    workers = irregular_cluster(num_workers, 3)
    plan = group(workers, 12)
    assert sorted(w for members in plan.groups for w in members) == list(range(num_workers))
    for members, holders in zip(plan.groups, plan.expert_workers, strict=True):
        assert len(holders) == 12
        assert set(holders) <= set(members)
        assert (np.bincount(holders, minlength=num_workers) <= workers.capacity).all()
    step = ExpertStep((16 * 4 * 2048 * 1024**2,) * 12, global_batch=16 * num_workers, **STEP)
    assert plan.step_ms == pytest.approx(step_ms(workers, step, plan.groups))
    assert plan.lower_bound_ms <= plan.step_ms <= plan.merging_ms * (1 + 1e-9)
    order = np.random.default_rng(0).permutation(num_workers)
    inside = np.ix_(order, order)
    renamed = ExpertWorkers(
        workers.flops_per_ms[order], workers.capacity[order], workers.latency_ms[inside], workers.ms_per_mb[inside]
    )
    if num_workers == 8:  # where the optimum is proven; a heuristic may depend on the order
        assert group(renamed, 12).step_ms == pytest.approx(plan.step_ms)
        faster = dataclasses.replace(workers, flops_per_ms=workers.flops_per_ms * np.r_[2.0, np.ones(7)])
        assert group(faster, 12).step_ms <= plan.step_ms * (1 + 1e-9)
    assert min(d.ms for d in divisions_by_merging(renamed, step)) == pytest.approx(plan.merging_ms)


def test_file_gives_the_same_plan(two_groups, tmp_path):
    two_groups.save(tmp_path / "plan.json")
    assert diffshard.GroupPlan.load(tmp_path / "plan.json") == two_groups
    text = (tmp_path / "plan.json").read_text()
    (tmp_path / "bad.json").write_text(text.replace('"groups":[[0,', '"groups":[[1,'))
    with pytest.raises(diffshard.PlanError, match="do not divide the workers"):
        diffshard.GroupPlan.load(tmp_path / "bad.json")


def call(**changed):
    arguments = {
        "expert_flops": [1.0] * 4,
        "flops_per_ms": [1.0, 1.0],
        "capacity": 2,
        "latency_ms": np.ones((2, 2)),
        "ms_per_mb": np.ones((2, 2)),
        "global_batch": 4,
        **STEP,
        **changed,
    }
    return diffshard.group_experts(**arguments)


def test_missing_room_says_how_many_experts():
    with pytest.raises(diffshard.InfeasibleError, match=r"`capacity` of all 2 workers together is 3, 1 less"):
        call(capacity=[1, 2])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"latency_ms": np.ones((2, 3))}, r"`latency_ms` must be `\[2, 2\]`.*\(2, 3\)"),
        ({"ms_per_mb": [[0, -1], [1, 0]]}, r"`ms_per_mb\[0, 1\]` must be at least 0.*got -1"),
        ({"latency_ms": [[0, np.inf], [1, 0]]}, r"`latency_ms\[0, 1\]` must be"),
        ({"exchange_mb": -1}, "`exchange_mb` must be a finite number of at least 0, not -1"),
        ({"num_layers": 2.5}, "`num_layers` must be a positive whole number, not 2.5"),
        ({"layer_spacing": 25}, "`layer_spacing` must be at most `num_layers`, 24"),
        ({"recomputation": -1}, "`recomputation` must be how many"),
        ({"expert_flops": [1e308] * 4}, "`expert_flops` are too many for `flops_per_ms`"),
        ({"flops_per_ms": [5e-324, 1.0]}, "would take inf ms on the slowest worker"),
        ({"solver": "magic"}, "magic"),
        ({"key": 0.5}, "`key` must be"),
        ({"time_limit_s": -1}, "`time_limit_s` must be"),
        ({"progress": 3}, "`progress` must be a function .* not 3"),
    ],
)
def test_wrong_arguments_are_named(changed, message):
    with pytest.raises(ValueError, match=message):
        call(**changed)

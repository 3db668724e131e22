"""The search of pipelines against all plans of small chains, and beside published plans."""

import itertools

import numpy as np
import pytest

from cost.presets import device_and_network
from diffshard.pipelines.stage_dynamic_program import Stage
from experiments.pipelines import alpa_plans, gpt_throughput
from experiments.pipelines.chain_search import SCHEDULES, equal_cuts, fits, kept, search, simulated, transfers_s
from experiments.pipelines.gpt_costs import Gpt, StageTables, stage_tables, submeshes_of
from tests.diffshard.pipelines.test_stage_dynamic_program import all_divisions
from tests.experiments.printed_tables import printed_rows

BATCH, COUNTS = 8, (2, 4, 8)
SUBMESHES = submeshes_of(4)


def random_tables(seed):
    """Stages of five layers that take random times; the memory holds about half of them."""
    rng = np.random.default_rng(seed)
    shares = rng.random(len(SUBMESHES)) / 100

    def table():
        total = np.append(0.0, np.cumsum(rng.integers(1, 9, 5)))
        return np.maximum(total[None, :] - total[:-1, None], 0.0)[..., None] * shares

    forward, backward, step = table(), table(), table()
    state, residual = 1000 * forward, 1000 * backward
    memory_bytes = float(np.quantile(state + 2 * residual, 0.6))
    return StageTables(
        forward, backward, step, state, residual, np.zeros_like(state), np.full(5, 1e6), memory_bytes=memory_bytes
    )


@pytest.mark.parametrize("seed", range(6))
def test_no_plan_is_faster_than_the_bound_and_ours_is_near_the_fastest(seed):
    tables = random_tables(seed)
    found = search(5, 4, SUBMESHES, lambda _: tables, BATCH, COUNTS, max_stages=3)
    steps = np.array(
        [
            simulated(stages, SUBMESHES, tables, count, schedule).step_s
            for stages in all_divisions(5, [4], SUBMESHES, 3, True)
            for count in COUNTS
            for schedule in SCHEDULES
        ]
    )
    assert found.bound_s <= steps.min()
    if np.isinf(steps.min()):
        assert found.plan is None
        return
    assert found.plan is not None
    again = simulated(found.plan.stages, SUBMESHES, tables, found.plan.num_microbatches, found.plan.schedule)
    assert found.plan == again
    assert steps.min() <= found.plan.step_s <= 1.05 * steps.min()


def test_stages_keep_what_their_schedule_keeps():
    assert [kept("1f1b", number, 8) for number in (4, 3, 2, 1)] == [4, 3, 2, 1]
    assert [kept("eager", number, 8) for number in (4, 3, 2, 1)] == [7, 5, 3, 1]
    assert kept("eager", 4, 5) == 5


def test_a_plan_that_does_not_fit_takes_for_ever():
    tables = random_tables(0)._replace(memory_bytes=0.0)
    assert not fits(tables, 1)[0, 5].any()
    assert simulated([Stage(0, 5, 3)], SUBMESHES, tables, 2, "1f1b").step_s == np.inf


def test_transfers_inside_a_host_take_the_links_of_its_devices():
    """Twelve devices: the stage of eight has a host of its own, so that both of its links lead to another one."""
    submeshes = submeshes_of(8)
    number = {mesh.shape: p for p, mesh in enumerate(submeshes)}
    tables = random_tables(1)
    inside, between = device_and_network("v100")[1].transfers()
    small = [Stage(0, 1, number[2, 1]), Stage(1, 2, number[4, 1])]
    assert transfers_s(small, submeshes, tables) == [inside.latency_s + inside.s_per_byte * 1e6 / 2]
    stages = [Stage(0, 1, number[2, 1]), Stage(1, 3, number[8, 1]), Stage(3, 5, number[2, 1])]
    assert transfers_s(stages, submeshes, tables) == [between.latency_s + between.s_per_byte * 1e6] * 2


def test_published_stages_have_the_embedding_first_and_the_head_last():
    plan = alpa_plans.priced("2.6B", alpa_plans.PLANS["2.6B"])
    assert plan.stages == (Stage(0, 9, 0), Stage(9, 17, 1), Stage(17, 34, 2))
    assert np.isfinite(plan.step_s)
    for name, published in alpa_plans.PLANS.items():
        assert sum(published.blocks) == alpa_plans.MODELS[name].num_blocks
        assert sum(np.prod(mesh) for mesh in published.meshes) == published.num_devices


def test_equal_stages_have_equal_blocks():
    assert equal_cuts(10, 4) == [0, 3, 5, 7, 10]
    assert equal_cuts(10, 1) == [0, 10]


TINY = Gpt(num_blocks=4, width=512, num_heads=8, vocabulary=4096)


def test_ours_is_no_slower_than_the_grid():
    theirs, mesh = gpt_throughput.best_of_grid(TINY, 4, 16)
    eager, _ = gpt_throughput.best_of_grid(TINY, 4, 16, "eager")
    ours = gpt_throughput.planned(TINY, 4, 16)
    assert ours.plan is not None
    assert ours.bound_s <= ours.plan.step_s <= min(theirs.step_s, eager.step_s)
    tables = stage_tables(TINY, [mesh], 16 // theirs.num_microbatches)
    assert theirs == simulated(theirs.stages, [mesh], tables, theirs.num_microbatches, "1f1b")


def test_the_grid_has_all_equal_stages():
    shapes = {(len(plan.stages), *mesh.shape) for plan, mesh in gpt_throughput.grid(TINY, 4, 16)}
    assert shapes == {(p, d, t) for p, d, t in itertools.product((1, 2, 4), repeat=3) if p * d * t == 4}
    odd = {len(plan.stages) for plan, _ in gpt_throughput.grid(TINY._replace(num_blocks=6), 4, 16)}
    assert odd == {1, 2}, "six blocks are not four equal stages"


def test_the_tables_say_by_how_much_ours_is_faster(capsys, monkeypatch):
    monkeypatch.setitem(gpt_throughput.MODELS, "1.3B", TINY)
    monkeypatch.setitem(gpt_throughput.DEVICES, "1.3B", 4)
    monkeypatch.setattr(gpt_throughput, "BATCH", 16)
    gpt_throughput.main(["--models", "1.3B"])
    row, *plans = printed_rows(capsys.readouterr().out)
    assert row[:2] == ["1.3B", "4"]
    assert float(row[5]) >= 1.0
    assert [plan[1] for plan in plans] == ["Megatron", "ours"]

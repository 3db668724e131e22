"""Divisions into stages against all divisions of small chains, and against published ones."""

import itertools
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from cost.pipeline_schedules import Schedule, graph_of, kept_microbatches
from cost.pipeline_times import StageTimes, lower_bound_s, simulate
from diffshard.pipelines.stage_dynamic_program import (
    Stage,
    Submesh,
    best_division,
    bottleneck_objective,
    limited_sum_objective,
    lower_bound_objective,
    step_objective,
)


def all_divisions(num_layers, devices, submeshes, max_stages, use_all_devices):
    for num_stages in range(1, max_stages + 1):
        for cuts in itertools.combinations(range(1, num_layers), num_stages - 1):
            ends = (*cuts, num_layers)
            for chosen in itertools.product(range(len(submeshes)), repeat=num_stages):
                used = np.zeros(len(devices), int)
                for p in chosen:
                    used[submeshes[p].kind] += submeshes[p].num_devices
                if (used == devices).all() if use_all_devices else (used <= devices).all():
                    yield tuple(map(Stage, (0, *cuts), ends, chosen))


def value_of(stages, stage_s, link_s, objective):
    value = 0.0
    for number, stage in enumerate(reversed(stages), 1):
        if number > 1:
            later = stages[len(stages) - number + 1]
            value = objective.join(link_s[later.start, stage.submesh, later.submesh], value)
        value = objective.fold(stage_s(number)[stage], value)
    return float(value)


VGG16 = Path(__file__).with_name("vgg16.csv")
OBJECTIVES = {
    "bound": lower_bound_objective(5),
    "bottleneck": bottleneck_objective(),
    "limited sum": limited_sum_objective(7.0),
    "sum": limited_sum_objective(np.inf),
}


@pytest.mark.parametrize("use_all_devices", [True, False])
@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("seed", range(6))
def test_the_best_of_all_divisions(name, seed, use_all_devices):
    """Times depend on layers, submesh, and how many stages follow; a fifth of the stages do not fit."""
    rng = np.random.default_rng(seed)
    num_layers, devices = int(rng.integers(1, 6)), [4, 2][: 1 + seed % 2]
    submeshes = [Submesh(0, 1), Submesh(0, 2), Submesh(0, 4), Submesh(1, 1), Submesh(1, 2)][: 3 + 2 * (seed % 2)]
    tables = rng.integers(1, 12, (4, num_layers, num_layers + 1, len(submeshes))).astype(float)
    tables[rng.random(tables.shape) < 0.2] = np.inf
    link_s = rng.integers(0, 5, (num_layers, len(submeshes), len(submeshes))).astype(float)
    objective = OBJECTIVES[name]

    def stage_s(number):
        return tables[number - 1]

    values = [
        value_of(stages, stage_s, link_s, objective)
        for stages in all_divisions(num_layers, devices, submeshes, min(4, num_layers), use_all_devices)
    ]
    division = best_division(
        num_layers, devices, submeshes, stage_s, link_s, objective, max_stages=4, use_all_devices=use_all_devices
    )
    if min(values, default=np.inf) == np.inf:
        assert division is None
    else:
        assert division is not None
        assert division.value == min(values) == value_of(division.stages, stage_s, link_s, objective)


def test_the_stages_of_vgg16_that_pipedream_found():
    """Narayanan et al. (2019): of four devices with links of 1 GB/s, three share the first 17 layers.

    A stage on m devices takes its time and the 4(m - 1)/m sums of its gradients, divided by m; a link sends a result
    there and its gradient back.
    """
    columns = np.loadtxt(VGG16, delimiter=",", skiprows=2, usecols=(1, 2, 3, 4)).T
    forward_ms, backward_ms, result_bytes, weight_bytes = columns
    seconds, bandwidth = (forward_ms + backward_ms) / 1000, 1e9
    devices = np.arange(1, 5)
    table = np.full((40, 41, 4), np.inf)
    for start in range(40):
        for end in range(start + 1, 41):
            sums_s = 4 * (devices - 1) / devices * weight_bytes[start:end].sum() / bandwidth
            table[start, end] = (seconds[start:end].sum() + sums_s) / devices
    sent_bytes = 2 * np.append(0.0, result_bytes[:-1])
    link_s = sent_bytes[:, None, None] / bandwidth / np.minimum(devices[:, None], devices)
    division = best_division(
        40, [4], [Submesh(0, int(m)) for m in devices], lambda _: table, link_s, bottleneck_objective(), max_stages=4
    )
    assert division is not None
    assert division.stages == (Stage(0, 17, 2), Stage(17, 40, 0))
    alone_s = [seconds[stage.start : stage.end].sum() for stage in division.stages]
    assert alone_s == pytest.approx([0.514238, 0.158297], abs=1e-6), "as PipeDream prints them, on one device"
    assert division.value == link_s[17, 2, 0] > table[0, 17, 2], "the link is slower than both stages"


def test_the_mesh_choice_of_nnscaler():
    """Six operations on four GPUs: two stages of two GPUs, as in nnScaler's own test of its dynamic program."""
    seconds = np.array([0.0, 0.2, 0.2, 0.2, 0.0, 0.3]) + 0.1
    submeshes = [Submesh(0, 1), Submesh(0, 2), Submesh(0, 4)]
    total = np.append(0.0, np.cumsum(seconds))
    table = (total[None, :] - total[:-1, None])[..., None] / [s.num_devices for s in submeshes]
    no_link = np.zeros((6, 3, 3))

    def two_stages(number):
        return table if number <= 2 else np.full_like(table, np.inf)

    division = best_division(6, [4], submeshes, two_stages, no_link, bottleneck_objective(), max_stages=2)
    assert division is not None
    assert division.value == pytest.approx(1.5 / 4), "one stage on all four never waits"
    apart = np.where(np.arange(3) == 2, np.inf, table)
    division = best_division(6, [4], submeshes, lambda _: apart, no_link, bottleneck_objective(), max_stages=2)
    assert division is not None
    assert [stage.submesh for stage in division.stages] == [1, 1]
    assert division.value == pytest.approx(0.8 / 2)


def test_the_bound_of_a_division_is_that_of_its_simulated_schedules():
    rng = np.random.default_rng(0)
    table = np.cumsum(rng.random(7))
    table = np.maximum(np.append(0.0, table)[None, :] - np.append(0.0, table)[:-1, None], 0.0)[..., None]
    link_s = np.full((7, 1, 1), 0.05)
    division = best_division(7, [3], [Submesh(0, 1)], lambda _: table, link_s, lower_bound_objective(9), max_stages=3)
    assert division is not None
    seconds = np.array([table[stage][()] for stage in division.stages])
    times = StageTimes(seconds / 3, 2 * seconds / 3, [0.025] * 2, [0.025] * 2)
    assert division.value == pytest.approx(lower_bound_s(times, 9))
    for schedule in ("gpipe", "1f1b", "eager"):
        assert simulate(times, graph_of(schedule, 3, 9)).step_s >= division.value * (1 - 1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "`num_layers` must be a whole number"),
        ({"max_stages": 1.5}, "`max_stages` must be a whole number"),
        ({"devices": [1]}, r"`submeshes` has Submesh.*num_devices=2"),
        ({"link_s": np.zeros((3, 1, 2))}, r"`link_s` must have the shape \(3, 1, 1\)"),
        ({"stage_s": lambda _: np.zeros((3, 3, 1))}, r"`stage_s` must return the shape \(3, 4, 1\)"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    arguments = {
        "num_layers": 3, "devices": [2], "submeshes": [Submesh(0, 2)], "stage_s": lambda _: np.zeros((3, 4, 1)),
        "link_s": np.zeros((3, 1, 1)), "objective": bottleneck_objective(), "max_stages": 2,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        best_division(**{**arguments, **change})


def test_no_device_stays_idle_unless_that_is_allowed():
    """One layer that two devices compute more slowly than one."""
    table, no_link = np.full((1, 2, 2), np.inf), np.zeros((1, 2, 2))
    table[0, 1] = [1.0, 5.0]
    problem = 1, [2], [Submesh(0, 1), Submesh(0, 2)], lambda _: table, no_link, bottleneck_objective()
    divisions = [best_division(*problem, max_stages=1), best_division(*problem, max_stages=1, use_all_devices=False)]
    assert [None if d is None else (d.value, d.stages) for d in divisions] == [
        (5.0, (Stage(0, 1, 1),)),
        (1.0, (Stage(0, 1, 0),)),
    ]


@pytest.mark.parametrize("schedule", ["1f1b", "eager", "gpipe"])
def test_a_step_takes_no_less_than_its_objective_whatever_the_stages_take(schedule: Schedule):
    rng = np.random.default_rng(0)
    for _ in range(40):
        num_stages, count = int(rng.integers(1, 6)), int(rng.integers(1, 20))
        seconds, sends = rng.uniform(0.1, 3, num_stages), rng.uniform(0, 1, num_stages - 1)
        ends = rng.uniform(0, 5, num_stages)
        objective = step_objective(count, partial(kept_microbatches, schedule, num_microbatches=count))
        assert objective.wait is not None
        stages = seconds + ends / count + 1j * seconds
        value = later_s = 0.0
        for i in reversed(range(num_stages)):
            value = max(objective.fold(stages[i], value), objective.wait(num_stages - i, stages[i], later_s))
            later_s += seconds[i]
            if i:
                value, later_s = objective.join(2 * sends[i - 1], value), later_s + 2 * sends[i - 1]
        times = StageTimes(seconds / 3, seconds * 2 / 3, sends, sends)
        assert value <= simulate(times, graph_of(schedule, num_stages, count)).step_s + ends.max() + 1e-9


def test_a_slow_first_stage_waits_for_the_others():
    """Five micro-batches of 16 are under way while the first of them goes through the later stages."""
    objective = step_objective(16, lambda left: left)
    assert objective.wait is not None
    seconds = np.array([1.1, 1.0, 0.9, 0.9, 0.8])
    bound_s = float(objective.wait(5, 1.1 + 1.1j, seconds[1:].sum()))
    zeros = np.zeros(4)
    simulated_s = simulate(StageTimes(seconds / 3, seconds * 2 / 3, zeros, zeros), graph_of("1f1b", 5, 16)).step_s
    assert 0.97 * simulated_s <= bound_s <= simulated_s


def test_a_pipeline_of_equal_stages_waits_for_its_links():
    objective = step_objective(64, lambda left: left)
    assert objective.wait is not None
    bound_s = float(objective.wait(4, 3.0 + 3.0j, 9.0 + 6.0))
    simulated_s = simulate(StageTimes([1] * 4, [2] * 4, [1] * 3, [1] * 3), graph_of("1f1b", 4, 64)).step_s
    assert 0.95 * simulated_s <= bound_s <= simulated_s

"""Pipelines whose devices hold several stages are searched, shown, saved, applied, and compute what one device does."""

import re
from dataclasses import replace

import jax
import pytest

import diffshard
from diffshard.base import PlanError
from diffshard.pipelines.even_division import EvenDivisionSearch
from diffshard.pipelines.plans.consistency import from_json, to_json
from tests.diffshard.pipelines.small_pipeline import arguments, check_close, train_step
from tests.diffshard.pipelines.small_pipeline_plan import GIB, small_pipeline_plan, stage


@pytest.mark.parametrize(
    ("schedule", "num_stages", "in_flight"),
    [("interleaved", 4, [4, 3, 2, 1]), ("zb-h1", 2, [2, 2]), ("zb-v", 4, [4, 3, 2, 1])],
)
def test_a_searched_pipeline_has_the_results_of_one_device(schedule, num_stages, in_flight, tmp_path, monkeypatch):
    args, cluster = arguments(), diffshard.Cluster.from_devices(jax.devices(), hardware="h100")
    pipeline = diffshard.Pipeline(microbatches=4, schedules=(schedule,), max_stages=num_stages, residuals=("keep",))
    leave_two_devices(monkeypatch)
    step = diffshard.search(train_step, cluster, pipeline=pipeline)
    plan = step.plan(*args)
    assert (plan.schedule, plan.stages_per_device, len(plan.stages)) == (schedule, num_stages // 2, num_stages)
    assert [stage.in_flight for stage in plan.stages] == in_flight
    assert {stage.devices for stage in plan.stages} == {(0, 1, 2, 3), (4, 5, 6, 7)}
    assert any(stage.weights_s > 0 for stage in plan.stages) == (schedule != "interleaved")
    assert plan.lower_bound_s <= plan.step_s
    expected = jax.jit(train_step)(*args)
    for _ in range(2):
        found = step(*args)
        check_close(found, expected)
        args, expected = (found[0], args[1]), jax.jit(train_step)(expected[0], args[1])
    plan.save(tmp_path / "plan.json")
    applied = diffshard.PipelinePlan.load(tmp_path / "plan.json").apply(train_step, cluster)
    check_close(applied(*args), expected)


def leave_two_devices(monkeypatch):
    """Leaves two halves of the devices: one stage on all of them would be faster for a small model."""
    places = EvenDivisionSearch.places
    monkeypatch.setattr(EvenDivisionSearch, "places", lambda self: [one for one in places(self) if one[0] == 2])


def interleaved_plan(**changes):
    """Four stages on two halves of four devices; a micro-batch takes 1 ms forward and 2 ms backward in each of them.

    Two devices of 4 micro-batches are busy for 24 ms and wait for 3 ms; then they update two stages, 1 ms each.
    """
    stages = [
        replace(
            stage(0, ((0, 1), (2, 3))[i % 2], "A100-80GB", ()),
            first_layer=i,
            last_layer=i,
            in_flight=4 - i,
            peak_bytes=GIB,
            memory_limit_bytes=8 * GIB,
            forward_s=1e-3,
            backward_s=2e-3,
            send_forward_s=0.0,
            send_backward_s=0.0,
            end_s=1e-3,
        )
        for i in range(4)
    ]
    fields = {"num_layers": 4, "num_devices": 4, "schedule": "interleaved", "stages_per_device": 2}
    times = {"step_s": 29e-3, "bubble": 3 / 27, "lower_bound_s": 26e-3}
    return small_pipeline_plan(**{"stages": tuple(stages), **fields, **times, "tried": (), **changes})


def test_a_plan_shows_the_gradients_of_weights_that_are_computed_apart():
    """With the times of above, 1 ms of the backward operation for the weights, ZB-V waits 1 ms for the first one."""
    whole = interleaved_plan()
    folded = [replace(s, backward_s=1e-3, weights_s=1e-3, devices=whole.stages[d].devices, in_flight=k) for s, d, k in
              zip(whole.stages, (0, 1, 1, 0), (4, 3, 2, 1), strict=True)]  # fmt: skip
    plan = interleaved_plan(schedule="zb-v", stages=tuple(folded), step_s=27e-3, bubble=1 / 25)
    assert from_json(to_json(plan), "plan", diffshard.PipelinePlan) == plan
    assert "weights" in str(plan)
    assert re.search(r"stage +forward +backward +weights +send on", str(plan))
    assert len(re.findall("title=.gradients of weights of micro-batch", plan.html())) == 4 * 4


def test_a_page_has_a_row_for_each_device_with_all_of_its_stages():
    page = interleaved_plan().html()
    titles = re.findall("<div class=title>(.*?) <span class=dim>(.*?)</span>", page)
    assert titles == [
        (f"stages {i}, {i + 2}", f"layers {i}, {i + 2}, 2 x A100-80GB, waits 11% of the time") for i in (0, 1)
    ]
    assert "1&#x27;: of a device" in page or "1': of a device" in page
    assert len(re.findall("forward of micro-batch 3", page)) == 4
    assert from_json(to_json(interleaved_plan()), "plan", diffshard.PipelinePlan) == interleaved_plan()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages_per_device": 4}, r"`stages\[1\].devices` must be \(0, 1\) with 'interleaved'"),
        (
            {"stages": (*interleaved_plan().stages[:3], replace(interleaved_plan().stages[3], weights_s=1e-3))},
            "weights_s",
        ),
        ({"schedule": "1f1b"}, "`stages_per_device` must be 1 with '1f1b', not 2"),
        ({"num_microbatches": 5}, "`num_microbatches` must be a multiple of the 2 devices"),
        ({"stages": interleaved_plan().stages[:2] + interleaved_plan().stages[:1:-1]}, "must begin with layer 2"),
        (
            {"stages": tuple(replace(s, devices=(i, i + 4)) for i, s in enumerate(interleaved_plan().stages))},
            r"stages\[2\]",
        ),
    ],
)
def test_a_damaged_plan_is_refused(changes, message):
    with pytest.raises(PlanError, match=message):
        from_json(to_json(interleaved_plan(**changes)), "plan", diffshard.PipelinePlan)


def test_a_cluster_without_equal_parts_is_refused():
    cluster = diffshard.Cluster.from_devices(jax.devices()[:1], hardware="h100")
    pipeline = diffshard.Pipeline(microbatches=4, schedules=("interleaved", "zb-v"))
    with pytest.raises(ValueError, match=r"need equal parts of the cluster .* 1 devices and 7 layers"):
        diffshard.search(train_step, cluster, pipeline=pipeline).plan(*arguments())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages_per_device": 1}, "`Pipeline.stages_per_device` must be whole numbers, 2 or more, not 1"),
        ({"stages_per_device": ()}, "`Pipeline.stages_per_device` must be whole numbers, 2 or more"),
        ({"max_stages": 3}, "`Pipeline.max_stages` must be 4 or more with the schedule 'interleaved'"),
        ({"microbatches": (1, 5)}, "`Pipeline.microbatches` must have a multiple of 2 to 4 devices"),
        ({"schedules": ("zb-h1",), "residuals": ("keep", "offload")}, "`Pipeline.residuals` must not have 'offload'"),
        ({"schedules": ("zb-v",), "max_stages": 3}, "`Pipeline.max_stages` must be 4 or more with the schedule 'zb-v'"),
        ({"max_replicas": 2}, "`Pipeline.max_replicas` must be 1 with the schedule 'interleaved'"),
    ],
)
def test_options_that_no_interleaved_pipeline_can_have_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        diffshard.Pipeline(**{"schedules": ("1f1b", "interleaved"), **options})

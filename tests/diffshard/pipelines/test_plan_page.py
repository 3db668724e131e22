"""A plan of a pipeline as a page: the schedule to scale, the stages and their arguments."""

import dataclasses
import html
import re

import jax
import pytest

import diffshard
from diffshard.pipelines.plans.consistency import check_pipeline_plan, simulated
from diffshard.pipelines.plans.schedule_drawing import Exchange, schedule_elements
from tests.diffshard.pipelines.small_pipeline_plan import small_pipeline_plan
from tests.diffshard.plans.page_checker import checked_page

_BOX = re.compile(r'left:([\d.]+)%;width:([\d.]+)%[^>]*title="([^"]*)"')


def boxes(plan, exchange=None, seconds=0.0, scale_s=None):
    """What the drawing has: kind and micro-batch, start and seconds; `scale_s` is what the whole width is taken for."""
    found, scale_s = _BOX.findall(schedule_elements(plan, exchange, seconds)), scale_s or seconds or plan.step_s
    return [(title.split(":")[0], float(left) * scale_s / 100, float(width) * scale_s / 100)
            for left, width, title in found]  # fmt: skip


def with_microbatches(count):
    """The small plan with another number of micro-batches, and the times that follow."""
    plan = small_pipeline_plan(num_microbatches=count, tried=())
    step = simulated(plan)
    simulation, step_s = step.simulation, step.step_s
    plan = dataclasses.replace(plan, step_s=step_s, bubble=simulation.bubble)
    check_pipeline_plan(plan)
    return plan


def test_boxes_are_where_the_simulation_has_them():
    plan = small_pipeline_plan()
    drawn = boxes(plan)
    expected = [("forward of micro-batch 0", 0.0, 3e-3), ("backward of micro-batch 3", 60e-3, 6e-3)]
    expected += [("sending on of micro-batch 0", 3e-3, 1e-3), ("end of step", 66e-3, 2e-3)]
    for box in expected:
        assert any(box[0] == name and box[1:] == pytest.approx(times, abs=2e-6) for name, *times in drawn), box
    for kind, number in (("forward", 12), ("backward", 12), ("sending on", 8), ("sending back", 8), ("end of step", 2)):
        assert sum(name.startswith(kind) for name, *_ in drawn) == number


def test_a_replica_is_drawn_from_when_it_has_the_weights_to_the_scale_of_the_step():
    plan = small_pipeline_plan()
    drawn = boxes(plan, Exchange(10e-3, 5e-3), 2 * plan.step_s)
    last_s = 10e-3 + simulated(plan).simulation.step_s
    end_s = 2 * plan.step_s - max(stage.end_s for stage in plan.stages)
    expected = [("weights arrive", 0.0, 10e-3), ("forward of micro-batch 0", 10e-3, 3e-3)]
    expected += [("sums are sent", last_s, 5e-3), ("end of step", end_s, 2e-3)]
    for name, *times in expected:
        assert any(box[0] == name and box[1:] == pytest.approx(times, abs=4e-6) for box in drawn), name


@pytest.mark.parametrize("overlap", ["own_ends", "late_ends"])
def test_of_steps_that_overlap_one_is_drawn_with_pale_parts_of_others(overlap):
    plan = small_pipeline_plan(schedule="2bw", overlap=overlap, tried=())
    drawn = boxes(plan, scale_s=1.0)
    own = [name for name, *_ in drawn if "another step" not in name]
    kinds = ("forward of micro-batch", "backward of micro-batch", "sending on", "end of step")
    assert [sum(name.startswith(kind) for name in own) for kind in kinds] == [12, 12, 8, 2]
    assert {"forward of micro-batch 0 of another step", "backward of micro-batch 3 of another step"} <= {
        name for name, *_ in drawn
    }
    assert all(start >= -1e-4 and start + seconds <= 1 + 1e-4 for _, start, seconds in drawn)
    assert "pale: of the steps before and after" in plan.html()


def test_boxes_of_many_microbatches_are_joined():
    drawn = boxes(with_microbatches(2000))
    assert {name for name, *_ in drawn} == {"many operations", "end of step"}
    assert len(drawn) < 4000


def test_the_page_is_well_formed_and_has_everything():
    plan = small_pipeline_plan(function="<train>")
    page = checked_page(plan.html())
    text = html.unescape(" ".join(page.texts))
    expected = (
        "<train> in 3 stages on 8 devices",
        "stage 1, layers 4-7",
        "3 x 1.00 GiB",
        "state[0]/up",
        "x+y",
        "1.00 MiB",
    )
    for words in (*expected, "nothing fits", "A note about <this> plan.", "As text"):
        assert words in text, words
    assert "http" not in plan.html().replace("http-equiv", "")
    frames = [attributes["srcdoc"] for tag, attributes in checked_page(plan._repr_html_()).elements if tag == "iframe"]
    assert frames == [plan.html()]


def test_one_stage_without_notes_and_arguments_has_a_page():
    stage = dataclasses.replace(
        small_pipeline_plan().stages[2], first_layer=0, last_layer=3, arguments=(), memory_limit_bytes=float("inf")
    )
    plan = small_pipeline_plan(stages=(stage,), num_layers=4, notes=(), tried=(), step_s=0.03, bubble=0.0)
    plan = dataclasses.replace(plan, lower_bound_s=0.03)
    check_pipeline_plan(plan)
    text = " ".join(checked_page(plan.html()).texts)
    assert "in 1 stage on" in text
    assert "sending" not in text
    assert "Notes" not in text


def test_a_pipelined_function_says_what_it_is_for():
    def step(w, x):
        return w - x.sum()

    cluster = diffshard.Cluster.from_devices(jax.devices()[:2], hardware="h100")
    pipelined = diffshard.search(step, cluster, pipeline=diffshard.Pipeline())
    assert repr(pipelined) == "<PipelinedFunction step as a pipeline on 2 devices, 1 x 2 H100-80GB, 0 plans>"
    assert "Not planned yet" in pipelined._repr_html_()

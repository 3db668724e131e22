"""A plan of a pipeline as text."""

import dataclasses

from diffshard.pipelines.plans.text import short_source
from diffshard.plans.printing import TEXT_WIDTH
from tests.diffshard.pipelines.small_pipeline_plan import small_pipeline_plan

EXPECTED = """\
Pipeline of train_step: 3 stages on 8 devices, 1 hosts of 4 x A100-80GB, 2 hosts of 2 x T4-16GB

  step      68.0 ms predicted: in 43% of their time the stages wait (bubble)
  schedule  4 micro-batches, 1f1b: forward and backward operations alternate
  gradients reduced in each micro-batch
  bound     60.0 ms, gap 12%: at most 12% of the step could be saved by another pipeline that keeps
            its residuals
  search    3.20 s

Stages: 12 layers

  stage  layers  begins at              devices             mesh       memory of a device
      0  0-3     model.py:10 (loss_fn)  0-3: 4 x A100-80GB  x 2 x y 2  12.0 GiB of 16.0 GiB (75%)
      1  4-7     model.py:11 (loss_fn)  4-5: 2 x T4-16GB    x 2 x y 1  8.00 GiB of 16.0 GiB (50%)
      2  8-11    model.py:12 (loss_fn)  6-7: 2 x T4-16GB    x 2 x y 1  4.00 GiB of 16.0 GiB (25%)

One micro-batch on each stage; how many are in flight, with what each keeps; all of them

  stage  forward  backward  send on  send back  in flight     all of them    end of step
      0  3.00 ms   6.00 ms  1.00 ms    2.00 ms  3 x 1.00 GiB  36.0 ms (53%)          0 s
      1  4.00 ms   8.00 ms  1.00 ms    1.00 ms  2 x 1.00 GiB  48.0 ms (71%)      1.00 ms
      2  2.00 ms   5.00 ms                      1 x 1.00 GiB  28.0 ms (41%)      2.00 ms

Tried: seconds of a step, before the programs of the stages were planned one by one

  micro-batches          1f1b    eager
              4       65.0 ms  70.0 ms
              8  nothing fits  80.0 ms

Notes
  A note about <this> plan."""


def test_the_text_has_stages_times_and_what_was_tried():
    assert str(small_pipeline_plan()) == EXPECTED


def test_a_plan_is_one_line_where_values_are_shown():
    assert repr(small_pipeline_plan()) == (
        "<PipelinePlan of train_step: 3 stages on 8 devices, 1 hosts of 4 x A100-80GB, 2 hosts of 2 x T4-16GB: "
        "step 68.0 ms, memory 12.0 GiB, bound 60.0 ms, gap 12%>"
    )


def test_long_names_wrap():
    plan = small_pipeline_plan(function="train_step_" * 12, cluster="many hosts, " * 20, notes=("why " * 60,))
    stages = [dataclasses.replace(stage, source=f"/a/{'folder' * 20}.py:3 (f)") for stage in plan.stages]
    stages[0] = dataclasses.replace(stages[0], hardware="a device with a very long name " * 3)
    lines = str(dataclasses.replace(plan, stages=tuple(stages))).splitlines()
    assert max(map(len, lines)) <= TEXT_WIDTH


def test_idle_devices_and_gaps_of_devices_are_shown():
    plan = small_pipeline_plan(num_devices=10)
    stages = (dataclasses.replace(plan.stages[0], devices=(0, 1, 8, 9)), *plan.stages[1:])
    text = str(dataclasses.replace(plan, stages=stages))
    assert "3 stages on 8 of 10 devices" in text
    assert "0, 1, 8, 9: 4 x" in text


def test_no_bound_and_no_gap_are_said():
    assert "no bound was reached" in str(small_pipeline_plan(lower_bound_s=0.0))
    assert "no pipeline that keeps its residuals" in str(small_pipeline_plan(lower_bound_s=0.068))


def test_sources_are_short():
    assert short_source("/home/me/model.py:10 (train_step.<locals>.loss_fn)") == "model.py:10 (loss_fn)"
    assert short_source("C:\\me\\model.py:10 (f)") == "model.py:10 (f)"
    assert short_source("") == ""

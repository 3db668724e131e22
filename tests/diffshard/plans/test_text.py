"""The printed table, number by number on a plan made by hand."""

import math
from dataclasses import replace

import pytest

from diffshard.plans.printing import format_spec
from diffshard.plans.summary import alike_arguments, collective_totals, dearest_operations, device_bytes
from diffshard.plans.text import format_plan
from tests.diffshard.plans.small_files import full_plan
from tests.diffshard.plans.small_plan import small_plan

TEXT = """\
Plan of train_step on 8 devices (data 2 x model 4), toy

  step     10.0 ms predicted: computing 6.00 ms, communicating 4.00 ms
          products 4.00 ms at 50% of the peak rate of arithmetic
          memory traffic 2.00 ms at 25% of the peak bandwidth
          all_reduce  data   2x  1.00 KiB  3.00 ms
          all_gather  model  1x  2.00 KiB  1.00 ms
  memory   1.00 KiB at the peak on each device of 4.00 KiB (25%)
  bound    9.00 ms, gap 10%: the best that the solver found, at most 10% of it could be saved
  search   1.50 s, solver gradient, finished

Arguments: 3 arrays, 2.50 KiB, of which a device holds 768 B

  name                 type            sharding  device  next best, what it adds
  state/layer_*/w  2x  float32[16,16]  ·, model   512 B  replicated: +2.00 ms
  batch                float32[32,4]   data, ·    256 B  given

Operations: 5, the 3 most expensive kinds in order; the first takes 70% of the step

  name                                 result          sharding       takes  next best, what it adds
  backward Net/layer_*/dense/      2x  float32[32,16]  data, ·      4.00 ms  no other
    dot_general
    + all_reduce data                                               3.00 ms
  Net/layer_*/dense/dot_general    2x  float32[32,16]  data, model  2.00 ms  no other
  scale/add                            float32[16,16]  ·, model              no other
    + all_gather model                                              1.00 ms

Notes
  frobnicate has no sharding rule and runs whole on every device (1x, <net>.py:3)."""


HEAD_OF_ALL = """
  advice   1.00 ms less: donate `state`
           512 B less

  step     10.0 ms predicted: computing 6.00 ms, communicating 4.00 ms
          products 4.00 ms at 50% of the peak rate of arithmetic
          memory traffic 2.00 ms at 25% of the peak bandwidth
          all_reduce  data   2x  1.00 KiB  3.00 ms
          all_gather  model  1x  2.00 KiB  1.00 ms
  whole    25% of computing is repeated on several devices, as it cannot be split
           1.50 ms: dimension 0 of batch is 31, which the mesh axis does not divide ('data');
             padded to 32 it can be split
  memory   1.00 KiB at the peak on each device of 4.00 KiB (25%)
  remat    256 B kept from forward to backward, 128 B offloaded to the host's memory, 1 operation
           computed again
  searched energy_j 12.5, bound 12 if it is convex, gap 4%
  search   1.50 s, solver gradient, finished
  mesh     the best of 2 shapes
           data 8  at least 9.50 ms, cut off
"""
TAIL_OF_ALL = """
From forward to backward: what is kept, offloaded to the host or computed again, with the bytes that keeping takes

  name               how         bytes    takes  line
  layer_*/dense  2x  recomputed  512 B  1.00 ms  net.py:7

Formats: products and sums in fewer bits, with what their group adds to the loss: +0.0007
  predicted of +0.001 that may be added; +0.0008 measured together by a batch

  name               in         loss    gains
  layer_*/dense  4x  float8  +0.0006  2.00 ms
  head           1x  own     +0.0005

Formats that were measured together, by a batch

  formats  rounded     step  predicted          measured
  float8         2  8.00 ms    +0.0007  +0.0008 ± 0.0002
  none           0  10.0 ms         +0                +0

train_step on 8 devices (data 2 x model 4), compiled for H100

                                  step                 sent                 peak
  plan             executor  predicted  timeline  predicted  compiled  predicted  compiled
  the plan (best)  program     10.0 ms   11.0 ms      512 B     600 B   1.00 KiB  1.07 KiB

  a note

Notes
"""
"""What the full plan says before its arguments and after its operations, worked out by hand."""


def test_each_number_of_the_plans_by_hand_is_in_its_place():
    assert format_plan(small_plan()) == TEXT
    of_all = format_plan(full_plan())
    middle = TEXT[TEXT.index("\nArguments") : TEXT.index("\nNotes")]
    assert of_all == TEXT.splitlines()[0] + "\n" + HEAD_OF_ALL + middle + TAIL_OF_ALL + TEXT.splitlines()[-1]


def test_a_plan_is_one_line_where_values_are_shown():
    one_line = "<Plan of train_step on data 2 x model 4: step 10.0 ms, memory 1.00 KiB, bound 9.00 ms, gap 10%>"
    assert repr(small_plan()) == one_line
    assert f"{[small_plan()]}" == f"[{one_line}]"
    assert repr(small_plan(lower_bound_s=-math.inf)).endswith("bound none>")


def test_groups_of_operations_have_all_seconds():
    groups = dearest_operations(small_plan())
    assert [round(g.compute_s + g.collective_s, 9) for g in groups] == [7e-3, 2e-3, 1e-3]
    assert sum(g.compute_s for g in groups) == pytest.approx(6e-3)
    assert sum(g.collective_s for g in groups) == pytest.approx(4e-3)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"status": "optimal", "lower_bound_s": 10e-3},
            "gap 0%: no plan in the search space is predicted to be",
        ),
        ({"status": "time limit"}, "the best found when the time limit came, at most 10%"),
        ({"status": "interrupted"}, "the best found when it was interrupted"),
        ({"lower_bound_s": -math.inf}, "bound    none: the best that the solver found; no"),
        ({"lower_bound_s": 0.0}, "bound    none: the best that the solver found; no"),
        ({"memory_limit_bytes": math.inf}, "memory   1.00 KiB at the peak on each device\n"),
    ],
)
def test_what_is_said_of_other_outcomes(changes, text):
    assert text in format_plan(small_plan(**changes))


def test_an_empty_plan_can_be_printed():
    empty = small_plan(
        arguments=(),
        outputs=(),
        operations=(),
        collectives=(),
        compute_s=0.0,
        peak_bytes=0.0,
        mesh_axes={"x": 1},
        notes=(),
    )
    assert "on 1 device (x 1)" in format_plan(empty)


def test_specs_and_bytes():
    plan = small_plan()
    assert format_spec(((), ())) == format_spec(()) == "replicated"
    assert format_spec((("data", "model"), (), ("pod",))) == "data+model, ·, pod"
    assert [device_bytes(plan, t) for t in plan.arguments] == [256, 256, 256]
    assert [g.members for g in alike_arguments(plan)] == [(0, 1), (2,)]
    assert [row[:2] for row in collective_totals(plan)] == [("all_reduce", "data"), ("all_gather", "model")]


def test_collectives_that_take_next_to_nothing_are_one_row():
    plan = small_plan()
    longest = max(plan.collectives, key=lambda c: c.seconds)
    tiny = [replace(longest, kind=kind, num_bytes=2.0, count=1, seconds=1e-15) for kind in ("all_to_all", "send")]
    few, *_ = collective_totals(replace(plan, collectives=(longest, *tiny)))
    assert (few.kind, few.axis) == (longest.kind, longest.axis)
    text = format_plan(replace(plan, collectives=(longest, *tiny)))
    assert "combined 2x 4 B < 1 ns" in " ".join(text.split())

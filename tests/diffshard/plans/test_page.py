"""The page holds what the plan says, needs nothing from elsewhere, and is well-formed."""

import dataclasses
import math
import re

import pytest

from diffshard.plans.layers import layer_of_scope, layers, layers_of_operations
from diffshard.plans.page import format_page
from diffshard.plans.page_elements import STYLE
from diffshard.plans.sections import Advice
from diffshard.plans.summary import modules_of
from diffshard.plans.text import format_plan
from tests.diffshard.plans.page_checker import checked_page
from tests.diffshard.plans.small_files import full_plan
from tests.diffshard.plans.small_plan import operation, small_plan


def checked(plan):
    return checked_page(format_page(plan))


def test_page_is_well_formed_and_self_contained():
    page = format_page(small_plan())
    assert not re.search(r"https?://|<script|<link|<img|url\(|@import", page)
    checked(small_plan())


PAGE = """
train_step on 8 devices
mesh data 2 × model 4 · toy · gradient solver, 1.50 s · gap 10%: the best that the solver found, \
at most 10% of it could be saved
10.0 ms|predicted step|40%|of it communicates|1.00 KiB|peak memory of a device: 25% of 4.00 KiB
10%|gap to the lower bound 9.00 ms
Time of a step
products |4.00 ms at 50% of the peak rate of arithmetic|memory traffic |2.00 ms at 25% of the peak bandwidth|\
all_reduce data |3.00 ms, 2×, 1.00 KiB|all_gather model |1.00 ms, 1×, 2.00 KiB
The most expensive operations
name|how many|result|sharding|takes|of the step|of it communicating
backward Net/|layer_*/|dense/|dot_general|2×|float32[32,16]|data, ·|7.00 ms|70%|3.00 ms for all_reduce data
Net/|layer_*/|dense/|dot_general|2×|float32[32,16]|data, model|2.00 ms|20%
scale/|add|float32[16,16]|·, model|1.00 ms|10%|1.00 ms for all_gather model
Memory of a device, of 4.00 KiB
arguments |768 B|made in the forward pass |256 B|In program order, the body of a loop once
peak 1.00 KiB|limit 4.00 KiB|layer_0|layer_1|layer_1|layer_0|update|start of the step|end, after 5 operations
forward|backward|update|What is in memory at the peak in Net/layer_1, forward
name|how many|type|made in|part|on a device|of the peak
state/layer_*/w|2×|float32[16, 16]|argument|1/4|512 B|50.0%
Net/layer_1/dense/dot_general|float32[32,16]|forward|1/8|256 B|25.0%
batch|float32[32, 4]|argument|1/2|256 B|25.0%
Layers
In one step, collectives move 3.00 KiB between layers and nothing inside them.
split over:\xa0|replicated|data|model|data + model
layer|arguments|forward|backward
arguments|batch|data, ·|256 B
Net/layer_* |× 2|3.00 ms computing|1.50 ms communicating|state/w|·, model|256 B
dense/dot_general|data, model|1.00 ms
dense/dot_general|data, ·|3.50 ms|all_reduce data
↓|to update, backward|all_reduce data| 2×, 1.00 KiB, 3.00 ms|\
↑|from update, update|all_gather model| 1×, 2.00 KiB, 1.00 ms
update|0 s computing|1.00 ms communicating|scale/add|·, model|1.00 ms|all_gather model
Arguments
name|how many|type|sharding|on a device|next best, what it adds
state/layer_*/w|2×|float32[16,16]|·, model|512 B|replicated: +2.00 ms
batch|float32[32,4]|data, ·|256 B|given
Search
10.0 ms|0 s|1.00 s|cost of the best plan|lower bound
Notes
frobnicate has no sharding rule and runs whole on every device (1x, <net>.py:3).
As text
"""
"""What the page of the plan by hand says from its beginning to the text, worked out by hand; | is between elements."""


def test_the_page_says_each_number_of_the_plan_in_its_place():
    (_, _, _, *texts, as_text, _) = checked(small_plan()).texts
    assert texts == [words for line in PAGE.strip().splitlines() for words in line.split("|")]
    assert as_text == format_plan(small_plan())


SECTIONS = """
12.5|energy_j, which was made small|10.0 ms
of it communicates|1.00 KiB|peak memory of a device: 25% of 4.00 KiB|4%|gap to the lower bound 12 of energy_j
Time of a step|products |4.00 ms at 50% of the peak rate of arithmetic|memory traffic |2.00 ms at 25% of the \
peak bandwidth|all_reduce data
25% of computing is repeated on several devices, as it cannot be split|1.50 ms: dimension 0 of batch is 31, which the \
mesh axis does not divide ('data'); padded to 32 it can be split
Memory of a device, of 4.00 KiB|arguments |768 B|made in the forward pass |256 B
peak 1.00 KiB|limit 4.00 KiB|layer_0|layer_1|layer_1|layer_0|update|start of the step|end, after 5 operations
What is in memory at the peak in Net/layer_1, forward
state/layer_*/w|2×|float32[16, 16]|argument|1/4|512 B|50.0%
Net/layer_1/dense/dot_general|float32[32,16]|forward|1/8|256 B|25.0%|batch|float32[32, 4]|argument|1/2|256 B|25.0%
Compiled for H100|11.0 ms|timeline of the best, the plan by program|10.0 ms|predicted for it|1.07 KiB
Timelines|the plan, program |11.0 ms|computing|waiting for communication
compute |busy 5.00 ms, 45% of the step|layer_0|0 s|11.0 ms
the plan (best)|program|10.0 ms|11.0 ms|512 B|600 B|1.00 KiB|1.07 KiB|a note|Number formats
layer_*/dense|4x|float8|+0.0006|2.00 ms|head|1x|own|+0.0005
float8|2|8.00 ms|+0.0007|+0.0008 ± 0.0002|none|0|10.0 ms|+0|+0
data 2 x model 4|10.0 ms|9.00 ms|finished|1.00 s|data 8|9.50 ms|cut off|100 ms|Layers
3.50 ms|all_reduce data|↓|to the next of them, forward|all_gather model| 1×, 2.00 KiB, 1.00 ms|↓|to update, backward
"""
"""Parts of the page of the plan that has everything, in order, worked out by hand."""


def test_the_page_of_a_plan_with_everything_says_each_number_in_its_place():
    text = "|".join(checked(full_plan()).texts)
    places = [text.find(f"|{line}") for line in SECTIONS.strip().splitlines()]
    assert -1 not in places
    assert places == sorted(places)
    styles = " ".join(a.get("style", "") for _, a in checked(full_plan()).elements)
    widths = [float(width) for width in re.findall(r"width:([\d.]+)%", styles)]
    expected = [40, 20, 30, 10, 100, 200 / 7, 100 / 7, 18.75, 6.25, *[20] * 5, 500 / 11, 600 / 11, 500 / 11, 100, 50]
    assert widths == pytest.approx(expected, abs=0.01)


def test_drawings_have_the_plan_s_numbers():
    found = checked(small_plan()).elements
    styles = [a["style"] for t, a in found if t == "i" and a.get("style", "").startswith("width")]
    widths = [float(style.split(":")[1].split("%")[0]) for style in styles]
    of_bars = [40, 20, 30, 10], [100, 200 / 7, 100 / 7], [18.75, 6.25], [50, 100]
    # time; operations of 7, 2 and 1 ms; memory; bytes that two collectives move
    assert widths == pytest.approx([width for bar in of_bars for width in bar], abs=0.01)
    costs, bounds = [a["d"] for t, a in found if t == "path" and a.get("class") != "mark"][-2:]  # after the memory's
    top = 1.1 * 12  # ms at the upper edge, of 200 units; the axis of time ends at 1 s, at 1000
    heights = [f"{200 * (1 - ms / top):.1f}" for ms in (12, 10, 8, 9)]
    assert costs == f"M200.0 {heights[0]}H1000.0V{heights[1]}H1000"
    assert bounds == f"M200.0 {heights[2]}H1000.0V{heights[3]}H1000"
    *_, mark = [a["d"] for t, a in found if t == "path" and a.get("class") == "mark"]
    assert mark == f"M0 {heights[1]}H1000"


def test_names_are_escaped():
    page = format_page(small_plan(function="<script>alert(1)</script>", notes=("<b>",)))
    assert "<script>" not in page
    assert "<b>&" not in page
    assert "&lt;b&gt;" in page


def test_equal_shardings_have_equal_colours():
    found = checked(small_plan())
    parts = [a["style"] for t, a in found.elements if a.get("class") == "part"]
    assert len(set(parts)) == 3  # model; data; data and model


def test_layers_follow_the_forward_pass_and_hold_all_seconds():
    found = layers(small_plan())
    assert sum(row.times * row.compute_s for row in found) == 6e-3
    assert abs(sum(row.times * row.collective_s for row in found) - 4e-3) < 1e-9
    (batch,) = [p for row in found for p in row.arguments if p.name == "batch"]
    assert batch.num_bytes == 256


def test_layers_that_differ_are_told_in_the_order_in_which_they_run():
    plan = small_plan()
    only_the_last = tuple(c for c in plan.collectives if c.operation == 5)
    names = [row.name for row in layers(small_plan(collectives=only_the_last)) if row.name.startswith("Net/")]
    assert names == ["Net/layer_0", "Net/layer_1"]


def test_equal_layers_are_told_once():
    (row,) = [r for r in layers(small_plan()) if r.name.startswith("Net/")]
    assert (row.name, row.times) == ("Net/layer_*", 2)
    assert (row.compute_s, row.collective_s) == (3e-3, 1.5e-3)


def test_operations_outside_modules_are_loss_or_update():
    assert layer_of_scope("transpose(jvp())") == ("loss", True)
    assert layer_of_scope("") == ("update", False)
    assert layer_of_scope("jvp(checkpoint)/Net/a/b")[0] == "Net/a"


def test_rematerialised_operations_belong_to_the_layer_whose_results_they_compute_again():
    scope = "transpose(jvp(Net))/jvp(Net)/rematted_computation/layer_0/dense"
    assert layer_of_scope(scope) == ("Net/layer_0", True)
    scanned = "jvp(Net)/layers.<lambda>/layers/dense"
    assert layer_of_scope(scanned) == ("Net/layers", False)
    assert modules_of("transpose(jvp(Net))/layers.<lambda>") == ("Net", "layers")
    repeated = "transpose(jvp(Net))/layers.<lambda>/layers.<lambda>/rematted_computation/layers/dense"
    assert modules_of(repeated) == ("Net", "layers", "dense")
    assert modules_of("Net/block/block/sin") == ("Net", "block", "block", "sin")


def test_a_loop_belongs_to_the_layer_of_its_body():
    kinds_and_scopes = [
        ("operation", "layers/dense"),  # moved out of the loop
        ("operation", "jvp(Net)/embed"),
        ("carry", "jvp(Net)"),
        ("slice", "jvp(Net)"),
        ("operation", "jvp(Net)/layers/dense"),
        ("stack", "jvp(Net)"),
        ("operation", "jvp(Net)"),
    ]
    one = operation("add() -> float32[]", "", (), 1.0)
    operations = tuple(dataclasses.replace(one, kind=kind, scope=scope) for kind, scope in kinds_and_scopes)
    plan = small_plan(operations=operations, arguments=(), collectives=())
    layer, embed = "Net/layers", "Net/embed"
    assert layers_of_operations(plan) == [layer, embed, layer, layer, layer, layer, "Net"]
    assert {found.name for found in layers(plan)} == {layer, embed, "Net"}


def test_both_schemes_define_every_colour_that_a_page_names():
    page = format_page(small_plan())
    light, dark = STYLE.split("@media(prefers-color-scheme:dark)", 1)
    dark = dark.split("}}", 1)[0]
    named = set(re.findall(r"var\((--\w+)\)", page))
    assert len(named) > 5
    for name in named:
        assert f"{name}:" in light
        assert f"{name}:" in dark


def test_each_cell_has_the_title_of_its_column_for_narrow_screens():
    found = checked(small_plan())
    cells = [attributes for tag, attributes in found.elements if tag == "td"]
    assert cells
    assert {c["data-of"] for c in cells} == {
        "name", "how many", "type", "sharding", "on a device", "next best, what it adds",
        "result", "takes", "of the step", "of it communicating", "made in", "part", "of the peak",
    }  # fmt: skip


def test_pages_of_plans_without_limits_bounds_or_history():
    plan = small_plan(memory_limit_bytes=math.inf, lower_bound_s=-math.inf, history=(), notes=())
    checked(plan)


def test_the_sentence_about_the_gap_names_it():
    texts = checked_page(format_page(small_plan(status="optimal"))).texts
    assert any("gap 10%: no plan in the search space is predicted to be faster by more" in t for t in texts)


def test_the_most_expensive_operations_stand_first_and_stand_out():
    page = small_plan(advice=(Advice("1.00 ms less: donate `state`", 1e-3),)).html()
    found = checked(small_plan())
    (row,) = [attributes for tag, attributes in found.elements if tag == "tr" and attributes.get("class") == "dearest"]
    assert row
    first = page[page.index('tr class="dearest"') :].split("</tr>")[0]
    assert "<b>backward Net/<wbr>layer_*/<wbr>dense/<wbr>dot_general</b>" in first
    assert "70%" in first
    assert "3.00 ms for all_reduce data" in first
    assert "<li>1.00 ms less: donate <code>state</code></li>" in page

"""Lanes say what a timeline says, coarsely: every busy time is in a bar, and every pause that can be seen is kept."""

import re

import pytest

from diffshard.checks.kernel_work import INSIDE_HOST
from diffshard.checks.timeline import COMPUTE, Repetition, Span, Timeline
from diffshard.checks.timeline_lanes import MAX_BARS, RESOLUTION, lanes_of
from diffshard.plans.comparison import ComparedPlan, Comparison, page_elements
from diffshard.plans.json_values import from_json_values, to_json_values
from diffshard.plans.timeline import Lane, LaneBar, lane_elements
from tests.diffshard.plans.page_checker import checked_page


def timeline_of(*spans, step_s=None):
    """A timeline of spans."""
    busy_s = {}
    for span in spans:
        busy_s[span.resource] = busy_s.get(span.resource, 0.0) + span.end_s - span.start_s
    return Timeline(step_s or max(span.end_s for span in spans), busy_s, {}, spans)


def kernel(start_s, end_s, scope):
    """A kernel of the compute stream."""
    return Span("fusion", COMPUTE, start_s, end_s, f"jit(step)/call_exported/shard_map/{scope}/dot_general")


FORWARD, BACKWARD = "jvp(Net)/layer_0/dense", "transpose(jvp(Net))/jvp(Net)/layer_0/dense"
STEP = timeline_of(
    kernel(0.0, 1.0, FORWARD),
    kernel(1.0, 2.0, FORWARD),
    Span("g", INSIDE_HOST, 1.0, 3.5, transfer="all_gather data+model"),
    kernel(3.5, 6.0, BACKWARD),
    Span("copy", COMPUTE, 6.0, 6.5),
    kernel(6.5, 10.0, ""),
)


def test_kernels_join_by_layer_and_pass_and_waits_are_pauses():
    assert lanes_of(STEP) == (
        Lane(
            COMPUTE,
            8.5,
            (
                LaneBar("Net/layer_0", "forward", 0.0, 2.0, 2),
                LaneBar("Net/layer_0", "backward", 3.5, 6.5, 2),  # a copy without a name belongs to what it follows
                LaneBar("update", "update", 6.5, 10.0, 1),
            ),
        ),
        Lane(INSIDE_HOST, 2.5, (LaneBar("all_gather data+model", "all_gather", 1.0, 3.5, 1),)),
    )


def test_what_is_too_short_to_be_seen_joins_its_neighbour():
    short_s = RESOLUTION * 10 / 2
    lane, *_ = lanes_of(timeline_of(kernel(0.0, 5.0, FORWARD), kernel(5.0 + short_s, 5.0 + 2 * short_s, BACKWARD),
                                    kernel(5.0 + 2 * short_s, 10.0, BACKWARD)))  # fmt: skip
    assert [(bar.kind, bar.count) for bar in lane.bars] == [("forward", 2), ("backward", 1)]
    assert sum(bar.end_s - bar.start_s for bar in lane.bars) == pytest.approx(10.0)


def test_lanes_are_small_whatever_a_timeline_has():
    spans = [kernel(i + 0.0, i + 0.5, FORWARD if i % 2 else BACKWARD) for i in range(5000)]
    lane, *_ = lanes_of(timeline_of(*spans))
    assert 1 <= len(lane.bars) <= MAX_BARS
    assert sum(bar.count for bar in lane.bars) == 5000
    assert (lane.bars[0].start_s, lane.bars[-1].end_s) == (0.0, 4999.5)
    assert lane.busy_s == 2500


def test_trips_of_a_loop_are_drawn_one_by_one_and_very_many_as_one():
    trip = kernel(0.0, 1.0, FORWARD)

    def loop(times):
        repeats = Repetition(0, times, {COMPUTE: 2.0})
        more = Span(f"{times} more trips of w", COMPUTE, 1.0, 1.0 + 2.0 * times, repeats=repeats)
        lane, *_ = lanes_of(Timeline(more.end_s, {COMPUTE: times + 1.0}, {}, (trip, more)))
        return lane.bars

    assert [(bar.start_s, bar.end_s) for bar in loop(3)] == [(0.0, 1.0), (2.0, 3.0), (4.0, 5.0), (6.0, 7.0)]
    *_, last = loop(10**6)
    # The trip that is there by itself is too short to be seen beside a million.
    assert (last.label, last.kind, last.count) == ("1000000 more trips of w", "trips", 10**6 + 1)


def test_lanes_are_saved_and_read_back():
    lanes = lanes_of(STEP)
    assert from_json_values(tuple[Lane, ...], to_json_values(lanes)) == lanes


def test_a_bar_is_where_its_time_is():
    page = lane_elements(lanes_of(STEP), STEP.step_s)
    elements = checked_page(page).elements
    bars = [a for tag, a in elements if tag == "div" and a.get("style", "").startswith("left:")]
    places = [re.findall(r"(?:left|width):([\d.]+)%", a["style"]) for a in bars]
    assert [tuple(map(float, p)) for p in places] == [(0.0, 20.0), (35.0, 30.0), (65.0, 35.0), (10.0, 25.0)]
    assert bars[0]["title"] == "Net/layer_0, forward: 2 kernels, 2.00 s from 0 s"
    assert "busy 8.50 s, 85% of the step" in page
    assert "<span>10.0 s</span>" in page


def test_a_comparison_draws_the_best_program_and_the_others_behind_lines():
    def row(name, seconds, lanes):
        return ComparedPlan(name, "program", 1.0, seconds, 1.0, 1.0, 1.0, 1.0, 1.0, lanes=lanes)

    lanes = lanes_of(STEP)
    rows = (row("found", 10.0, lanes), row("fsdp", 12.0, lanes), row("failed", None, ()))
    page = "".join(page_elements(Comparison("step", {"data": 8}, "H100", rows)))
    checked_page(page)
    assert "What runs when in the best, found by program, 10.0 s" in page
    assert page.count("<details>") == 1
    assert page.count("class=lane>") == 4
    older = (row("found", 10.0, ()), row("fsdp", 12.0, ()))  # their programs have no timeline
    assert "What runs when" not in "".join(page_elements(Comparison("step", {"data": 8}, "H100", older)))

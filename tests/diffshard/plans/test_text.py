"""The printed table, number by number on a plan made by hand."""

import math

import pytest

from diffshard.plans.formats import format_spec
from diffshard.plans.summary import alike_arguments, collective_totals, dearest_operations, device_bytes
from diffshard.plans.text import format_plan
from tests.diffshard.plans.small_plan import small_plan


def line(text, *words):
    """The only line that holds all words."""
    (found,) = [x for x in text.splitlines() if all(word in x for word in words)]
    return found


def test_header_says_what_it_costs_and_how_good_it_is():
    text = format_plan(small_plan())
    assert text.splitlines()[0] == "Plan of train_step on 8 devices (data 2 x model 4), toy"
    assert "10.0 ms predicted: computing 6.00 ms, communicating 4.00 ms" in line(text, "step  ", "predicted")
    assert line(text, "all_reduce", "1.00 KiB").split() == ["all_reduce", "data", "2x", "1.00", "KiB", "3.00", "ms"]
    assert "1.00 KiB at the peak on each device of 4.00 KiB (25%)" in text
    assert "9.00 ms, gap 10%: the best that the solver found, at most 10% of it could be saved" in text
    assert "1.50 s, solver gradient, finished" in text


def test_a_plan_is_one_line_where_values_are_shown():
    one_line = "<Plan of train_step on data 2 x model 4: step 10.0 ms, memory 1.00 KiB, bound 9.00 ms, gap 10%>"
    assert repr(small_plan()) == one_line
    assert f"{[small_plan()]}" == f"[{one_line}]"
    assert repr(small_plan(lower_bound_s=-math.inf)).endswith("bound none>")


def test_equal_layers_are_one_row_with_the_reason():
    row = line(format_plan(small_plan()), "state/layer_*/w")
    assert row.split("  ")[-1] == "replicated: +2.00 ms"
    assert "2x" in row
    assert "·, model" in row
    assert "512 B" in row  # two arrays of 1024 bytes, in four parts
    assert line(format_plan(small_plan()), "batch").endswith("given")


def test_operations_are_grouped_and_their_communication_named():
    text = format_plan(small_plan())
    backward, forward = [i for i, row in enumerate(text.splitlines()) if "Net/layer_*/dense/" in row]
    rows = text.splitlines()
    assert rows[forward].split()[1:] == [
        "2x",
        "float32[32,16]",
        "data,",
        "model",
        "2.00",
        "ms",
        "no",
        "other",
    ]
    assert rows[backward].startswith("  backward Net")
    assert rows[backward].endswith("4.00 ms  no other")
    assert rows[backward + 1].split() == ["dot_general"]  # the end of a long name
    assert rows[backward + 2].split() == ["+", "all_reduce", "data", "3.00", "ms"]
    assert line(text, "all_gather model ").split() == ["+", "all_gather", "model", "1.00", "ms"]
    assert "\nOperations: 5, the 3 most expensive kinds in order; the first takes 70% of the step\n" in text
    groups = dearest_operations(small_plan())
    assert [round(g.compute_s + g.collective_s, 9) for g in groups] == [7e-3, 2e-3, 1e-3]
    assert sum(g.compute_s for g in groups) == pytest.approx(6e-3)
    assert sum(g.collective_s for g in groups) == pytest.approx(4e-3)


def test_notes_are_listed():
    assert "frobnicate has no sharding rule" in format_plan(small_plan())
    assert "Notes" not in format_plan(small_plan(notes=()))


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


def test_arguments_are_not_counted_as_operations():
    plan = small_plan()
    count = sum(operation.kind == "operation" for operation in plan.operations)
    assert 0 < count < len(plan.operations)
    assert f"\nOperations: {count}, the " in format_plan(plan)

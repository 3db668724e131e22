"""Everything that is printed fits 100 columns, and nothing of it is lost."""

import dataclasses
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffshard.command.line import main
from diffshard.plans.base import PredictedCollective, Tensor
from diffshard.plans.comparison import ComparedPlan, Comparison
from diffshard.plans.page import format_page
from diffshard.plans.printing import TEXT_WIDTH, format_table, wrapped
from tests.diffshard.bilevel_search.plans.test_plan import validated_plan
from tests.diffshard.plans.page_checker import checked_page
from tests.diffshard.plans.small_plan import small_plan

LONG = "encoder_decoder/stage_with_a_long_name/transformer_block/self_attention/query_projection"


def long_plan():
    plan = small_plan(notes=(f"{LONG} has no sharding rule and runs whole on every device ({LONG}.py:3).",))
    arguments = (dataclasses.replace(plan.arguments[0], path=f"state['{LONG}']['kernel']"), *plan.arguments[1:])
    operations = [dataclasses.replace(o, scope=f"jvp(Net)/{LONG}") for o in plan.operations]
    return dataclasses.replace(
        plan, arguments=arguments, operations=tuple(operations), status="optimal", lower_bound_s=9.7e-3
    )


def long_comparison():
    row = ComparedPlan(LONG, "constraints", 1e-3, 2e-3, 1e-3, 8e9, 8e9, 64e9, 64e9, notes=(f"{LONG} is long.",) * 2)
    return Comparison(f"module.{LONG}", {"data": 256, "model": 8, "pod": 4}, "NVIDIA H100 SXM 80GB", (row,))


def bilevel_plan():
    plan = validated_plan()
    nodes = tuple(node._replace(name=f"{LONG}/{node.name}") for node in plan.nodes)
    return plan._replace(nodes=nodes, notes=(f"{LONG}: the reduction stays exact and its bytes are not counted.",))


@pytest.mark.parametrize("shown", [long_plan(), long_comparison(), bilevel_plan()])
def test_what_is_printed_fits_and_keeps_its_words(shown):
    text = str(shown)
    assert max(map(len, text.splitlines())) <= TEXT_WIDTH == 100
    assert LONG in re.sub(r"\s", "", text)  # in the notes, which are sentences without columns beside them


@pytest.mark.parametrize("command", [(), ("search",), ("show",), ("solve",), ("compare",), ("diff",)])
def test_the_help_of_the_command_fits(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit, match="0"):
        main([*command, "--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= TEXT_WIDTH


def test_cells_wrap_at_parts_of_names_and_numbers_do_not():
    table = format_table(
        [("name", "bytes", "reason"), (LONG, "1.00 MiB", "replicated: " + "word " * 12)], "  ", right=(1,)
    )
    assert table[1].split()[:3] == ["encoder_decoder/stage_with_a_long_name/", "1.00", "MiB"]
    assert all(len(line) <= TEXT_WIDTH for line in table)
    assert "".join(line[2:45].strip() for line in table[1:]).startswith(LONG[:60])
    assert wrapped("one two", "- ") == ["- one two"]
    assert wrapped("x" * 150, "- ", "    ") == ["- " + "x" * 96, "    " + "x" * 54]


WORDS = st.sampled_from(["16.5 µs", "1.00 MiB", "needs", "model, ·", "9\u00a0ms", "x" * 40, "·", "12.3", "B"])
SPACES = st.sampled_from([" ", "  ", "\t", "\n", "\r\n", "\v", "\u00a0", "\u2003", "\u2028", " " * 99, ", ", "/", ""])
TEXTS = st.lists(st.one_of(WORDS, SPACES), max_size=60).map("".join)


@given(TEXTS)
@settings(max_examples=300, deadline=None)
def test_nothing_of_a_text_that_wraps_is_lost(text):
    for lines in (wrapped(text), wrapped(text, "  ", "      "), format_table([(text,)], "  ", wrap=(0,))):
        assert "".join("".join(lines).split()) == "".join(text.split())
        assert all(len(line) <= TEXT_WIDTH and len(line.splitlines()) <= 1 for line in lines)


@given(st.lists(st.tuples(TEXTS, st.sampled_from(["", "7.25 ms", "512 B"])), min_size=1, max_size=4))
@settings(max_examples=100, deadline=None)
def test_nothing_of_a_cell_beside_others_is_lost(rows):
    cells = [(text, number, "/ ".join(["encoder"] * 12)) for text, number in rows]
    whole = "".join("".join(format_table(cells, "  ", right=(1,), wrap=(2, 0))).split())
    assert sorted(whole) == sorted("".join("".join(map("".join, cells)).split()))


def test_numbers_of_cells_that_wrap_stay_with_their_units():
    reason = "replicated: the best split needs 12.3 MiB more than there is, and 4.56 ms more than this one + 16.5 µs"
    table = format_table([("name", "reason"), (LONG, reason)], "  ", wrap=(0,))
    text = " ".join(" ".join(line[30:].split()) for line in table)
    assert len(table) > 3
    assert all(number in text for number in ("12.3 MiB", "4.56 ms", "16.5 µs"))
    assert any("16.5 µs" in line for line in table)
    assert wrapped("tab\there " + "word " * 30)[0].startswith("tab here word")


def test_there_are_no_rows_of_nothing():
    plan = small_plan()
    arguments = (*plan.arguments, Tensor("of_no_rows", (0, 4), "float32", ((), ())))
    collectives = (
        *plan.collectives,
        PredictedCollective("all_to_all", "model", 0.25, 1.0, 0.0, 7, 0.0, made_by=5, read_by=7),
    )
    plan = dataclasses.replace(plan, arguments=arguments, collectives=collectives)
    words = [" ".join(str(plan).split()), " ".join(checked_page(format_page(plan)).texts)]
    for text in words:
        assert not re.search(r"(?<![\d.])0 B", text)
        assert "of_no_rows" not in text
        assert "all_to_all" not in text

"""Everything that is printed fits 100 columns, and nothing of it is lost."""

import dataclasses
import re

import pytest

from diffshard.command.line import main
from diffshard.plans.base import PredictedCollective, Tensor
from diffshard.plans.comparison import ComparedPlan, Comparison
from diffshard.plans.page import format_page
from diffshard.plans.text_table import TEXT_WIDTH, format_table, wrapped
from tests.diffshard.bilevel_search.plans.test_plan import proved_plan
from tests.diffshard.plans.page_checker import checked_page
from tests.diffshard.plans.small_plan import small_plan

LONG = "encoder_decoder/stage_with_a_long_name/transformer_block/self_attention/query_projection"


def long_plan():
    plan = small_plan(notes=(f"{LONG} has no sharding rule and runs whole on every device ({LONG}.py:3).",))
    arguments = (dataclasses.replace(plan.arguments[0], path=f"state['{LONG}']['kernel']"), *plan.arguments[1:])
    operations = [dataclasses.replace(o, scope=f"jvp(Net)/{LONG}") for o in plan.operations]
    return dataclasses.replace(plan, arguments=arguments, operations=tuple(operations), status="optimal", gap=0.03)


def long_comparison():
    row = ComparedPlan(LONG, "constraints", 1e-3, 2e-3, 1e-3, 8e9, 8e9, 64e9, 64e9, notes=(f"{LONG} is long.",) * 2)
    return Comparison(f"module.{LONG}", {"data": 256, "model": 8, "pod": 4}, "NVIDIA H100 SXM 80GB", (row,))


def bilevel_plan():
    plan = proved_plan()
    nodes = tuple(node._replace(name=f"{LONG}/{node.name}") for node in plan.nodes)
    return plan._replace(nodes=nodes, notes=(f"{LONG}: the reduction stays exact and its bytes are not counted.",))


@pytest.mark.parametrize("shown", [long_plan(), long_comparison(), bilevel_plan()])
def test_what_is_printed_fits_and_keeps_its_words(shown):
    text = str(shown)
    assert max(map(len, text.splitlines())) <= TEXT_WIDTH == 100
    assert LONG in re.sub(r"\s", "", text)  # in the notes, which are sentences without columns beside them


@pytest.mark.parametrize("command", [(), ("search",), ("show",), ("solve",)])
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


def test_there_are_no_rows_of_nothing():
    plan = small_plan()
    arguments = (*plan.arguments, Tensor("nothing", (0, 4), "float32", ((), ())))
    collectives = (
        *plan.collectives,
        PredictedCollective("all_to_all", "model", 0.25, 1.0, 0.0, 7, made_by=5, read_by=7),
    )
    plan = dataclasses.replace(plan, arguments=arguments, collectives=collectives)
    words = [" ".join(str(plan).split()), " ".join(checked_page(format_page(plan)).texts)]
    for text in words:
        assert not re.search(r"(?<![\d.])0 B", text)
        assert "nothing" not in text
        assert "all_to_all" not in text

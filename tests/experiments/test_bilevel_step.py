"""The experiment that trains with formats while they are chosen prints its tables for a tiny model."""

from experiments.bilevel_step import main


def test_formats_that_are_found_stand_beside_rules_with_what_searching_costs(capsys):
    words = "--sizes small --products float8 --hardware h100 --updates 12 --steps 4 --seeds 2 --budgets 0.5"
    assert main(words.split()) == 0
    text = capsys.readouterr().out
    assert "found within budgets in 12 updates" in text
    rows = [line.split() for line in text.splitlines() if line.startswith("0.5  found")]
    assert len(rows) >= 1
    assert "times the step" in text
    assert text.count("temporary bytes") == 3

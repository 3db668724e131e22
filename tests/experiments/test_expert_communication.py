"""The experiment of what a layer of experts sends, compiled for host devices."""

import pytest

from experiments import expert_communication
from tests.experiments.printed_tables import printed_rows


def test_layout_sends_what_the_formula_charges(capsys):
    expert_communication.main(["--tokens", "64", "--width", "64"])
    rows = printed_rows(capsys.readouterr().out)
    sent = {(row[0], row[1]): [float(cell or 0) for cell in row[2:7]] for row in rows}
    all_to_all, *_, reduced = sent["2 groups of 4", "predicted"]
    assert all_to_all > 0
    assert sent["2 groups of 4", "layout"] == pytest.approx([all_to_all, 0, 0, 0, reduced], abs=0.11)
    assert sum(sent["2 groups of 4", "jit, arguments"]) > 1.5 * (all_to_all + reduced)
    unequal = sent["groups of 3 and 5", "layout"]
    assert unequal[0] == 0  # all of it by permutes
    assert unequal[1] > sent["groups of 3 and 5", "predicted"][0]

"""The experiment that feeds loads of experts back to their assignment, for a few steps."""

import re

from experiments import expert_loads
from tests.experiments.printed_tables import printed_rows


def test_moved_experts_learn_the_same_and_end_no_later(capsys):
    words = "--steps 5 --every 2 --experts 8 --room 4 --tokens 64 --width 8"
    expert_loads.main(words.split())
    printed = capsys.readouterr().out
    rows = printed_rows(printed)
    assert [row[0] for row in rows] == ["2", "4"]
    for row in rows:
        before, after, bound = map(float, row[2:5])
        assert bound <= after <= before
    assert int(rows[0][5]) > 0
    apart = re.search(r"moves (\S+) apart", printed)
    assert apart is not None
    assert float(apart[1]) < 1e-4

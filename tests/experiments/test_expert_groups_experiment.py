"""The experiment of expert groups on its smallest clusters."""

import pytest

from experiments import expert_groups
from tests.experiments.printed_tables import printed_rows


def test_prints_milliseconds_beside_the_bound(capsys):
    expert_groups.main(
        ["--workers", "6", "--seeds", "1", "--experts", "6", "--few", "5", "--few-experts", "4", "--assignments", "8x4"]
    )
    rows = printed_rows(capsys.readouterr().out)
    groups, few, *assignments = rows
    assert list(groups[:2]) == ["6", "0"]
    ours, merging, equal, bound = map(float, groups[3:7])
    assert bound <= ours <= min(merging, equal)
    assert list(few[:3]) == ["5", "4", "0"]
    exact, solved, bound, ratio = map(float, few[4:8])
    assert bound == exact <= solved
    assert ratio == pytest.approx(solved / exact, abs=1e-3)
    assert len(assignments) == 1
    for row in assignments:
        ours, greedy, bound = map(float, row[3:6])
        assert bound <= ours <= greedy

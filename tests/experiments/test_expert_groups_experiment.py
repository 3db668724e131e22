"""The experiment of expert groups on its smallest clusters."""

from experiments import expert_groups
from tests.experiments.printed_tables import printed_rows


def test_prints_milliseconds_beside_the_bound(capsys):
    expert_groups.main(["--workers", "6", "--seeds", "1", "--experts", "6", "--assignments", "8x4"])
    rows = printed_rows(capsys.readouterr().out)
    groups, *assignments = rows
    assert list(groups[:2]) == ["6", "0"]
    ours, merging, equal, bound = map(float, groups[3:7])
    assert bound <= ours <= min(merging, equal)
    assert len(assignments) == 1
    for row in assignments:
        ours, greedy, bound = map(float, row[3:6])
        assert bound <= ours <= greedy

"""Groups of devices in every spelling of XLA."""

import pytest

from diffshard.checks.hlo import replica_groups

BY_MODEL = [[0, 1, 2, 3], [4, 5, 6, 7]]
BY_DATA = [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", BY_MODEL),
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}, dimensions={0}", BY_DATA),
        ("replica_groups={}, to_apply=%add", [list(range(8))]),
        ("replica_groups=[2,4]<=[8]", BY_MODEL),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", BY_DATA),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", BY_MODEL),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}", BY_DATA),
        ("replica_groups=mesh['a'=8] {'a'}", [list(range(8))]),
        ("replica_groups=mesh['a'=8] {'a':(2)4}", BY_MODEL),
        ("replica_groups=mesh['a'=8] {'a':(1)2}", BY_DATA),
        ("replica_groups=mesh['x'=1,'y'=4,'z'=2], device_ids=([2,4]T(1,0)) {'z'}", BY_DATA),
        ("replica_groups=mesh['y'=2,'z'=2], device_ids=(3,1,2,0) {'z'}", [[3, 1], [2, 0]]),
    ],
)
def test_replica_groups_in_each_spelling(text, expected):
    assert replica_groups(f"channel_id=1, {text}, metadata={{}}", 8) == expected


def test_an_unknown_spelling_is_refused():
    with pytest.raises(ValueError, match="known spelling"):
        replica_groups("replica_groups=~everyone", 8)

"""Seconds of the collectives inside a custom call, by hand."""

import pytest

from search_spaces.sharding.own_collectives import OwnCollective, PricedCollective, priced

OVERLAPPED = OwnCollective("collective_permute", 0, 100.0, 3, True)
LAST = OwnCollective("all_reduce", 0, 10.0, 1, False)


@pytest.mark.parametrize(
    ("permute_s", "exposed_s"),
    [
        (3.0, 3 * (3.0 - 2.0)),  # each of three rounds takes a second longer to send than to compute
        (2.0, 0.0),
        (0.5, 0.0),
    ],
)
def test_a_round_takes_the_longer_of_sending_and_computing(permute_s, exposed_s):
    """Four rounds of two seconds; what is sent after the last one is waited for."""
    seconds = {"collective_permute": permute_s, "all_reduce": 5.0}
    permute, reduce = priced([OVERLAPPED, LAST], 8.0, lambda collective: seconds[collective.kind])
    assert permute == (OVERLAPPED, 3 * permute_s, pytest.approx(exposed_s))
    assert reduce == PricedCollective(LAST, 5.0, 5.0)


def test_without_anything_beside_there_is_one_round():
    assert priced([LAST], 8.0, lambda _: 5.0) == [PricedCollective(LAST, 5.0, 5.0)]
    assert priced([], 8.0, lambda _: 5.0) == []

"""The α–β formulas, by hand and by a simulated ring."""

import numpy as np
import pytest

from cost.base import COLLECTIVE_KINDS, Link
from cost.collectives import collective_lines, collective_s, collective_sent_bytes
from cost.lines import Line, least_s

LINK = Link(latency_s=10.0, s_per_byte=2.0)


@pytest.mark.parametrize(
    ("kind", "seconds"),
    # 64 bytes on 4 devices, 2 s for a byte: each sends 3/4 of it once; twice; 3/16; all.
    [
        ("all_gather", 10 + 2 * 48),
        ("reduce_scatter", 10 + 2 * 48),
        ("all_reduce", 10 + 2 * 96),
        ("all_to_all", 10 + 2 * 12),
        ("collective_permute", 10 + 2 * 64),
    ],
)
def test_seconds_by_hand(kind, seconds):
    assert collective_s(kind, 64, 4, LINK) == seconds


def simulated_ring_bytes(kind, num_bytes, n):
    """Bytes each device sends when blocks really travel around a ring (all-to-all: straight to each other device)."""
    block = num_bytes / n
    if kind == "all_to_all":
        return (n - 1) * (num_bytes / n) / n
    sent = np.zeros(n)
    for _ in range(n - 1):  # every step each device passes one block on
        sent += block
    return sent[0] * (2 if kind == "all_reduce" else 1)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_bytes_equal_those_of_a_simulated_ring(kind, n):
    np.testing.assert_allclose(collective_sent_bytes(kind, 720, n), simulated_ring_bytes(kind, 720, n))


@pytest.mark.parametrize("kind", COLLECTIVE_KINDS)
def test_one_device_or_no_bytes_cost_nothing(kind):
    assert collective_s(kind, 1e9, 1, LINK) == 0
    assert collective_s(kind, 0, 4, LINK) == 0
    assert collective_lines(kind, 1, LINK) == (Line(0.0, 0.0),)


@pytest.mark.parametrize("kind", COLLECTIVE_KINDS)
def test_arrays_broadcast_and_lines_are_those_of_the_full_size(kind):
    num_bytes, n = np.array([[8.0], [64.0], [512.0]]), np.array([1, 2, 4, 8])
    link = Link(10.0, 2.0, {kind: (Line(3.0, 5.0), Line(10.0, 2.0))})
    whole = collective_s(kind, num_bytes, n, link)
    assert whole.shape == (3, 4)
    lines = [least_s(collective_lines(kind, devices, link), num_bytes[:, 0]) for devices in n]
    np.testing.assert_allclose(whole, np.transpose(lines))
    assert whole[2, 3] == collective_s(kind, 512, 8, link)


def test_all_reduce_has_the_bytes_of_reduce_scatter_and_all_gather_but_one_latency():
    apart = collective_s("reduce_scatter", 64, 4, LINK) + collective_s("all_gather", 64, 4, LINK)
    assert apart - collective_s("all_reduce", 64, 4, LINK) == LINK.latency_s


def test_a_kind_takes_the_fastest_of_its_own_lines():
    link = Link(0.0, 2.0, {"all_to_all": (Line(1.0, 7.0), Line(40.0, 3.0))})
    assert collective_s("all_to_all", 16, 4, link) == 1 + 7 * 3
    assert collective_s("all_to_all", 64, 4, link) == 40 + 3 * 12  # below 1 + 7 · 12
    assert collective_s("all_gather", 64, 4, link) == 2 * 48


def test_unknown_kind_is_named():
    with pytest.raises(ValueError, match="`kind` must be one of"):
        collective_s("gather", 1, 2, LINK)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not 'gather'"):
        collective_lines("gather", 2, LINK)  # type: ignore[arg-type]

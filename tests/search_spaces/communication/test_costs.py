"""Seconds of encoding: measured where the device is known, else the roofline."""

import pytest

from cost.base import Hardware
from search_spaces.communication.base import INT4, INT8
from search_spaces.communication.costs import coding_s, encoding_seconds


def test_the_roofline_stands_in_for_what_was_not_measured():
    unknown = Hardware("some new device", 1e12, 1e10, 1e10, {})
    assert coding_s(INT4, unknown) == pytest.approx(4.5 / 1e10)
    cpu = Hardware("cpu", 1e12, 1e10, 1e10, {})
    assert coding_s(INT8, cpu) == encoding_seconds()["seconds_per_element"]["cpu"]["int8"]

"""Seconds of encoding: measured where the device is known, else the roofline."""

import json

import pytest

from cost.base import Hardware
from search_spaces.communication.costs import coding_s, measure, measured
from search_spaces.communication.precision import INT4, INT8


def test_the_roofline_stands_in_for_what_was_not_measured():
    unknown = Hardware("some new device", 1e12, 1e10, 1e10, {})
    assert coding_s(INT4, unknown) == pytest.approx(4.5 / 1e10)
    cpu = Hardware("cpu", 1e12, 1e10, 1e10, {})
    assert coding_s(INT8, cpu) == measured()["seconds_per_element"]["cpu"]["int8"]


def test_measuring_gives_what_the_data_file_holds():
    results = measure(2**12, 3)
    assert results.keys() == measured().keys()
    assert json.loads(json.dumps(results)) == results
    seconds = results["seconds_per_element"]["cpu"]
    assert seconds.keys() == measured()["seconds_per_element"]["cpu"].keys()
    assert min(seconds.values()) > 0
    with pytest.raises(ValueError, match="`num_elements` must be a positive multiple of 128, not 100"):
        measure(100)

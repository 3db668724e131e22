"""Measured seconds of encoding have the form of the data file, and the script prints them."""

import json

import pytest

from experiments import encoding_seconds
from search_spaces.communication import costs


def test_measuring_gives_what_the_data_file_holds(capsys):
    encoding_seconds.main(["--elements", "4096", "--repeats", "3"])
    results = json.loads(capsys.readouterr().out)
    assert results.keys() == costs.encoding_seconds().keys()
    assert results["num_elements"] == 4096
    seconds = results["seconds_per_element"]["cpu"]
    assert seconds.keys() == costs.encoding_seconds()["seconds_per_element"]["cpu"].keys()
    assert min(seconds.values()) > 0
    with pytest.raises(ValueError, match="`num_elements` must be a positive multiple of 128, not 100"):
        encoding_seconds.measure(100)

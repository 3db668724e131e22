"""The worked example in the package's docstring runs and prints what it says."""

import doctest

from search_spaces import communication


def test_the_worked_example_runs():
    results = doctest.testmod(communication)
    assert results.attempted > 10
    assert results.failed == 0

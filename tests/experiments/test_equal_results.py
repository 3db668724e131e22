"""The comparison with one device sees what differs, and the experiment runs."""

import numpy as np

from experiments import equal_results
from experiments.equal_results import compare
from tests.experiments.printed_tables import printed_rows


def test_rounding_is_equal_and_an_error_is_not():
    state = {"kernel": np.linspace(-2.0, 2.0, 20_000, dtype=np.float32), "count": np.int32(2)}
    rounded = {**state, "kernel": state["kernel"] * np.float32(1 + 1e-6)}
    assert compare((state, [1.0, 0.5]), (rounded, [1.0, 0.5])).equal

    one_element = {**state, "kernel": np.where(np.arange(20_000) == 7, 5.0, state["kernel"])}
    assert compare((state, [1.0]), (one_element, [1.0])).equal  # adam's noise: within the share allowed

    missing_device = {**state, "kernel": np.where(np.arange(20_000) < 2_500, 0.0, state["kernel"])}
    assert not compare((state, [1.0]), (missing_device, [1.0])).equal
    assert not compare((state, [1.0]), (state, [1.001])).equal


def test_a_state_of_nan_is_not_equal():
    state = {"kernel": np.ones(10, np.float32)}
    assert not compare((state, [1.0]), ({"kernel": np.full(10, np.nan, np.float32)}, [1.0])).equal
    assert not compare((state, [1.0]), (state, [np.nan])).equal


def test_main_on_a_mesh(capsys):
    assert equal_results.main(["--models", "mlp", "--meshes", "2x2x2", "--time-limit", "1"]) == 0
    (row,) = printed_rows(capsys.readouterr().out)
    assert (row[0], row[1], row[-1]) == ("mlp", "2x2x2", "equal")

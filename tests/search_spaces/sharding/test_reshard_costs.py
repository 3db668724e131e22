"""Seconds of steps and reshards, by hand."""

import numpy as np
import pytest

from cost.base import CollectiveKind, Hardware, Link
from cost.lines import Line
from search_spaces.sharding.base import ReshardStep
from search_spaces.sharding.reshard_costs import ReshardCosts
from search_spaces.sharding.spec import specs_of_shape

LINKS = {"x": Link(1e-5, 1e-9), "y": Link(1e-6, 1e-10, {"all_to_all": (Line(1e-6, 4e-10),)})}
COSTS = ReshardCosts("xy", (2, 4), Hardware("two", 1.0, 1.0, 1.0, LINKS))


@pytest.mark.parametrize(
    ("kind", "axis", "seconds"),
    [  # 1000 bytes of size along the axis
        ("all_gather", 0, 1e-5 + 1000 * 1 / 2 * 1e-9),
        ("all_gather", 1, 1e-6 + 1000 * 3 / 4 * 1e-10),
        ("reduce_scatter", 1, 1e-6 + 1000 * 3 / 4 * 1e-10),
        ("all_reduce", 0, 1e-5 + 2 * 1000 * 1 / 2 * 1e-9),
        ("all_to_all", 1, 1e-6 + 1000 * 3 / 16 * 4e-10),
        ("collective_permute", 1, 1e-6 + 1000 * 1e-10),
        ("slice", 0, 0.0),
    ],
)
def test_steps_by_hand(kind, axis, seconds):
    assert COSTS.step_s(ReshardStep(kind, axis, 0.5, ()), 2000.0) == pytest.approx(seconds)


def test_a_share_of_the_latency_leaves_the_bytes():
    move = ReshardStep("all_gather", 0, 1.0, ())
    assert COSTS.step_s(move, 1000.0, 0.25) == pytest.approx(0.25 * 1e-5 + 500 * 1e-9)


def test_reshards_by_hand():
    whole, rows, columns = ((), ()), ((1,), ()), ((), (1,))
    matrix = COSTS.reshard_s((whole, rows, columns), (whole, rows), 8000.0, 1.0, 3.0)
    gather = 3 * (1e-6 + 8000 * 3 / 4 * 1e-10)
    exchange = 3 * (1e-6 + 8000 * 3 / 16 * 4e-10)
    np.testing.assert_allclose(matrix, [[0, 0], [gather, 0], [gather, exchange]], rtol=1e-12)


def test_matrices_are_the_sums_of_their_steps():
    specs = specs_of_shape((8, 8), (2, 4))
    matrix = COSTS.reshard_s(specs, specs, 5e5, 0.5, 2.0)
    for i, source in enumerate(specs):
        for j, target in enumerate(specs):
            steps = COSTS.path(source, target)
            assert matrix[i, j] == pytest.approx(2 * sum(COSTS.step_s(move, 5e5, 0.5) for move in steps))
    assert (np.diag(matrix) == 0).all()


def test_specs_may_occur_more_than_once():
    whole, rows = ((),), ((0,),)
    once = COSTS.reshard_s((whole, rows), (rows, whole), 100.0, 1.0, 1.0)
    often = COSTS.reshard_s((whole, rows, whole), (rows, whole, whole), 100.0, 1.0, 1.0)
    np.testing.assert_array_equal(often, once[np.ix_([0, 1, 0], [0, 1, 1])])


def test_equal_requests_share_one_array_that_cannot_be_written():
    specs = specs_of_shape((8,), (2, 4))
    matrix = COSTS.reshard_s(specs, specs, 100.0, 1.0, 1.0)
    assert COSTS.reshard_s(specs, specs, 100.0, 1.0, 1.0) is matrix
    with pytest.raises(ValueError, match="read-only"):
        matrix[0, 0] = 1.0


def test_an_axis_of_one_device_needs_no_link():
    prices = ReshardCosts("xz", (2, 1), Hardware("one", 1.0, 1.0, 1.0, {"x": LINKS["x"]}))
    assert prices.reshard_s((((0,),),), (((),),), 1000.0, 1.0, 1.0)[0, 0] == pytest.approx(1e-5 + 500 * 1e-9)


def test_the_largest_rate_is_that_of_the_slowest_kind_on_the_slowest_link():
    assert COSTS.largest_s_per_byte == pytest.approx(1e-9)


BY_KIND: dict[CollectiveKind, tuple[Line, ...]] = {
    "reduce_scatter": (Line(2e-6, 8e-10), Line(5e-5, 3e-10)),  # they meet at 96,000 sent bytes
    "all_gather": (Line(3e-6, 1e-9), Line(1.3e-5, 5e-10)),  # at 20,000
    "all_to_all": (Line(7e-6, 6e-10),),
}
OWN = ReshardCosts("x", (4,), Hardware("own rates", 1.0, 1.0, 1.0, {"x": Link(1e-6, 1e-10, BY_KIND)}))


@pytest.mark.parametrize(
    ("kind", "num_bytes", "share", "seconds"),
    [
        ("reduce_scatter", 4000.0, 1.0, 2e-6 + 3000 * 8e-10),
        ("reduce_scatter", 4e6, 1.0, 5e-5 + 3e6 * 3e-10),
        # The same bytes as a tenth of a combined collective: a group of 4e5 bytes sends 3e5, by the second line.
        ("reduce_scatter", 4e4, 1.0, 2e-6 + 3e4 * 8e-10),
        ("reduce_scatter", 4e4, 0.1, 0.1 * (5e-5 + 3e5 * 3e-10)),
        ("all_gather", 4000.0, 1.0, 3e-6 + 3000 * 1e-9),
        ("all_to_all", 16000.0, 1.0, 7e-6 + 3000 * 6e-10),
        ("all_reduce", 4000.0, 1.0, 1e-6 + 6000 * 1e-10),  # what every kind without its own lines has
    ],
)
def test_kinds_have_the_lines_of_their_own(kind, num_bytes, share, seconds):
    """A search that gave every kind the rates of the ring would price a reduce-scatter at 0.15 to 0.3 of its time."""
    assert OWN.step_s(ReshardStep(kind, 0, 1.0, ()), num_bytes, share) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize(("num_bytes", "share"), [(4e3, 1.0), (4e6, 1.0), (4e4, 0.1), (1.0, 1e-6)])
def test_reshards_over_several_lines_are_the_sums_of_their_steps(num_bytes, share):
    links = {"x": Link(1e-6, 1e-10, BY_KIND), "y": LINKS["y"]}
    costs = ReshardCosts("xy", (2, 4), Hardware("own rates", 1.0, 1.0, 1.0, links))
    specs = specs_of_shape((8, 8), (2, 4))
    matrix = costs.reshard_s(specs, specs, num_bytes, share, 2.0)
    for i, source in enumerate(specs):
        for j, target in enumerate(specs):
            steps = costs.path(source, target)
            assert matrix[i, j] == pytest.approx(2 * sum(costs.step_s(move, num_bytes, share) for move in steps))

"""The shapes of a mesh: all ordered factorisations, and each physically distinct one once."""

import itertools
import math

import pytest

from cost.networks import distinct_shapes, factorisations
from cost.presets import preset


@pytest.mark.parametrize("number", [1, 2, 7, 8, 12, 36])
@pytest.mark.parametrize("most_factors", [1, 2, 3])
def test_factorisations_are_all_products_in_order(number, most_factors):
    divisors = range(2, number + 1)
    expected = {(number,)} | {
        factors
        for count in range(1, most_factors + 1)
        for factors in itertools.product(divisors, repeat=count)
        if math.prod(factors) == number
    }
    found = list(factorisations(number, most_factors))
    assert len(found) == len(set(found))
    assert set(found) == expected


def _shapes(name, number, **options):
    return distinct_shapes(number, lambda axes: preset(name, axes, **options).links)


def test_the_order_of_axes_inside_a_host_makes_no_mesh():
    assert _shapes("h100", 8) == [
        {"local": 8},
        {"local_a": 2, "local_b": 4},
        {"local_a": 2, "local_b": 2, "local_c": 2},
    ]


def test_axes_are_named_by_the_levels_that_they_lead_over():
    assert _shapes("h100", 16) == [
        {"mixed": 16},
        {"hosts": 2, "local": 8},
        {"mixed": 4, "local": 4},
        {"mixed": 8, "local": 2},
        {"hosts": 2, "local_a": 2, "local_b": 4},
        {"mixed": 4, "local_a": 2, "local_b": 2},
    ]


def test_axes_of_a_host_whose_devices_are_not_alike_have_an_order():
    # Of 8 V100s in a hybrid cube mesh, rings of neighbours are faster than rings of every second device.
    shapes = [tuple(axes.values()) for axes in _shapes("v100", 8)]
    assert {(2, 4), (4, 2)} <= set(shapes)


def test_no_two_shapes_have_the_same_axes_and_none_is_missing():
    for name, number in (("h100", 32), ("v100", 16), ("tpu_v5e", 24)):

        def axes_of(sizes, name=name):
            axes = {str(i): size for i, size in enumerate(sizes)}
            links = preset(name, axes).links
            return sorted((size, hash(links[axis])) for axis, size in axes.items())

        found = [axes_of(axes.values()) for axes in _shapes(name, number)]
        assert all(found.count(entry) == 1 for entry in found)
        assert all(axes_of(sizes) in found for sizes in factorisations(number, 3))

"""Drawings keep the largest values of a curve, and every place inside."""

import re

import numpy as np

from diffshard.plans import page_elements
from diffshard.plans.page_elements import Curve, Dot, Mark, largest_in_columns, plot, scatter, strip
from tests.diffshard.plans.page_checker import checked_page


def value_at(points, x):
    """A curve's value at a place; 0 before its first point."""
    return next((y for start, y in reversed(points) if start <= x), 0.0)


def test_a_column_has_the_largest_value_of_the_points_in_it(monkeypatch):
    monkeypatch.setattr(page_elements, "MAX_COLUMNS", 7)
    rng = np.random.default_rng(0)
    for _ in range(20):
        xs = np.sort(rng.choice(100, size=12, replace=False)).astype(float)
        points = [(float(x), float(y)) for x, y in zip(xs, rng.integers(0, 50, 12), strict=True)]
        drawn = largest_in_columns(points, 100.0)
        for column in range(7):
            places = np.linspace(column * 100 / 7, (column + 1) * 100 / 7, 400, endpoint=False)
            # A curve's first point is the largest value of its column, which begins before it.
            expected = max(value_at(points, x) for x in places)
            assert value_at(drawn, column * 100 / 7 + 1e-6) == expected
    few = ((0.0, 1.0), (0.5, 9.0), (1.0, 2.0))
    assert largest_in_columns(few, 100.0) == few


def test_a_plot_draws_curves_and_marks_to_one_scale():
    curve = Curve(((0.0, 1.0), (5.0, 4.0)), "first")
    page = plot("steps", [curve], right=10.0, top=5.0, ends=("0", "10"), marks=[Mark("limit <5>", "limit", y=5.0)])
    checked_page(page)
    assert "M0.0 160.0H500.0V40.0H1000" in page
    assert "M0 0.0H1000" in page
    assert "limit &lt;5&gt;" in page


def test_dots_lie_between_the_edges_and_the_first_is_on_top():
    page = scatter(
        "loss",
        [Dot(1.0, 3.0, "1", "a", "first"), Dot(2.0, 1.0, "2", "b", "other")],
        across=("1", "s", "2"),
        up=("1", "3"),
    )
    dots = [attributes for _, attributes in checked_page(page).elements if attributes.get("class") == "dot"]
    assert [dot["title"] for dot in dots] == ["b", "a"]
    places = [[float(place) for place in re.findall(r"(?:left|bottom):([\d.]+)%", dot["style"])] for dot in dots]
    assert places == [[88.0, 12.0], [12.0, 88.0]]


def test_pieces_are_as_wide_as_their_amounts_and_have_text_where_it_fits():
    pieces = [("layer_0", "first", 30.0, "fill0"), ("layer_1", "second", 9.0, "fill0"), ("head", "third", 1.0, "fill1")]
    page = strip(pieces, 40.0)
    shown = [attributes for tag, attributes in checked_page(page).elements if "width" in attributes.get("style", "")]
    assert [re.findall(r"width:([\d.]+)%", a["style"]) for a in shown] == [["75.00"], ["22.50"], ["2.50"]]
    assert "<span>layer_0</span>" in page
    assert "<span>layer_1</span>" in page  # 22.5% of 350 pixels are 79, and seven letters take 52
    assert "head" not in page
    assert "<span class=wide>layer_0</span>" in strip([(*pieces[0][:2], 10.0, "fill0")], 100.0)

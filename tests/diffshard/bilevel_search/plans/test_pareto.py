"""The front by hand and against brute force, and its drawing."""

import sys

import numpy as np
import pytest

import diffshard
from diffshard.bilevel_search.plans.base import Point
from tests.diffshard.bilevel_search.plans.small_bilevel_plan import validated_plan


def test_worked_by_hand():
    points = [("a", 2.0, 1.0), ("b", 1.0, 2.0), ("c", 2.0, 2.0), ("d", 3.0, 1.0), ("e", 0.5, np.nan), ("f", 1.5, 1.5)]
    assert [point.name for point in diffshard.formats.pareto(points).front] == ["b", "f", "a"]


def test_against_brute_force():
    rng = np.random.default_rng(0)
    points = [Point(str(i), *row) for i, row in enumerate(rng.integers(0, 12, (40, 2)).astype(float))]
    beaten = {p for p in points for q in points if q.seconds <= p.seconds and q.loss <= p.loss and q[1:] != p[1:]}
    front = diffshard.formats.pareto(points).front
    assert {p[1:] for p in front} == {p[1:] for p in set(points) - beaten}
    assert len({p[1:] for p in front}) == len(front)


def test_it_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    found = diffshard.formats.pareto([("exact", 2e-3, 1.0), ("int8", 1e-3, 1.1), ("int4", 1.5e-3, 1.2)])
    found.draw(tmp_path / "front.svg", title="two layers")
    drawn = (tmp_path / "front.svg").read_text()
    assert "two layers" in drawn
    assert drawn.count("int8") == 1
    assert drawn.count("int4") == 1  # off the front, but told apart


def test_the_winner_of_validation_runs_is_marked(tmp_path):
    pytest.importorskip("matplotlib")
    validation = validated_plan().validation
    assert validation is not None
    assert [point.name for point in validation.points() if point.chosen] == [validation.winner.name]
    for name, points in [
        ("validation", validation.points()),
        ("points", [tuple(point[:3]) for point in validation.points()]),
    ]:
        diffshard.formats.pareto(points).draw(tmp_path / f"{name}.svg")
    assert (tmp_path / "validation.svg").read_text().count("<!-- chosen -->") == 1
    assert "chosen" not in (tmp_path / "points.svg").read_text()


def test_what_is_wrong_is_said(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="at least one"):
        diffshard.formats.pareto([])
    with pytest.raises(ValueError, match="'a' has inf"):
        diffshard.formats.pareto([("a", np.inf, 1.0)])
    with pytest.raises(ValueError, match=r"from 0 on; 'a' has -1\.0"):
        diffshard.formats.pareto([("a", -1.0, 1.0)])
    for points, message in [(None, "`points` must be a sequence"), (["abc"], r"`points\[0\]` must be .* got 'abc'"),
                            ([("a", 1.0)], "must be"), ([("a", True, 1.0)], "must be")]:  # fmt: skip
        with pytest.raises(ValueError, match=message):
            diffshard.formats.pareto(points)  # pyright: ignore[reportArgumentType]
    for name in ("front", "front.xyz"):
        with pytest.raises(ValueError, match=r"`path` must end in \.png, \.svg, \.pdf; got .*front"):
            diffshard.formats.pareto([("a", 1.0, 1.0)]).draw(tmp_path / name)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"pip install '\.\[plot\]'"):
        diffshard.formats.pareto([("a", 1.0, 1.0)]).draw(tmp_path / "front.png")

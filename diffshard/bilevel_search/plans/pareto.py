"""Loss against step time: the choices that no other choice beats in both, and a drawing of them."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from diffshard.bilevel_search.inputs import as_real
from diffshard.bilevel_search.plans.base import Point

_ENDINGS = (".png", ".svg", ".pdf")


class Pareto(NamedTuple):
    """Points and the ones among them that none beats.

    Attributes:
      points: all, as they were given.
      front: those that no other point beats in one and equals in the other, by rising seconds. Points whose loss is not
        finite are never in it.
    """

    points: tuple[Point, ...]
    front: tuple[Point, ...]

    def draw(self, path: str | Path, *, title: str = "") -> None:
        """Writes a drawing, .png, .svg or .pdf by the name's ending.

        Raises:
          ValueError: another ending, or matplotlib is not installed.
        """
        if Path(path).suffix not in _ENDINGS:
            raise ValueError(f"`path` must end in {', '.join(_ENDINGS)}; got {str(path)!r}.")
        try:
            from matplotlib.figure import Figure
        except ModuleNotFoundError:
            raise ValueError("`draw` needs matplotlib: pip install 'diffshard[plot]'") from None
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.add_subplot()
        finite_points = [point for point in self.points if math.isfinite(point.loss)]
        at = [1e3 * p.seconds for p in finite_points], [p.loss for p in finite_points]
        axes.scatter(*at, s=18, color="0.6", label="candidates")
        axes.step([1e3 * p.seconds for p in self.front], [p.loss for p in self.front], where="post", label="best")
        for point in finite_points:
            color = "black" if point in self.front else "0.5"
            at = (1e3 * point.seconds, point.loss)
            axes.annotate(point.name, at, (4, 4), textcoords="offset points", fontsize=8, color=color)
        if chosen_points := [point for point in finite_points if point.chosen]:
            at = [1e3 * p.seconds for p in chosen_points], [p.loss for p in chosen_points]
            axes.scatter(*at, s=90, marker="*", color="#d9822b", zorder=3, label="chosen")
        axes.margins(x=0.15, y=0.1)
        axes.set(xlabel="step time / ms", ylabel="loss", title=title)
        axes.legend()
        figure.savefig(path)


def pareto(points: Sequence[Point | tuple[str, float, float]]) -> Pareto:
    """Returns the points that no other point beats in both time and loss.

    >>> [p.name for p in pareto([("exact", 2.0, 1.0), ("int8", 1.0, 1.1), ("int4", 1.5, 1.2)]).front]
    ['int8', 'exact']

    Raises:
      ValueError: there are no points, an entry is not (name, seconds, loss), or seconds are negative or not finite.
    """
    if not isinstance(points, Iterable) or isinstance(points, str):
        raise ValueError(f"`points` must be a sequence of (name, seconds, loss), got {points!r}.")
    all_points = tuple(_point(i, point) for i, point in enumerate(points))
    if not all_points:
        raise ValueError("`points` must hold at least one (name, seconds, loss), got none.")
    for point in all_points:
        if not 0 <= point.seconds < math.inf:
            raise ValueError(f"`points` must have finite seconds from 0 on; {point.name!r} has {point.seconds}.")
    front: list[Point] = []
    for point in sorted(all_points, key=lambda p: (p.seconds, p.loss)):
        if math.isfinite(point.loss) and (not front or point.loss < front[-1].loss):
            front.append(point)
    return Pareto(all_points, tuple(front))


def _point(number: int, point: Any) -> Point:
    fields = tuple(point) if isinstance(point, tuple | list) else ()
    numbers = [as_real(field) for field in fields[1:3]]
    if len(fields) not in (3, 4) or None in numbers:
        raise ValueError(f"`points[{number}]` must be (name, seconds, loss), got {point!r}.")
    return point if isinstance(point, Point) else Point(*fields)

"""Drawings of amounts over a range, which keep their height and the size of their texts on a screen of any width.

The lines are an SVG that is stretched to the width at hand, with strokes that are not. All texts are HTML beside it:
scaled with the drawing, they could not be read on a phone.
"""

from collections.abc import Sequence
from typing import NamedTuple

from diffshard.plans.page_elements import escape

_WIDTH, _HEIGHT = 1000, 200  # units of the SVG; a thousandth of the width is about a pixel
_MARGIN = 12.0  # percent between the outermost dots and the edges, for the texts beside them
_EDGES = ("bottom", "top")
_NARROW, _WIDE = 350, 1000  # pixels of a drawing on a narrow screen and on others
_LETTER, _PADDING = 6.5, 6  # pixels that a text takes: for each letter, and at its sides
MAX_COLUMNS = 1000
"""The most steps of a curve that are drawn: more would be narrower than a pixel."""


class Curve(NamedTuple):
    """A quantity that stays the same from each point to the next."""

    points: tuple[tuple[float, float], ...]
    colour: str
    is_filled: bool = False


class Mark(NamedTuple):
    """A dashed line with a text: at a height `y`, or at a place `x`.

    Attributes:
      colour: the name of a colour of `page_elements.STYLE`.
      x, y: one of both; the other is None.
    """

    text: str
    colour: str
    x: float | None = None
    y: float | None = None


class Dot(NamedTuple):
    """A dot with a text beside it."""

    x: float
    y: float
    text: str
    title: str
    colour: str


def scatter(label: str, dots: Sequence[Dot], *, across: tuple[str, str, str], up: tuple[str, str]) -> str:
    """Returns a drawing of dots between the least and the largest x and y, the first dot on top.

    Args:
      label: what it shows, for those who do not see it.
      dots: at least one.
      across: texts below the left end, the middle and the right end.
      up: texts at the lower and the upper end.
    """
    lefts = _places([dot.x for dot in dots])
    bottoms = _places([dot.y for dot in dots])
    parts = []
    for dot, left, bottom in reversed(list(zip(dots, lefts, bottoms, strict=True))):
        side = f"left:calc({left:.1f}% + 8px)" if left < 50 else f"right:calc({100 - left:.1f}% + 8px)"
        parts.append(
            f'<i class=dot style="left:{left:.1f}%;bottom:{bottom:.1f}%;background:var(--{dot.colour})" '
            f'title="{escape(dot.title)}"></i>'
            f'<span style="{side};bottom:{bottom:.1f}%">{escape(dot.text)}</span>'
        )
    parts += [f"<span class=dim style='left:4px;{at}:3px'>{escape(up[i])}</span>" for i, at in enumerate(_EDGES)]
    below = "".join(f"<span>{escape(text)}</span>" for text in across)
    return f'<div class=plot role=img aria-label="{escape(label)}">{"".join(parts)}</div><div class=ends>{below}</div>'


def _places(values: Sequence[float]) -> list[float]:
    """Returns places in percent, a margin away from both ends; equal values are in the middle."""
    low, high = min(values), max(values)
    if high <= low:
        return [50.0] * len(values)
    return [_MARGIN + (100 - 2 * _MARGIN) * (value - low) / (high - low) for value in values]


def plot(
    label: str,
    curves: Sequence[Curve],
    *,
    right: float,
    top: float,
    ends: tuple[str, str],
    marks: Sequence[Mark] = (),
    below: str = "",
) -> str:
    """Returns a drawing of curves.

    Args:
      label: what it shows, for those who do not see it.
      curves: from x = 0 on; the last point of each holds until `right`.
      top: the largest y; the lower edge is 0.
      ends: texts below the left and the right end.
      below: an element between the drawing and the texts of its ends, such as a strip.
    """
    right, top = right or 1.0, top or 1.0
    paths = "".join(_path(curve, right, top) for curve in curves) + "".join(_line(m, right, top) for m in marks)
    texts = "".join(_text(mark, right, top) for mark in marks)
    return (
        f'<div class=plot><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(label)}">{paths}</svg>{texts}</div>{below}'
        f"<div class=ends><span>{escape(ends[0])}</span><span>{escape(ends[1])}</span></div>"
    )


def strip(pieces: Sequence[tuple[str, str, float, str]], total: float) -> str:
    """Returns a row of pieces as wide as their amounts, (text, title, amount, colour's name).

    A piece has its text where there is room for it: on a narrow screen only the wide ones do.
    """
    parts = []
    for text, title, amount, colour in pieces:
        share = 100 * amount / (total or 1.0)
        style = f"width:{share:.2f}%;background:var(--{colour})"
        parts.append(f'<div style="{style}" title="{escape(title)}">{text_in(share, text)}</div>')
    return f"<div class=strip>{''.join(parts)}</div>"


def text_in(share: float, text: str, padding: float = _PADDING) -> str:
    """Returns the text of a piece that takes a share of the width, in percent: only where there is room for it."""
    needed = _LETTER * len(text) + padding
    if share * _NARROW >= 100 * needed:
        return f"<span>{escape(text)}</span>"
    return f"<span class=wide>{escape(text)}</span>" if share * _WIDE >= 100 * needed else ""


def largest_in_columns(points: Sequence[tuple[float, float]], right: float) -> tuple[tuple[float, float], ...]:
    """Returns a curve of at most `MAX_COLUMNS` points, whose steps have the largest y of the points that they replace.

    A value holds until the next point, so each column also has the value with which it begins.
    """
    if len(points) <= MAX_COLUMNS:
        return tuple(points)
    largest: dict[int, float] = {}
    last_column, last_y = 0, 0.0
    for x, y in points:
        column = min(int(x * MAX_COLUMNS / right), MAX_COLUMNS - 1)
        if column > last_column + 1:
            largest[last_column + 1] = last_y  # nothing changes in the columns between
        if column > last_column:
            largest[column] = max(last_y, y)
        largest[column] = max(largest.get(column, 0.0), y)
        last_column, last_y = column, y
    if last_column + 1 < MAX_COLUMNS:
        largest[last_column + 1] = last_y
    return tuple((column * right / MAX_COLUMNS, y) for column, y in sorted(largest.items()))


def _path(curve: Curve, right: float, top: float) -> str:
    if not curve.points:
        return ""
    places = [(f"{_WIDTH * x / right:.1f}", f"{_y(y, top):.1f}") for x, y in curve.points]
    steps = f"M{places[0][0]} {places[0][1]}" + "".join(f"H{x}V{y}" for x, y in places[1:]) + f"H{_WIDTH}"
    colour = f"var(--{curve.colour})"
    area = f'<path d="{steps}V{_HEIGHT}H{places[0][0]}Z" style="fill:{colour};opacity:.22"/>' if curve.is_filled else ""
    return f'{area}<path d="{steps}" style="stroke:{colour}"/>'


def _line(mark: Mark, right: float, top: float) -> str:
    if mark.x is not None:
        path = f"M{_WIDTH * mark.x / right:.1f} 0V{_HEIGHT}"
    else:
        path = f"M0 {_y(mark.y or 0.0, top):.1f}H{_WIDTH}"
    return f'<path class=mark d="{path}" style="stroke:var(--{mark.colour})"/>'


def _text(mark: Mark, right: float, top: float) -> str:
    """Returns a mark's text: above a line across, or at the top beside a line down, on the side with more room."""
    if mark.x is None:
        place = f"right:4px;bottom:{100 * (1 - _y(mark.y or 0.0, top) / _HEIGHT):.1f}%"
    elif mark.x < right / 2:
        place = f"left:calc({100 * mark.x / right:.1f}% + 5px);top:3px"
    else:
        place = f"right:calc({100 * (1 - mark.x / right):.1f}% + 5px);top:3px"
    return f'<span style="color:var(--{mark.colour});{place}">{escape(mark.text)}</span>'


def _y(y: float, top: float) -> float:
    return _HEIGHT * (1 - min(max(y / top, 0.0), 1.0))

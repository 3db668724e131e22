"""The elements that make up the pages of all plans: the document with its style, cards of numbers, stacked bars.

The style has colours for light and dark screens, and a layout that is readable from 320 pixels on. Drawings and their
texts are told colours by name, so that each scheme has its own; no colour stands in an element. In a notebook a page is
in a frame, which keeps its style apart from that of the notebook around it.

Drawings of amounts over a range keep their height and the size of their texts on a screen of any width.
"""

import html
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from diffshard.base import printable
from search_spaces.partition_specs import NamedSpec

NUM_FILLS = 8
"""Fills for sets of mesh axes: `var(--fill0)` and so on, under text in the page's own colour."""

STYLE = """
:root{color-scheme:light dark;--page:#fbfbfa;--card:#fff;--text:#1d2733;--dim:#56626e;--line:#e2e4e8;--track:#eceef1;
--moves:#9a3412;--first:#1d4e89;--second:#c96f1a;--limit:#b3261e;--other:#8a949e;--replicated:#e9e9ec;
--fill0:#bcd9f5;--fill1:#fbd5a4;--fill2:#d9c8f0;--fill3:#c5e6c0;--fill4:#f6c3d0;--fill5:#bfe8e4;--fill6:#efe3a0;
--fill7:#d6cfc7}
@media(prefers-color-scheme:dark){:root{--page:#14181d;--card:#1c2229;--text:#e4e8ec;--dim:#a3aeb9;--line:#343c46;
--track:#2a313a;--moves:#ffab7d;--first:#7db4f0;--second:#f0a45a;--limit:#ff8a80;--other:#7c8792;--replicated:#31373f;
--fill0:#1d4468;--fill1:#66430f;--fill2:#493366;--fill3:#27502a;--fill4:#662a3d;--fill5:#1d514c;--fill6:#544a10;
--fill7:#48413a}}
body{font:14px/1.45 system-ui,-apple-system,"Segoe UI",sans-serif;color:var(--text);background:var(--page);margin:0}
main{max-width:1180px;margin:0 auto;padding:28px 24px 60px}
h1{font-size:22px;margin:0 0 4px;overflow-wrap:anywhere}h2{font-size:16px;margin:34px 0 10px}
h3{font-size:14px;margin:18px 0 6px}
.dim{color:var(--dim)}.cards{display:flex;gap:12px;flex-wrap:wrap;margin:18px 0}
.card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:10px 16px;min-width:120px;flex:1}
.card b{display:block;font-size:20px;font-weight:600}
.bar{display:flex;height:30px;border-radius:5px;overflow:hidden;background:var(--track)}
.bar i{display:block;height:100%;border-right:1px solid var(--card);box-sizing:border-box}
.key{display:flex;flex-wrap:wrap;gap:4px 18px;margin:8px 0 0}
.key i,.swatch{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:6px;vertical-align:-1px}
.layer{display:grid;grid-template-columns:170px 1fr 1fr 1fr;gap:0 12px;background:var(--card);
border:1px solid var(--line);border-radius:8px;padding:10px 14px;margin:0 0 8px;break-inside:avoid}
.head{background:none;border:none;padding-top:0;padding-bottom:0;font-weight:600;color:var(--dim)}
.layer>div{min-width:0}.layer .name{font-weight:600;overflow-wrap:anywhere}
.part{border-radius:5px;padding:3px 8px;margin:0 0 4px;font-size:12.5px;overflow-wrap:anywhere}
.part .how{display:flex;justify-content:space-between;gap:8px;color:var(--text);opacity:.8}
.small{background:none;color:var(--dim);padding-top:0}
.moves{color:var(--moves);font-weight:600}
.inside{font-size:12px;margin:4px 0 0}
.flows{margin:0 0 8px 20px;border-left:2px solid var(--dim);padding:1px 0 1px 12px;font-size:12.5px}
.flow{display:grid;grid-template-columns:14px 210px minmax(0,1fr) 160px;gap:0 10px;align-items:center}
.flow span{overflow-wrap:anywhere}.flow>i{height:7px;border-radius:3px;background:var(--track)}
.flow>i>i{display:block;height:100%;border-radius:3px;background:var(--second)}
table{border-collapse:collapse;width:100%;background:var(--card);font-size:13px}
td,th{text-align:left;padding:4px 10px;border-bottom:1px solid var(--line);vertical-align:top;overflow-wrap:break-word}
td:first-child{overflow-wrap:anywhere;min-width:190px}
td.n,th.n{text-align:right;white-space:nowrap}th{color:var(--dim);font-weight:600}
pre{overflow-x:auto;background:var(--card);border:1px solid var(--line);border-radius:8px;padding:14px;font-size:12px}
li{overflow-wrap:anywhere}
.advice{background:var(--card);border:1px solid var(--line);border-left:4px solid var(--second);border-radius:8px;
padding:10px 16px 10px 36px;margin:0}.advice li::marker{color:var(--dim)}
.taken{min-width:90px;white-space:nowrap}.share{display:block;height:4px;border-radius:2px;background:var(--other);
margin:3px 0 0;min-width:1px}
.dearest{background:color-mix(in srgb,var(--second) 16%,var(--card))}.dearest .share{background:var(--second)}
summary{cursor:pointer;font-weight:600;margin:26px 0 8px}
.plot{position:relative;background:var(--card);border:1px solid var(--line);border-radius:5px;height:200px}
.plot svg{display:block;width:100%;height:100%;overflow:visible}
.plot path{fill:none;stroke-width:2;vector-effect:non-scaling-stroke}.plot .mark{stroke-width:1.5;stroke-dasharray:5 4}
.plot span{position:absolute;font-size:12px;font-weight:600;max-width:60%;background:var(--card);padding:0 3px;
border-radius:3px}
.dot{position:absolute;width:10px;height:10px;border-radius:5px;margin:0 0 -5px -5px}
.strip{display:flex;height:20px;margin:3px 0 0;border-radius:4px;overflow:hidden;font-size:11.5px;line-height:20px}
.strip div{overflow:hidden;white-space:nowrap;
text-align:center;border-right:1px solid var(--page);box-sizing:border-box}
.lanes .title{margin:8px 0 2px;font-size:13px}
.lane{position:relative;height:24px;background:var(--track);border-radius:4px;overflow:hidden}
.lane div{position:absolute;top:0;height:100%;min-width:1px;overflow:hidden;white-space:nowrap;text-align:center;
font-size:11.5px;line-height:24px}
.lane.thin{height:6px;margin-top:2px;border-radius:2px}
.ends{display:flex;justify-content:space-between;gap:12px;font-size:12px;color:var(--dim);margin:2px 0 0}
svg text{font:12px system-ui,sans-serif;fill:var(--dim)}
@media(max-width:700px){main{padding:20px 12px 40px}.layer{grid-template-columns:minmax(0,1fr)}.head{display:none}
.layer>div::before{color:var(--dim);font-weight:600}.layer>:nth-child(2):not(:empty)::before{content:"arguments"}
.layer>:nth-child(3):not(:empty)::before{content:"forward"}.layer>:nth-child(4):not(:empty)::before{content:"backward"}
.wide{display:none}.flows{margin-left:8px}.flow{grid-template-columns:14px minmax(0,1fr);margin:0 0 6px}
.flow>:nth-child(3),.flow>i{grid-column:2}
.card{padding:8px 12px;min-width:130px}.card b{font-size:17px}}
@media(max-width:900px){table,tbody,tr,td,td.n{overflow-wrap:anywhere;display:block;text-align:left;white-space:normal}
table{background:none}
tr{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:6px 12px;margin:0 0 8px}
tr.dearest{border-color:var(--second)}
tr.titles{display:none}td{border:none;padding:1px 0;display:flex!important;gap:10px}td:empty{display:none!important}
td::before{content:attr(data-of);color:var(--dim);flex:0 0 min(38%,170px)}td:first-child{font-weight:600}
td:first-child::before{display:none}}
"""


COMPUTE = "#7a8aa0"
TRAFFIC = "#a9b5c4"
COLOURS = ("#d9822b", "#c4507a", "#8a63b8", "#3d8f8a", "#b0a02c", "#a0522d", "#5b7fc7", "#7d8b3a")


class Html(str):
    """Text that is HTML already, which `escape` leaves as it is."""


def escape(value: object) -> str:
    """Escapes a value for the text of an element or an attribute; HTML stays as it is."""
    return value if isinstance(value, Html) else html.escape(printable(str(value)))


def breakable(name: str) -> Html:
    """Escapes a name, which may go on in the next line after each of its parts."""
    return Html(re.sub(r"([/,])", r"\1<wbr>", escape(name)))


def with_code(text: str) -> Html:
    """Escapes a sentence whose names of code are in backticks, and shows these as code."""
    return Html(re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text)))


def document(title: str, body: Sequence[str]) -> str:
    """Returns a self-contained page with a title and elements."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = (), first: str = "") -> str:
    """Returns a table of texts; columns `right` align to the right, and the first row has the class `first`.

    On a narrow screen each row is a box that begins with its first cell, and each other cell has its column's title.
    """

    def cell(text: str, index: int, tag: str) -> str:
        title = f' data-of="{escape(head[index])}"' if tag == "td" else ""
        return f"<{tag}{' class=n' * (index in right)}{title}>{escape(text)}</{tag}>"

    titles = "".join(cell(text, i, "th") for i, text in enumerate(head))
    lines = ["".join(cell(text, i, "td") for i, text in enumerate(row)) for row in rows]
    kinds = [f' class="{first}"' if first and not i else "" for i in range(len(lines))]
    body = "".join(f"<tr{kind}>{line}</tr>" for kind, line in zip(kinds, lines, strict=True))
    return f"<table><tr class=titles>{titles}</tr>{body}</table>"


def cards(*pairs: tuple[str, str]) -> str:
    """Returns boxes of numbers, each with its meaning."""
    boxes = (f"<div class=card><b>{escape(number)}</b>{escape(what)}</div>" for number, what in pairs)
    return f"<div class=cards>{''.join(boxes)}</div>"


def bar(pieces: Iterable[tuple[str, float, str, str]], total: float) -> str:
    """Returns a stacked bar of pieces, (label, amount, amount as text, colour), with a key of the colours."""
    pieces = [p for p in pieces if p[1] > 0]
    key = "".join(
        f'<span><i style="background:{colour}"></i>{escape(label)} <span class=dim>{escape(said)}</span></span>'
        for label, _, said, colour in pieces
    )
    return f"{plain_bar(pieces, total)}<div class=key>{key}</div>"


def plain_bar(pieces: Iterable[tuple[str, float, str, str]], total: float) -> str:
    """Returns a stacked bar as `bar` does, without a key."""
    parts = "".join(
        f'<i style="width:{100 * amount / max(total, 1e-30):.3f}%;background:{colour}" '
        f'title="{escape(label)}: {escape(said)}"></i>'
        for label, amount, said, colour in pieces
        if amount > 0
    )
    return f"<div class=bar>{parts}</div>"


def axis_fills(specs: Iterable[NamedSpec], order: Sequence[str]) -> dict[frozenset[str], str]:
    """Returns a colour for each set of mesh axes that splits an array; single axes first, in the order of the axes."""
    sets = {frozenset(axis for axes in spec for axis in axes) for spec in specs} - {frozenset()}
    by_size = sorted(sets, key=lambda s: (len(s), sorted(map(order.index, s))))
    fills = {axes: f"var(--fill{i % NUM_FILLS})" for i, axes in enumerate(by_size)}
    return {frozenset(): "var(--replicated)"} | fills


_FRAME_HEIGHT_PX = 640  # a plan's cards, its bars and the beginning of its drawing of memory

NOT_PLANNED = "Not planned yet: call plan(*args) with arrays or jax.ShapeDtypeStructs, or the function itself."
"""What a planned function without a plan advises."""


def framed(page: str) -> str:
    """Returns a page as an element for a notebook's cell."""
    return (
        f'<iframe srcdoc="{escape(page)}" style="width:100%;height:{_FRAME_HEIGHT_PX}px;border:0" '
        'title="diffshard"></iframe>'
    )


class Paged:
    """What a notebook shows as the page that its method `html` returns."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        shown: Any = self
        return framed(shown.html())


def planned_function_element(headline: str, advice: str, pages: Sequence[tuple[str, str]]) -> str:
    """Returns an element that shows what a planned function is for, and its plans.

    Args:
      headline: the function, the mesh and the hardware.
      advice: what to call next; empty where there are plans.
      pages: for each plan a title and its page; all but the last are behind a line that opens.
    """
    if not pages:
        return f"<div><b>{escape(headline)}</b><br>{escape(advice)}</div>"
    *others, (_, last) = pages
    opened = "".join(f"<details><summary>{escape(title)}</summary>{framed(page)}</details>" for title, page in others)
    return opened + framed(last)


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
    marks: Sequence[Mark],
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

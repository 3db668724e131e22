"""The elements that make up the pages of all plans: the document with its style, cards of numbers, stacked bars.

The style has colours for light and dark screens, and a layout that is readable from 320 pixels on. Drawings and their
texts are told colours by name, so that each scheme has its own; no colour stands in an element. In a notebook a page is
in a frame, which keeps its style apart from that of the notebook around it.
"""

import html
import re
from collections.abc import Iterable, Sequence

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
    """Returns a page as an element for a notebook's cell, `_repr_html_` of everything that has a page."""
    return (
        f'<iframe srcdoc="{escape(page)}" style="width:100%;height:{_FRAME_HEIGHT_PX}px;border:0" '
        'title="diffshard"></iframe>'
    )


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

"""The elements that make up the pages of all plans: the document with its style, cards of numbers, stacked bars."""

import html
from collections.abc import Iterable, Sequence

COMPUTE = "#7a8aa0"
COLOURS = ("#d9822b", "#c4507a", "#8a63b8", "#3d8f8a", "#b0a02c", "#a0522d", "#5b7fc7", "#7d8b3a")

_STYLE = """
:root{color-scheme:light}
body{font:14px/1.45 system-ui,-apple-system,"Segoe UI",sans-serif;color:#1d2733;background:#fbfbfa;margin:0}
main{max-width:1180px;margin:0 auto;padding:28px 24px 60px}
h1{font-size:22px;margin:0 0 4px}h2{font-size:16px;margin:34px 0 10px}
.dim{color:#5d6975}.cards{display:flex;gap:12px;flex-wrap:wrap;margin:18px 0}
.card{background:#fff;border:1px solid #e2e4e8;border-radius:8px;padding:10px 16px;min-width:150px;flex:1}
.card b{display:block;font-size:20px;font-weight:600}
.bar{display:flex;height:30px;border-radius:5px;overflow:hidden;background:#eceef1}
.bar i{display:block;height:100%;border-right:1px solid #fff;box-sizing:border-box}
.key{display:flex;flex-wrap:wrap;gap:4px 18px;margin:8px 0 0}.key span{white-space:nowrap}
.key i,.swatch{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:6px;vertical-align:-1px}
.layer{display:grid;grid-template-columns:170px 1fr 1fr 1fr;gap:0 12px;background:#fff;border:1px solid #e2e4e8;
border-radius:8px;padding:10px 14px;margin:0 0 8px;break-inside:avoid}
.head{background:none;border:none;padding-top:0;padding-bottom:0;font-weight:600;color:#5d6975}
.layer>div{min-width:0}.layer .name{font-weight:600;overflow-wrap:anywhere}
.part{border-radius:5px;padding:3px 8px;margin:0 0 4px;font-size:12.5px;overflow-wrap:anywhere}
.part .how{display:flex;justify-content:space-between;gap:8px;color:#46525e}
.part .moves{color:#9a3412;font-weight:600}.small{background:none;color:#5d6975;padding-top:0}
table{border-collapse:collapse;width:100%;background:#fff;font-size:13px}
td,th{text-align:left;padding:4px 10px;border-bottom:1px solid #eceef1;vertical-align:top;overflow-wrap:anywhere}
td.n,th.n{text-align:right;white-space:nowrap}th{color:#5d6975;font-weight:600}
pre{overflow-x:auto;background:#fff;border:1px solid #e2e4e8;border-radius:8px;padding:14px;font-size:12px}
li{overflow-wrap:anywhere}
summary{cursor:pointer;font-weight:600;margin:26px 0 8px}svg text{font:12px system-ui,sans-serif;fill:#5d6975}
@media(max-width:700px){main{padding:20px 12px 40px}.layer{grid-template-columns:1fr}.head{display:none}
.layer>div::before{color:#5d6975;font-weight:600}.layer>:nth-child(2):not(:empty)::before{content:"arguments"}
.layer>:nth-child(3):not(:empty)::before{content:"forward"}.layer>:nth-child(4):not(:empty)::before{content:"backward"}
table{display:block;overflow-x:auto}td,th{overflow-wrap:normal}}
"""


def escape(value: object) -> str:
    """Escapes a value for the text of an element or an attribute."""
    return html.escape(str(value))


def document(title: str, body: Sequence[str]) -> str:
    """Returns a self-contained page with a title and elements."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Returns a table of texts; columns `right` align to the right."""

    def line(cells: Sequence[str], tag: str) -> str:
        texts = (f"<{tag}{' class=n' * (i in right)}>{escape(cell)}</{tag}>" for i, cell in enumerate(cells))
        return f"<tr>{''.join(texts)}</tr>"

    return f"<table>{line(head, 'th')}{''.join(line(row, 'td') for row in rows)}</table>"


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

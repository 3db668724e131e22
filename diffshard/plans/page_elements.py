"""The elements that make up the pages of all plans: the document with its style, cards of numbers, stacked bars."""

import html
import re
from collections.abc import Iterable, Sequence

from diffshard.base import printable
from diffshard.plans.page_style import NUM_FILLS, STYLE
from search_spaces.partition_specs import NamedSpec

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

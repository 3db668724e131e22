"""Pages inside a notebook: a frame keeps the style of a page apart from that of the notebook around it."""

from collections.abc import Sequence

from diffshard.plans.page_elements import escape

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

"""Reads a page as a browser would, and refuses one that is not well-formed."""

from html.parser import HTMLParser

_VOID = {"meta", "wbr", "br", "path", "img", "link"}


class Checker(HTMLParser):
    """Collects text and elements, and fails where an element is closed that was not opened last."""

    def __init__(self):
        super().__init__()
        self.open, self.texts, self.elements = [], [], []

    def handle_starttag(self, tag, attrs):  # noqa: D102
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):  # noqa: D102
        if tag not in _VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):  # noqa: D102
        self.texts.append(data)


def checked_page(page: str) -> Checker:
    """What a page holds."""
    checker = Checker()
    checker.feed(page.replace("/>", ">"))
    assert checker.open == []
    return checker

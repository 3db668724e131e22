"""Random faults: small changes of the code at places that a seed draws, with no regard to what the tests say.

A line is drawn first and one of its changes then, so that no kind of change is drawn more often because it fits more
places of one line. Errors that are raised, decorators and annotations are left out: either no result
depends on them, or every test fails.
"""

import ast
import bisect
import functools
import itertools
import random
import re
from collections.abc import Iterator
from pathlib import Path

from experiments.planted_faults.faults import Fault

PACKAGES = ("cost", "search_spaces", "diffshard")
_OPERATORS = {
    ast.Lt: ("<", ("<=", ">")), ast.LtE: ("<=", ("<", ">=")), ast.Gt: (">", (">=", "<")), ast.GtE: (">=", (">", "<=")),
    ast.Eq: ("==", ("!=",)), ast.NotEq: ("!=", ("==",)), ast.Is: ("is", ("is not",)), ast.IsNot: ("is not", ("is",)),
    ast.In: ("in", ("not in",)), ast.NotIn: ("not in", ("in",)), ast.And: ("and", ("or",)), ast.Or: ("or", ("and",)),
    ast.Add: ("+", ("-",)), ast.Sub: ("-", ("+",)), ast.Mult: ("*", ("/",)), ast.Div: ("/", ("*",)),
    ast.FloorDiv: ("//", ("*",)), ast.Mod: ("%", ("//",)), ast.BitAnd: ("&", ("|",)), ast.BitOr: ("|", ("&",)),
}  # fmt: skip
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "minimum": "maximum", "maximum": "minimum"}
_TYPED = ("isinstance", "issubclass", "getattr", "hasattr", "setattr")  # an error of Python's own if swapped
_Change = tuple[int, int, str]
"""Where a text begins and ends in the file, in bytes, and what takes its place."""


def draw_faults(count: int, seed: int, root: Path) -> list[Fault]:
    """Returns faults in different lines of the packages, each of which Python can read.

    Args:
      count: how many.
      seed: the same one draws the same faults from the same code.
      root: the repository's folder.

    Raises:
      ValueError: the packages have fewer lines that can be changed.
    """
    paths = sorted(path for package in PACKAGES for path in (root / package).rglob("*.py"))
    lines = [(path, line) for path in paths for line in sorted(changes_by_line(path.read_bytes()))]
    if count > len(lines):
        raise ValueError(f"`--sample` must be at most {len(lines)}, the lines that can be changed; got {count}.")
    rng = random.Random(seed)
    faults = []
    for path, line in rng.sample(lines, count):
        code = path.read_bytes()
        changes = changes_by_line(code)[line]
        faults.append(_fault(path.relative_to(root).as_posix(), code, rng.choice(changes)))
    return faults


@functools.cache
def changes_by_line(code: bytes) -> dict[int, list[_Change]]:
    """Returns for each line, from 0, the changes that begin there; lines without any are left out."""
    text, result = _Text(code), {}
    nodes: list[ast.AST] = [ast.parse(code)]
    while nodes:
        node = nodes.pop()
        for first, last, replacement in text.changes(node):
            result.setdefault(text.line_of(first), []).append((first, last, replacement))
        skipped = [
            getattr(node, "annotation", None),
            getattr(node, "returns", None),
            *getattr(node, "decorator_list", ()),
        ]
        children = (child for child in ast.iter_child_nodes(node) if child not in skipped)
        nodes += [child for child in children if not isinstance(child, ast.Raise | ast.JoinedStr)]
    return result


class _Text:
    """The text of a file, where the nodes of its tree are looked up."""

    def __init__(self, code: bytes):
        self.code = code
        self._starts = [0, *(match.end() for match in re.finditer(b"\n", code))]

    def begin(self, node: ast.expr) -> int:
        return self._starts[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr) -> int:
        return self._starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)

    def line_of(self, place: int) -> int:
        return bisect.bisect(self._starts, place) - 1

    def of(self, node: ast.expr) -> str:
        return self.code[self.begin(node) : self.end(node)].decode()

    def changes(self, node: ast.AST) -> Iterator[_Change]:
        """Yields the changes of one node, without those of its parts."""
        if isinstance(node, ast.Compare):
            for operator, pair in zip(node.ops, itertools.pairwise([node.left, *node.comparators]), strict=True):
                yield from self._other_operators(operator, *pair)
        elif isinstance(node, ast.BoolOp):
            yield from self._other_operators(node.op, *node.values[:2])
        elif isinstance(node, ast.BinOp):
            yield from self._other_operators(node.op, node.left, node.right)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
            yield self.begin(node), self.begin(node) + len("not " if isinstance(node.op, ast.Not) else "-"), ""
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int):
            others = (not node.value,) if isinstance(node.value, bool) else (node.value + 1, node.value - 1)
            yield from ((self.begin(node), self.end(node), str(other)) for other in others)
        elif isinstance(node, ast.If | ast.IfExp):
            yield self.begin(node.test), self.end(node.test), f"not ({self.of(node.test)})"
        elif isinstance(node, ast.Call):
            yield from self._other_calls(node)

    def _other_operators(self, operator: ast.AST, left: ast.expr, right: ast.expr) -> Iterator[_Change]:
        text, others = _OPERATORS.get(type(operator), ("", ()))
        at = self.code.find(text.encode(), self.end(left), self.begin(right))
        yield from ((at, at + len(text), other) for other in others)

    def _other_calls(self, node: ast.Call) -> Iterator[_Change]:
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name in _NAMES:
            yield self.end(node.func) - len(name), self.end(node.func), _NAMES[name]
        for first, second in itertools.pairwise(() if name in _TYPED else node.args):
            gap = self.code[self.end(first) : self.begin(second)].decode()
            if self.of(first) != self.of(second):
                yield self.begin(first), self.end(second), f"{self.of(second)}{gap}{self.of(first)}"


def _fault(path: str, code: bytes, change: _Change) -> Fault:
    """Returns a change as a fault: whole lines, and as many before them as make the text stand once in the file."""
    first, last, replacement = change
    end = code.find(b"\n", last)
    begin = code.rfind(b"\n", 0, first) + 1
    while code.count(code[begin:end]) > 1:
        begin = code.rfind(b"\n", 0, begin - 1) + 1
    changed = code[begin:first] + replacement.encode() + code[last:end]
    return Fault(path, code[begin:end].decode(), changed.decode())

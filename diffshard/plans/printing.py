"""Quantities, types and tables as text, for everything that shows plans.

Names that repeat are shown once: `layer_0/up` to `layer_11/up` become `layer_*/up`.
"""

import math
import re
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, Protocol

from diffshard.base import printable
from search_spaces.partition_specs import NamedSpec

_NO_SHARE = 1e-8  # less is rounding of float64 sums
_NO_SECONDS = 0.5e-11  # less would be written as 0.00 ns


def format_s(seconds: float) -> str:
    """Writes seconds with a unit and three digits: `1.26 ms`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(seconds) >= 0.9995 * size:
            return f"{_three_digits(seconds / size)} {unit}"
    return "0 s" if abs(seconds) < _NO_SECONDS else f"{_three_digits(seconds / 1e-9)} ns"


def format_bytes(num_bytes: float) -> str:
    """Writes bytes with a binary unit and three digits: `80.0 GiB`."""
    if num_bytes == math.inf:
        return "unlimited"
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(num_bytes) >= 0.9995 * size:
            return f"{_three_digits(num_bytes / size)} {unit}"
    return f"{num_bytes:.0f} B"


def is_shown(num_bytes: float) -> bool:
    """Returns whether bytes are not written as `0 B`; rows of nothing are left out."""
    return num_bytes > 0.5


def format_count(number: int, noun: str) -> str:
    """Writes a number with its noun: `1 device`, `8 devices`."""
    return f"{number:,} {noun}{'s' if number != 1 else ''}"


def format_devices(axes: Mapping[str, int]) -> str:
    """Writes the axes of a mesh as `8 devices (data 2 x model 4)`."""
    return f"{format_count(math.prod(axes.values()), 'device')} ({format_axes(axes)})"


def format_axes(axes: Mapping[str, int]) -> str:
    """Writes the axes of a mesh as `data 2 x model 4`."""
    return " x ".join(f"{axis} {size}" for axis, size in axes.items()) or "no axes"


def format_percent(share: float) -> str:
    """Writes a share with two digits: `0.012%`, `12%`; `unknown` if it is not finite."""
    if not math.isfinite(share):
        return "unknown"
    return "0%" if share < _NO_SHARE else f"{100 * share:.0f}%" if share >= 0.995 else f"{100 * share:.2g}%"


def short_name(function: str) -> str:
    """Returns a function's name without the names of the functions in which it was defined."""
    return function.rsplit("<locals>.", 1)[-1]


def format_spec(spec: NamedSpec) -> str:
    """Writes a spec as `replicated`, or with the mesh axes of each dimension, a dot for none: `·, model`."""
    if not any(spec):
        return "replicated"
    return ", ".join("+".join(axes) or "·" for axes in spec)


class Array(Protocol):
    """A value with the shape and type of an array."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Dimensions of the whole array."""
        ...

    @property
    def dtype(self) -> str:
        """The name of its dtype."""
        ...


def format_array(array: Array) -> str:
    """Writes the type of an array as JAX does: `float32[512,2048]`."""
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"


def _three_digits(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 9.995 else f"{value:.1f}" if abs(value) < 99.95 else f"{value:,.0f}"


TEXT_WIDTH = 100
"""Columns of everything that is printed: half of a wide screen, and what mails and reviews show without scrolling."""

_LEAST_COLUMN = 10  # characters of a column that wraps: enough for the words of names and reasons
_COMFORTABLE_COLUMN = 26  # the columns named first do not become narrower than this before others wrap
_BREAKS = re.compile(r"[^\S\u00a0]")  # white space of all kinds but the fixed space, which keeps a number with its unit
_PIECES = re.compile(r"[^ /,+]*(?:[/,+][ ]?|[ ]|$)")  # where a cell may go on in the next line
_UNITS = re.compile(r"(?<=[\d.]) (?=[nµm]?s\b|[KMGT]?i?B\b)")  # a number stays with its unit
_FIXED_SPACE = "\u00a0"


def format_table(
    rows: Sequence[Sequence[str]], indent: str, right: Sequence[int] = (), wrap: Sequence[int] = ()
) -> list[str]:
    """Returns lines of columns, two spaces apart, that are at most `TEXT_WIDTH` wide.

    Columns are as wide as their widest cells; where that is too much, cells go on in further lines.

    Args:
      rows: cells of text, equally many in each row.
      right: columns of numbers, which align to the right and do not wrap.
      wrap: columns that wrap before others do, in this order.
    """
    if not rows:
        return []
    rows = [[_shown(cell) for cell in row] for row in rows]
    widths = _widths(rows, TEXT_WIDTH - len(indent), right, wrap)
    lines = []
    for row in rows:
        cells = [_pieces(_UNITS.sub(_FIXED_SPACE, cell), width) for cell, width in zip(row, widths, strict=True)]
        for line in range(max(map(len, cells))):
            texts = zip([cell[line] if line < len(cell) else "" for cell in cells], widths, strict=True)
            aligned = [text.rjust(w) if i in right else text.ljust(w) for i, (text, w) in enumerate(texts)]
            lines.append((indent + "  ".join(aligned)).rstrip().replace(_FIXED_SPACE, " "))
    return lines


def wrapped(text: str, indent: str = "", further_indent: str | None = None) -> list[str]:
    """Returns a sentence as lines of at most `TEXT_WIDTH`, further ones indented by `further_indent`."""
    further = indent if further_indent is None else further_indent
    first, *others = _pieces(_shown(text), TEXT_WIDTH - max(len(indent), len(further)), hang="")
    return [indent + first, *(further + line for line in others)]


def _widths(rows: Sequence[Sequence[str]], whole: int, right: Sequence[int], wrap: Sequence[int]) -> list[int]:
    """Returns the width of each column, so that all of them fit into `whole` characters."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    too_much = sum(widths) + 2 * (len(widths) - 1) - whole
    for i in wrap:
        less = max(min(too_much, widths[i] - _COMFORTABLE_COLUMN), 0)
        widths[i] -= less
        too_much -= less
    can_wrap = [i for i in range(len(widths)) if i not in right]
    while too_much > 0 and (widest := max((widths[i] for i in can_wrap), default=0)) > _LEAST_COLUMN:
        widths[max(i for i in can_wrap if widths[i] == widest)] -= 1
        too_much -= 1
    return widths


def _shown(text: str) -> str:
    """Returns a text as one line: tabs and ends of lines become spaces."""
    return printable(_BREAKS.sub(" ", text))


def _pieces(text: str, width: int, hang: str = "  ") -> list[str]:
    """Cuts a text into lines, between words and parts of names where it can; further lines begin with `hang`.

    Nothing but white space is lost.
    """
    if len(text) <= width:
        return [text]
    lines, line = [], ""
    for piece in filter(None, _PIECES.findall(text)):
        rest = piece
        if len(line + rest.rstrip()) > width and (line.strip() or len(line) > width):
            lines += [line.rstrip()] if line.strip() else []
            line = hang
        while len(line + rest.rstrip()) > width:
            cut = width - len(line)
            lines.append(line + rest[:cut])
            line, rest = hang, rest[cut:]
        line += rest
    return [*lines, line.rstrip()] if line.strip() or not lines else lines


_TOKENS = re.compile(r"\d+|[A-Za-z_]+|[^A-Za-z_\d]+")
_MAX_WORDS = 4  # alternatives at one place; a longer list of words says less than a line for each

_Alternatives = tuple[frozenset[str], ...]
_Members = dict[tuple[_Alternatives, Hashable], list[int]]  # indices of names, by joined name and key


class NamePattern(NamedTuple):
    """A pattern, and the names that it stands for.

    Attributes:
      pattern: every combination of its alternatives is one of the names: `*` stands for all numbers that occur there,
        `{0-2,5}` for some numbers, `{mu,nu}` for words.
      members: the names' indices, ascending.
    """

    pattern: str
    members: tuple[int, ...]


def group_names(names: Sequence[str], keys: Sequence[Hashable]) -> list[NamePattern]:
    """Finds patterns for names that differ in numbers or in a word and have equal keys, in order of their first names.

    Example: `["layer_0/w", "layer_1/w", "head/w"]` with keys `"aab"` are `layer_*/w` and `head/w`.
    """
    tokens = [tuple(_TOKENS.findall(name)) for name in names]
    members: _Members = {}
    for i, (parts, key) in enumerate(zip(tokens, keys, strict=True)):
        members.setdefault((tuple(frozenset((part,)) for part in parts), key), []).append(i)
    longest = max(map(len, tokens), default=0)
    for position in range(longest):
        members = _join(members, position, is_number=True)
    for position in reversed(range(longest)):
        members = _join(members, position, is_number=False)
    numbers = _numbers_after(tokens)
    patterns = [
        NamePattern(_pattern(parts, numbers), tuple(sorted(indices))) for (parts, _), indices in members.items()
    ]
    return sorted(patterns, key=lambda pattern: pattern.members)


def readable_path(path: str) -> str:
    """Writes a path of `jax.tree_util.keystr` with slashes: `state['layer_0']['w']` is `state/layer_0/w`.

    The attribute in which a variable of flax nnx keeps its array is left out.
    """
    return re.sub(r"\['([^']*)'\]", r"/\1", path.removesuffix(".value") if path.endswith("'].value") else path)


def _join(members: _Members, position: int, *, is_number: bool) -> _Members:
    """Joins names that differ at one position only, if numbers (or words) stand there."""
    alike: dict[Hashable, list[tuple[_Alternatives, Hashable]]] = {}
    for parts, key in members:
        can_join = position < len(parts) and all(part[0].isdigit() == is_number for part in parts[position])
        can_join &= position < len(parts) and (is_number or all(part[0].isalpha() for part in parts[position]))
        rest = (parts[:position], parts[position + 1 :], key) if can_join else (parts, key)
        alike.setdefault(rest, []).append((parts, key))
    result: _Members = {}
    for same in alike.values():
        words = frozenset[str]().union(*(parts[position] for parts, _ in same if position < len(parts)))
        if len(same) == 1 or (not is_number and len(words) > _MAX_WORDS):
            result.update({entry: members[entry] for entry in same})
            continue
        parts, key = same[0]
        pattern = (*parts[:position], words, *parts[position + 1 :])
        result[pattern, key] = [i for entry in same for i in members[entry]]
    return result


def _mask(parts: Sequence[str]) -> tuple[str, ...]:
    return tuple("0" if part.isdigit() else part for part in parts)


def _numbers_after(tokens: Sequence[Sequence[str]]) -> dict[tuple[str, ...], set[str]]:
    """Returns all numbers that occur after each beginning of a name, whose own numbers do not matter."""
    numbers: dict[tuple[str, ...], set[str]] = {}
    for parts in tokens:
        for i, part in enumerate(parts):
            if part.isdigit():
                numbers.setdefault(_mask(parts[:i]), set()).add(part)
    return numbers


def _pattern(parts: _Alternatives, numbers: dict[tuple[str, ...], set[str]]) -> str:
    text, before = [], []
    for alternatives in parts:
        first = min(alternatives)
        if len(alternatives) == 1:
            text.append(first)
        elif not first.isdigit():
            text.append("{" + ",".join(sorted(alternatives)) + "}")
        else:
            everything = numbers.get(_mask(before), set())
            text.append("*" if alternatives >= everything else "{" + _ranges(alternatives) + "}")
        before.append(first)
    return "".join(text)


def _ranges(numbers: frozenset[str]) -> str:
    sorted_numbers = sorted(map(int, numbers))
    runs: list[list[int]] = []
    for number in sorted_numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)

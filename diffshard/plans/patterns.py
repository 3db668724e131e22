"""Names that repeat, told once: `layer_0/up` to `layer_11/up` are `layer_*/up`, and so are quantities with units."""

import re
from collections.abc import Hashable, Sequence
from typing import NamedTuple

_TOKENS = re.compile(r"\d+|[A-Za-z_]+|[^A-Za-z_\d]+")
_MOST_WORDS = 4  # longer lists of words say less than rows of their own

_Row = tuple[frozenset[str], ...]


class Group(NamedTuple):
    """Names that one pattern stands for.

    Attributes:
      pattern: every combination of its alternatives is a member: `*` is all numbers that occur there, `{0-2,5}` some
        numbers, `{mu,nu}` words.
      members: their indices, ascending.
    """

    pattern: str
    members: tuple[int, ...]


def group_names(names: Sequence[str], keys: Sequence[Hashable]) -> list[Group]:
    """Groups names that differ in numbers or in a word and have equal keys; in order of their first members.

    Example: `["layer_0/w", "layer_1/w", "head/w"]` with keys `"aab"` are `layer_*/w` and `head/w`.
    """
    tokens = [tuple(_TOKENS.findall(name)) for name in names]
    rows: dict[tuple[_Row, Hashable], list[int]] = {}
    for i, (parts, key) in enumerate(zip(tokens, keys, strict=True)):
        rows.setdefault((tuple(frozenset((part,)) for part in parts), key), []).append(i)
    longest = max(map(len, tokens), default=0)
    for position in range(longest):
        rows = _merge(rows, position, is_number=True)
    for position in reversed(range(longest)):
        rows = _merge(rows, position, is_number=False)
    universe = _numbers(tokens)
    found = [Group(_pattern(row, universe), tuple(sorted(members))) for (row, _), members in rows.items()]
    return sorted(found, key=lambda group: group.members)


def readable_path(path: str) -> str:
    """A path of `jax.tree_util.keystr` with slashes: `state.params['layer_0']['w']` is `state.params/layer_0/w`."""
    return re.sub(r"\['([^']*)'\]", r"/\1", path)


def _merge(
    rows: dict[tuple[_Row, Hashable], list[int]], position: int, *, is_number: bool
) -> dict[tuple[_Row, Hashable], list[int]]:
    """Joins rows that differ at one position only, where there are numbers (or words)."""
    alike: dict[Hashable, list[tuple[_Row, Hashable]]] = {}
    for row, key in rows:
        mergeable = position < len(row) and all(part[0].isdigit() == is_number for part in row[position])
        mergeable &= position < len(row) and (is_number or all(part[0].isalpha() for part in row[position]))
        rest = (row[:position], row[position + 1 :], key) if mergeable else (row, key)
        alike.setdefault(rest, []).append((row, key))
    found: dict[tuple[_Row, Hashable], list[int]] = {}
    for same in alike.values():
        words = frozenset[str]().union(*(row[position] for row, _ in same if position < len(row)))
        if len(same) == 1 or (not is_number and len(words) > _MOST_WORDS):
            found.update({entry: rows[entry] for entry in same})
            continue
        row, key = same[0]
        joined = (*row[:position], words, *row[position + 1 :])
        found[joined, key] = [i for entry in same for i in rows[entry]]
    return found


def _masked(parts: Sequence[str]) -> tuple[str, ...]:
    return tuple("0" if part.isdigit() else part for part in parts)


def _numbers(tokens: Sequence[Sequence[str]]) -> dict[tuple[str, ...], set[str]]:
    """All numbers that occur after each beginning of a name."""
    found: dict[tuple[str, ...], set[str]] = {}
    for parts in tokens:
        for i, part in enumerate(parts):
            if part.isdigit():
                found.setdefault(_masked(parts[:i]), set()).add(part)
    return found


def _pattern(row: _Row, universe: dict[tuple[str, ...], set[str]]) -> str:
    text, before = [], []
    for alternatives in row:
        first = min(alternatives)
        if len(alternatives) == 1:
            text.append(first)
        elif not first.isdigit():
            text.append("{" + ",".join(sorted(alternatives)) + "}")
        else:
            everything = universe.get(_masked(before), set())
            text.append("*" if alternatives >= everything else "{" + _ranges(alternatives) + "}")
        before.append(first)
    return "".join(text)


def _ranges(numbers: frozenset[str]) -> str:
    ordered = sorted(map(int, numbers))
    runs: list[list[int]] = []
    for number in ordered:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def format_s(seconds: float) -> str:
    """Seconds with a unit and three digits: `1.26 ms`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(seconds) >= 0.9995 * size:
            return f"{_three_digits(seconds / size)} {unit}"
    return "0 s" if seconds == 0 else f"{_three_digits(seconds / 1e-9)} ns"


def format_bytes(num_bytes: float) -> str:
    """Bytes with a binary unit and three digits: `80.0 GiB`."""
    if num_bytes == float("inf"):
        return "unlimited"
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(num_bytes) >= 0.9995 * size:
            return f"{_three_digits(num_bytes / size)} {unit}"
    return f"{num_bytes:.0f} B"


def _three_digits(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 9.995 else f"{value:.1f}" if abs(value) < 99.95 else f"{value:,.0f}"

"""Names that repeat are shown once: `layer_0/up` to `layer_11/up` become `layer_*/up`."""

import re
from collections.abc import Hashable, Sequence
from typing import NamedTuple

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

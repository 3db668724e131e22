"""Damage to JSON documents: one entry is replaced, removed, doubled, or overwritten by one from elsewhere.

All kinds of entries are changed equally often, however many there are of each.
"""

import copy
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

VALUES = (
    *(None, True, False, 0, -1, 1, 2, 1.5, -1.0, 1e30, 10**18, 2**63, 2**64, 10**400),
    *("nan", "inf", "-inf", "", "zzz", "data", "float99", "x" * 50, "<b>"),
    *([], {}, [[]], [0], [-1], [999], {"a": 1}),
)
"""What entries are replaced by."""
Place = tuple[str | int, ...]


class Damage:
    """Damaged copies of a document.

    Attributes:
      document: the whole one.
    """

    def __init__(self, document: Any):
        self.document = document
        self._places = list(_places(document))[1:]
        kinds: dict[tuple[str, ...], list[Place]] = defaultdict(list)
        for place in self._places:
            kinds[tuple(key if isinstance(key, str) else "*" for key in place)].append(place)
        self._kinds = list(kinds.values())

    def document_of(self, seed: int) -> Any:
        """Returns the document of a case."""
        rng, document = random.Random(seed), copy.deepcopy(self.document)
        place: Any = rng.choice(rng.choice(self._kinds))
        *way, last = place
        inner = _entry(document, way)
        change = rng.choice(("replace", "replace", "replace", "remove", "double", "move"))
        if change == "remove":
            del inner[last]
        elif change == "double" and isinstance(inner, list):
            inner.insert(last, copy.deepcopy(inner[last]))
        elif change == "replace":
            inner[last] = copy.deepcopy(rng.choice(VALUES))
        else:
            inner[last] = copy.deepcopy(_entry(self.document, rng.choice(self._places)))
        return document


def _places(entry: Any, place: Place = ()) -> Iterator[Place]:
    yield place
    pairs = entry.items() if isinstance(entry, dict) else enumerate(entry) if isinstance(entry, list) else ()
    for key, inner in pairs:
        yield from _places(inner, (*place, key))


def _entry(document: Any, place: Sequence[str | int]) -> Any:
    for key in place:
        document = document[key]
    return document

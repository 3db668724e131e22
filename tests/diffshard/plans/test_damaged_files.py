"""Whatever is changed in a file, loading it gives what was saved or says what is wrong; nothing else."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diffshard.base import PlanError
from tests.diffshard.plans.small_files import RECORDS, shown

ESCAPE, HALF = "\x1b", "\ud800"
"""A character that terminals obey, and a half of a pair, which no file can have as it is."""
FEW = (-1, "nan", 10**400, "zzz", None)
MANY = (0, 1e300, "inf", "", f"{ESCAPE}[31m{HALF}", [], json.loads("[" * 400 + "]" * 400))
_UNBOUNDED = {"objective", "history", "scores", "shapes", "exact_losses", "next_best_s", "loss", "loss_increase"}
"""Where numbers may be below zero, or unknown."""


def places_of(entry: Any, place: tuple = ()) -> Iterator[tuple]:
    """Yields the places of all entries; in lists those of the last one."""
    yield place
    if isinstance(entry, dict):
        for key in entry:
            yield from places_of(entry[key], (*place, key))
    elif isinstance(entry, list):
        for index in range(len(entry))[-1:]:
            yield from places_of(entry[index], (*place, index))


def at(document: Any, place: tuple) -> Any:
    for key in place:
        document = document[key]
    return document


def changed(document: Any, place: tuple, value: Any) -> Any:
    """Returns a copy with another value at a place."""
    document = copy.deepcopy(document)
    at(document, place[:-1])[place[-1]] = value
    return document


def damaged(document: Any, values: tuple) -> Iterator[tuple[str, Any]]:
    """Yields documents with one change each, such as one of these values in a place, and what was changed."""
    for place in places_of(document):
        if not place:
            continue
        value = at(document, place)
        for other in values:
            if type(other) is not type(value) or other != value:
                yield f"{place} is {str(other)[:20]}", changed(document, place, other)
        without = copy.deepcopy(document)
        del at(without, place[:-1])[place[-1]]
        yield f"{place} is gone", without
        if isinstance(value, list) and value:
            yield f"{place} has its last one twice", changed(document, place, [*value, value[-1]])
            yield f"{place} is the other way round", changed(document, place, value[::-1])
        if isinstance(value, dict):
            yield f"{place} has something else", changed(document, place, {**value, "zzz": 1})


@pytest.fixture(params=RECORDS, scope="module")
def record(request):
    return RECORDS[request.param]()


def saved(record: Any, folder: Path) -> tuple[Path, Any]:
    record.save(folder / "plan.json")
    return folder / "plan.json", json.loads((folder / "plan.json").read_text())


def outcome(record: Any, path: Path, text: str | bytes) -> Any:
    """Loads a plan from a file with this text; returns None if it is refused by an error that names the file."""
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    try:
        return type(record).load(path)
    except PlanError as refusal:
        error = str(refusal)
    assert str(path) in error
    assert ESCAPE not in error
    return None


def test_what_was_saved_is_read_back(record, tmp_path):
    path, document = saved(record, tmp_path)
    assert repr(outcome(record, path, json.dumps(document, indent=1))) == repr(type(record).load(path))
    assert shown(type(record).load(path)) == shown(record)


def test_every_change_of_a_file_is_refused_or_changes_nothing(record, tmp_path):
    path, document = saved(record, tmp_path)
    whole = repr(type(record).load(path))
    for what, other in damaged(document, FEW):
        loaded = outcome(record, path, json.dumps(other))
        assert loaded is None or repr(loaded) == whole, what


def test_a_file_that_ends_early_is_refused(record, tmp_path):
    path, _ = saved(record, tmp_path)
    raw = path.read_bytes()
    for length in range(0, len(raw), max(1, len(raw) // 50)):
        assert outcome(record, path, raw[:length]) is None
    for text in ("[" * 100_000, '{"a":' * 100_000, "1" * 10_000, "null", "[]", "\xff"):
        assert outcome(record, path, text.encode("latin-1")) is None


def test_files_without_a_checksum_are_refused_or_can_be_shown_and_saved(record, tmp_path):
    """Whoever edits a file on purpose removes it: the values are checked by what their fields mean."""
    path, document = saved(record, tmp_path)
    del document["checksum"]
    for what, other in damaged(document, MANY):
        loaded = outcome(record, path, json.dumps(other))
        if loaded is None or repr(loaded) == repr(record):
            continue
        text = shown(loaded)
        assert ESCAPE not in text, what
        assert HALF not in text, what
        loaded.save(path)
        assert repr(type(loaded).load(path)) == repr(loaded), what


def test_numbers_that_cannot_be_are_refused_wherever_they_are(record, tmp_path):
    """Without the help of a checksum."""
    path, document = saved(record, tmp_path)
    del document["checksum"]
    for place in places_of(document):
        value = at(document, place)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        for other in () if _UNBOUNDED & {*place} else (-1, "nan", "-inf", 10**400):
            loaded = outcome(record, path, json.dumps(changed(document, place, other)))
            is_bound = place[-1] == "lower_bound_s" and other in (-1, "-inf")
            assert loaded is None or is_bound or repr(loaded) == repr(record), (place, other)

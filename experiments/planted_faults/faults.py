"""Faults as lines of text: `FILE: TEXT ==> REPLACEMENT`, where the text occurs once in the file."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
"""The folder of the repository."""
_ARROW = " ==> "


class Fault(NamedTuple):
    """A change of the code that makes it wrong.

    Attributes:
      path: of the file, from the repository's folder.
      text: what is replaced; it occurs once in the file.
      replacement: what takes its place.
    """

    path: str
    text: str
    replacement: str

    def __str__(self) -> str:
        return f"{self.path}: {self.text}{_ARROW}{self.replacement}"


def list_names() -> tuple[str, ...]:
    """Returns the names of the lists of faults beside this file, in alphabetical order."""
    return tuple(sorted(path.stem for path in Path(__file__).parent.glob("*.txt")))


def read_faults(name: str) -> list[Fault]:
    """Returns the faults of a list, in its order; empty lines and those that begin with # are comments.

    Args:
      name: one of `list_names()`.

    Raises:
      ValueError: a line is not a fault; names the list, the line's number and the form.
    """
    lines = (Path(__file__).parent / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return [parse(line, f"{name}.txt:{number}") for number, line in enumerate(lines, 1) if line and line[0] != "#"]


def parse(line: str, place: str) -> Fault:
    """Returns the fault of a line.

    Args:
      line: `FILE: TEXT ==> REPLACEMENT`.
      place: of the line, for the error.

    Raises:
      ValueError: the line has another form, or replaces a text by itself.
    """
    path, colon, change = line.partition(": ")
    text, arrow, replacement = change.partition(_ARROW)
    if not (colon and arrow and path and text) or text == replacement:
        raise ValueError(f"{place} must be FILE: TEXT{_ARROW}REPLACEMENT with two different texts, not {line!r}.")
    return Fault(path, text, replacement)


def faulty_text(fault: Fault, root: Path) -> str | None:
    """Returns the file's text with the fault; None where the fault does not apply: its text does not occur once."""
    path = root / fault.path
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return text.replace(fault.text, fault.replacement) if text.count(fault.text) == 1 else None


def selected(faults: Sequence[Fault], numbers: Sequence[int], prefixes: Sequence[str]) -> list[tuple[int, Fault]]:
    """Returns faults with their numbers, from 1: those of some numbers and those whose paths begin so.

    Args:
      faults: of a list.
      numbers: of faults in the list.
      prefixes: of paths. Without numbers and prefixes all faults are selected.

    Raises:
      ValueError: the list has no fault of a number, or none whose path begins with a prefix.
    """
    for number in numbers:
        if not 1 <= number <= len(faults):
            raise ValueError(f"`--numbers` must be from 1 to {len(faults)}, the faults of the list; got {number}.")
    for prefix in prefixes:
        if not any(fault.path.startswith(prefix) for fault in faults):
            raise ValueError(f"`--paths`: no fault of the list is in a file whose path begins with {prefix!r}.")
    return [
        (number, fault)
        for number, fault in enumerate(faults, 1)
        if not (numbers or prefixes) or number in numbers or fault.path.startswith(tuple(prefixes))
    ]

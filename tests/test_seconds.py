"""The list of what tests take, by which the longer ones are left out, is of tests that are there."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def functions_of(path: Path) -> set[str]:
    """The functions of a file of tests, those of classes by `class::function`."""
    tree, names = ast.parse(path.read_text(encoding="utf-8")), set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}::{own.name}" for own in node.body if isinstance(own, ast.FunctionDef)}
    return names


def test_each_line_has_the_seconds_of_a_test_that_is_there():
    listed: dict[str, set[str]] = {}
    for line in (ROOT / "tests" / "seconds.txt").read_text(encoding="utf-8").splitlines():
        seconds, name = line.split()
        assert float(seconds) > 0
        path, _, function = name.partition("::")
        listed.setdefault(path, set()).add(function)
    assert len(listed) > 100
    gone = {path: sorted(names - functions_of(ROOT / path)) for path, names in listed.items() if (ROOT / path).exists()}
    assert {path: names for path, names in gone.items() if names} == {}
    assert [path for path in listed if not (ROOT / path).exists()] == []

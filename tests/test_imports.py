"""The layout is the architecture: imports go one way, and JAX's internals stay out."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAY_IMPORT = {
    "cost": {"cost"},
    "search_spaces": {"cost", "search_spaces"},
    "diffshard": {"cost", "search_spaces", "diffshard"},
    "experiments": {"cost", "search_spaces", "diffshard", "experiments"},
}
FILES = [path for package in MAY_IMPORT for path in sorted((ROOT / package).rglob("*.py"))]


def imported_modules(tree: ast.Module, package: str) -> Iterator[str]:
    """Full names of all modules that a file imports, relative imports resolved against `package`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = ".".join(parents[: len(parents) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def violations(source: str, package: str) -> list[str]:
    """The imports of a file in `package` that break the house's rules."""
    allowed = MAY_IMPORT[package.split(".")[0]]
    modules = list(imported_modules(ast.parse(source), package))
    backwards = [m for m in modules if m.split(".")[0] in (MAY_IMPORT.keys() | {"tests"}) - allowed]
    internal = [m for m in modules if f"{m}.".startswith("jax._src.")]
    return backwards + internal


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way_and_avoid_internals(path: Path):
    package = ".".join(path.relative_to(ROOT).parent.parts)
    assert violations(path.read_text(encoding="utf-8"), package) == []


def test_two_files_touch_the_compiler():
    touching = {
        path.name
        for path in FILES
        if any(f"{m}.".startswith("jaxlib.") for m in imported_modules(ast.parse(path.read_text("utf-8")), "x"))
    }
    assert touching == {"shardy.py", "explicit_collectives.py"}


@pytest.mark.parametrize(
    ("package", "source", "expected"),
    [
        (
            "cost",
            "from search_spaces.sharding import trace",
            ["search_spaces.sharding", "search_spaces.sharding.trace"],
        ),
        ("search_spaces.sharding", "import diffshard.plan", ["diffshard.plan"]),
        ("diffshard", "def f():\n    from experiments import demo", ["experiments", "experiments.demo"]),
        ("diffshard.solving.solvers", "from ..plan import Plan\nimport cost", []),
        ("cost", "from jax._src import core", ["jax._src", "jax._src.core"]),
        ("cost", "from jax import _src", ["jax._src"]),
    ],
)
def test_the_rule_catches_violations(package: str, source: str, expected: list[str]):
    assert violations(source, package) == expected


def test_every_package_is_seen():
    assert {path.relative_to(ROOT).parts[0] for path in FILES} == set(MAY_IMPORT)

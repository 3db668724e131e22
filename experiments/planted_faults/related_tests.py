"""Which files of tests are related to a file of code, the nearest first.

Folders of tests mirror those of the code, so most of it follows from names. Tests that go through all files of a
folder, such as those of the solvers, import none of them by name and are listed here.
"""

import ast
import functools
from pathlib import Path

from experiments.planted_faults.random_faults import PACKAGES

_THROUGH_FOLDERS = {
    "cost": "tests/conformance/test_cost_models.py",
    "search_spaces": "tests/conformance/test_spaces.py",
    "diffshard/solving": "tests/conformance/test_solvers.py",
}
_ONLY_BY_IMPORT = "experiments"  # whose tests, all together, take minutes


def related_tests(path: str, root: Path, *, nearest_only: bool = False) -> list[str]:
    """Returns the paths of the tests that are related to a file of code.

    First the one with its name, then those that import it, then the others of the mirrored folder, those first that
    import what imports it, then those that go through all files of its folder. A folder without tests of its own has
    those of the folder above it.

    Args:
      path: of the file of code, from the repository's folder.
      root: the repository's folder.
      nearest_only: whether a file whose name a test has needs no others than that test and those that import it.
    """
    code = Path(path)
    module = ".".join(code.with_suffix("").parts).removesuffix(".__main__")
    tests = sorted((root / "tests").rglob("test_*.py"))
    mirrored = _mirrored(root, code)
    named = [test for test in tests if test.stem == f"test_{code.stem}" and mirrored in test.parents]
    texts = {test: test.read_text(encoding="utf-8") for test in tests}
    importing = [test for test in tests if module in _imported_modules(texts[test])]
    # Of tests as near the shortest go first: a fault is noticed soonest there.
    importing.sort(key=lambda test: (_ONLY_BY_IMPORT in test.parts, mirrored not in test.parents, len(texts[test])))
    neighbours = []
    if code.parts[0] != _ONLY_BY_IMPORT:
        steps = _steps_to(module, root)

        def nearness(test: Path) -> tuple[int, int]:
            found = [steps[name] for name in _imported_modules(texts[test]) if name in steps]
            return min(found, default=len(steps)), len(texts[test])

        neighbours = sorted(mirrored.glob("test_*.py"), key=nearness)
    through = [root / test for folder, test in _THROUGH_FOLDERS.items() if path.startswith(f"{folder}/")]
    through = [test for test in through if test.exists()]
    if nearest_only and named:
        neighbours, through = [], []
    found = dict.fromkeys((*named, *importing, *neighbours, *through))
    return [test.relative_to(root).as_posix() for test in found]


def _mirrored(root: Path, code: Path) -> Path:
    """Returns the folder of tests that mirrors a file's, or the nearest folder above it that has tests."""
    folder = root / "tests" / code.parent
    while not any(folder.glob("test_*.py")) and folder != root / "tests":
        folder = folder.parent
    return folder


def _steps_to(module: str, root: Path) -> dict[str, int]:
    """Returns by how many imports each module of the packages leads to one, 0 for that one; others are missing."""
    files = [path for package in PACKAGES for path in (root / package).rglob("*.py")]
    names = {path: ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__") for path in files}
    imports = {names[path]: _imported_modules(path.read_text(encoding="utf-8")) for path in files}
    steps, last = {module: 0}, {module}
    while last:
        last = {name for name, imported in imports.items() if name not in steps and imported & last}
        steps.update(dict.fromkeys(last, max(steps.values()) + 1))
    return steps


@functools.cache
def _imported_modules(text: str) -> frozenset[str]:
    """Returns the names of all modules that a file of tests imports, and of what it imports from them."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(names)

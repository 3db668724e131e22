"""The layout is the architecture: imports go one way and in no circle, and JAX's internals stay out."""

import ast
import importlib
import pkgutil
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import experiments

ROOT = Path(__file__).resolve().parents[1]
MAY_IMPORT = {
    "cost": {"cost"},
    "search_spaces": {"cost", "search_spaces"},
    "diffshard": {"cost", "search_spaces", "diffshard"},
    "experiments": {"cost", "search_spaces", "diffshard", "experiments"},
}
FILES = [path for package in MAY_IMPORT for path in sorted((ROOT / package).rglob("*.py"))]


def imports(tree: ast.Module, package: str) -> Iterator[tuple[str, str | None]]:
    """Modules that a file imports, and names that it takes from them; `package` is where relative imports begin."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = ".".join(parents[: len(parents) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            yield from ((module, alias.name) for alias in node.names)


def imported_modules(tree: ast.Module, package: str) -> list[str]:
    """Full names of everything that a file imports, without repetitions."""
    names = (names for module, name in imports(tree, package) for names in (module, name and f"{module}.{name}"))
    return list(dict.fromkeys(name for name in names if name))


def violations(source: str, package: str) -> list[str]:
    """The imports of a file in `package` that break the house's rules."""
    allowed = MAY_IMPORT[package.split(".")[0]]
    modules = list(imported_modules(ast.parse(source), package))
    backwards = [m for m in modules if m.split(".")[0] in (MAY_IMPORT.keys() | {"tests"}) - allowed]
    internal = [m for m in modules if f"{m}.".startswith("jax._src.")]
    return backwards + internal


def test_imports_go_one_way_and_avoid_internals():
    found = {}
    for path in FILES:
        place = path.relative_to(ROOT)
        if wrong := violations(path.read_text(encoding="utf-8"), ".".join(place.parent.parts)):
            found[str(place)] = wrong
    assert found == {}


def test_files_that_docstrings_of_modules_name_are_there():
    names = {path.name for folder in (*MAY_IMPORT, "tests") for path in (ROOT / folder).rglob("*.py")}
    gone = {}
    for path in FILES:
        named = re.findall(r"`(?:[\w/]*/)?(\w+\.py)`", ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "")
        if missing := sorted(set(named) - names - {"json.py"}):  # of Python
            gone[str(path.relative_to(ROOT))] = missing
    assert gone == {}


def test_every_module_of_the_experiments_is_imported_unless_a_package_of_others_is_not_here():
    missing = {}
    for module in pkgutil.walk_packages(experiments.__path__, "experiments."):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            missing[module.name] = str(error.name).split(".")[0]
    assert all(name.startswith("experiments.zoo.") for name in missing)  # whose models need what their users have
    assert not set(missing.values()) & set(MAY_IMPORT)


def test_two_files_touch_the_compiler():
    touching = {
        str(path.relative_to(ROOT))
        for path in FILES
        if any(f"{m}.".startswith("jaxlib.") for m in imported_modules(ast.parse(path.read_text("utf-8")), "x"))
    }
    assert touching == {"search_spaces/sharding/shardy.py", "diffshard/checks/explicit_collectives.py"}


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


def imported_files(path: Path) -> list[Path]:
    """The files of ours that a file imports, inside functions and for type checkers, too."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if has_lazy_names(tree):  # its names are imported when they are used; it shows them to editors
        tree.body = [node for node in tree.body if not isinstance(node, ast.If)]
    files = {}
    for module, name in imports(tree, ".".join(path.relative_to(ROOT).parent.parts)):
        # `from package import module` needs nothing of the package's own file.
        file = (file_of(f"{module}.{name}") if name else None) or file_of(module)
        if file is not None:
            files[file] = None
    return list(files)


def has_lazy_names(tree: ast.Module) -> bool:
    """Whether a module's public names are imported when they are first used (`diffshard.public_names`)."""
    return any(isinstance(node, ast.Assign) and "lazy_names(__name__)" in ast.unparse(node) for node in tree.body)


def file_of(module: str) -> Path | None:
    """The file of a module of ours; None for any other name."""
    place = ROOT.joinpath(*module.split("."))
    return next((file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()), None)


def circle(graph: Mapping[str, list[str]]) -> list[str]:
    """A path of a graph that ends where it begins, found by a depth-first search; empty if there is none."""
    finished: set[str] = set()
    path: list[str] = []

    def visit(node: str) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in finished:
            return []
        path.append(node)
        for neighbour in graph.get(node, []):
            if result := visit(neighbour):
                return result
        path.pop()
        finished.add(node)
        return []

    for node in graph:
        if result := visit(node):
            return result
    return []


def test_no_two_parts_of_diffshard_import_each_other():
    parts: dict[str, set[str]] = {}
    for path in FILES:
        place = path.relative_to(ROOT)
        if place.parts[0] == "diffshard" and place.name not in ("__init__.py", "__main__.py"):
            others = (file.relative_to(ROOT).parts for file in imported_files(path))
            parts.setdefault(place.parts[1], set()).update(other[1] for other in others if other[0] == "diffshard")
    both = {(one, other) for one in parts for other in parts[one] - {one} if one in parts.get(other, set())}
    assert both == set()


def test_no_files_import_each_other_in_a_circle():
    graph = {
        str(path.relative_to(ROOT)): [str(file.relative_to(ROOT)) for file in imported_files(path)] for path in FILES
    }
    assert " → ".join(circle(graph)) == ""


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        ({"a": ["b", "c"], "b": ["c"], "c": []}, []),
        ({"a": ["b"], "b": ["c"], "c": ["d", "b"], "d": []}, ["b", "c", "b"]),
        ({"a": ["a"]}, ["a", "a"]),
    ],
)
def test_circles_are_seen(graph: dict[str, list[str]], expected: list[str]):
    assert circle(graph) == expected


def test_every_package_is_seen():
    assert {path.relative_to(ROOT).parts[0] for path in FILES} == set(MAY_IMPORT)


def test_packages_hold_only_their_docstring_and_names():
    """Code in an `__init__` runs whenever one of its submodules is imported, so it could hide a circle."""
    public = ROOT / "diffshard" / "__init__.py"  # the names that users import
    for path in FILES:
        if path.name == "__init__.py" and path != public:
            tree = ast.parse(path.read_text(encoding="utf-8"))
            assert ast.get_docstring(tree), f"{path} has no docstring"
            if not has_lazy_names(tree):
                assert len(tree.body) == 1, f"{path} holds more than a docstring"
                continue
            kinds = [type(node) for node in tree.body[1:]]
            assert kinds == [ast.ImportFrom, ast.ImportFrom, ast.If, ast.Assign], f"{path} holds more than its names"

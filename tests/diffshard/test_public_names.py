"""What `import diffshard` gives: little is imported, and every public name is there."""

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import diffshard

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = [
    ".".join(path.parent.relative_to(ROOT).parts)
    for package in ("cost", "search_spaces", "diffshard", "experiments")
    for path in sorted((ROOT / package).rglob("__init__.py"))
]

SCRIPT = """
import jax, json, sys
before = set(sys.modules)
import diffshard
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def test_importing_the_package_imports_nothing_heavy():
    # A process of its own: this one has imported everything. Modules are counted, as seconds depend on the machine.
    result = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, check=True)
    imported = json.loads(result.stdout)
    assert "diffshard" in imported
    heavy = {"optax", "flax", "scipy", "rich", "cost", "search_spaces"}
    ours = [name for name in imported if name.split(".")[0] in heavy or name.startswith("diffshard.")]
    assert ours == ["diffshard.endings"]  # which tells the other processes of a job of this one's end


@pytest.mark.parametrize("name", diffshard.__all__)
def test_every_public_name_is_there(name):
    assert getattr(diffshard, name) is not None
    assert name in dir(diffshard)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'diffshard' has no attribute 'serach'"):
        _ = diffshard.serach  # pyright: ignore[reportAttributeAccessIssue]


def test_type_checkers_see_what_programs_get():
    tree = ast.parse(Path(diffshard.__file__).read_text("utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    shown = {node.module: tuple(a.name for a in node.names) for node in block.body if isinstance(node, ast.ImportFrom)}
    assert shown == {**diffshard._NAMES_OF, "diffshard": diffshard._MODULES}
    assert sorted(diffshard.__all__) == sorted(name for names in shown.values() for name in names)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_public_name_hides_a_module(package):
    """A function of a package that is called as one of its modules makes the module unreachable as an attribute."""
    module = importlib.import_module(package)
    folder = ROOT.joinpath(*package.split("."))
    submodules = {path.stem for path in folder.glob("*.py")} | {
        path.parent.name for path in folder.glob("*/__init__.py")
    }
    names = set(getattr(module, "__all__", [])) - set(getattr(module, "_MODULES", ()))  # these are the modules
    assert all(hasattr(module, name) for name in names)
    assert submodules.isdisjoint(names)
    defined = {name for name, value in vars(module).items() if not name.startswith("_") and callable(value)}
    assert submodules.isdisjoint(defined)

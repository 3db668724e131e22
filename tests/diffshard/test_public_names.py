"""What `import diffshard` gives: little is imported, and every public name is there."""

import importlib
import inspect
import json
import re
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

WITHOUT_EXAMPLE = (
    "diffshard.nnx",
    "diffshard.initialisation",
    "diffshard.robust_gradients",
    "diffshard.successive_halving",
)
"""Modules whose functions show their use."""

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
    # The first one tells the other processes of a job of this one's end, the second one knows the public names.
    assert ours == ["diffshard.exit_notices", "diffshard.public_names"]


def test_every_public_name_is_there_and_stands_in_one_place():
    modules = {name: value for name in diffshard.__all__ if inspect.ismodule(value := getattr(diffshard, name))}
    names = [name for name in diffshard.__all__ if name not in modules]
    for module in modules.values():
        assert module.__doc__
        assert ">>> " in module.__doc__ or module.__name__ in WITHOUT_EXAMPLE, f"{module.__name__} shows no use"
        own = getattr(module, "__all__", [])
        assert all(getattr(module, name) is not None for name in own)
        assert set(own) <= set(dir(module))
        names += own
    assert len(set(names)) == len(names)
    assert set(diffshard.__all__) <= set(dir(diffshard))


def test_the_top_level_fits_a_page():
    assert len(diffshard.__all__) <= 35


@pytest.mark.parametrize(
    ("module", "name", "said"),
    [
        (diffshard, "serach", "module 'diffshard' has no attribute 'serach'. Did you mean 'search'?"),
        (diffshard, "shard_tables", "no attribute 'shard_tables'. Did you mean 'diffshard.tables.shard_tables'?"),
        (diffshard, "Training", "no attribute 'Training'. Did you mean 'diffshard.elastic.Training'?"),
        (diffshard.elastic, "budgets", "module 'diffshard.elastic' has no attribute 'budgets'. Did you mean 'budget'?"),
        (diffshard.formats, "Format", "module 'diffshard.formats' has no attribute 'Format'. Did you mean 'Formats'?"),
        (diffshard, "zzz", "module 'diffshard' has no attribute 'zzz'"),
        (diffshard, "__wrapped__", "module 'diffshard' has no attribute '__wrapped__'"),
    ],
)
def test_an_unknown_name_is_an_error_that_says_which_was_meant(module, name, said):
    with pytest.raises(AttributeError, match=re.escape(said) + "$"):
        getattr(module, name)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_public_name_hides_a_module(package):
    """A function of a package that is called as one of its modules makes the module unreachable as an attribute."""
    module = importlib.import_module(package)
    folder = ROOT.joinpath(*package.split("."))
    submodules = {path.stem for path in folder.glob("*.py")} | {
        path.parent.name for path in folder.glob("*/__init__.py")
    }
    own = {name: getattr(module, name) for name in getattr(module, "__all__", [])}
    names = {name for name, value in own.items() if not inspect.ismodule(value)}
    assert all(hasattr(module, name) for name in names)
    assert submodules.isdisjoint(names)
    defined = {name for name, value in vars(module).items() if not name.startswith("_") and callable(value)}
    assert submodules.isdisjoint(defined)

"""Public names that are imported when they are first used, so that `import diffshard` costs next to nothing.

A module lists its names once, as imports under `if TYPE_CHECKING:`, where type checkers, editors and the site of the
documentation read them. `lazy_names` reads the same lines when the program runs.
"""

import ast
import importlib
import sys
from collections.abc import Callable
from typing import Any


def lazy_names(module: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Returns `__getattr__`, `__dir__` and `__all__` of a module, from its imports for type checkers.

    >>> __getattr__, __dir__, __all__ = lazy_names(__name__)
    """
    origin = _origins(module)

    def get(name: str) -> Any:
        if name not in origin:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        is_module = origin[name] == module
        value = importlib.import_module(f"{module}.{name}" if is_module else origin[name])
        value = value if is_module else getattr(value, name)
        setattr(sys.modules[module], name, value)  # the next use finds it without a call
        return value

    return get, lambda: sorted({*vars(sys.modules[module]), *origin}), sorted(origin)


def _origins(module: str) -> dict[str, str]:
    """Returns the module that each name is imported from; the module itself for those that are its submodules."""
    loader: Any = sys.modules[module].__loader__
    tree = ast.parse(loader.get_source(module))
    blocks = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    imports = (node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom))
    return {alias.name: str(node.module) for node in imports for alias in node.names}

"""Public names that are imported when they are first used, so that `import diffshard` costs next to nothing.

A module lists its names once, as imports under `if TYPE_CHECKING:`, where type checkers, editors and the site of the
documentation read them. `lazy_names` reads the same lines when the program runs.
"""

import ast
import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def lazy_names(module: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Returns `__getattr__`, `__dir__` and `__all__` of a module, from its imports for type checkers.

    >>> __getattr__, __dir__, __all__ = lazy_names(__name__)
    """
    origin = _origins(module)

    def get(name: str) -> Any:
        if name not in origin:
            advice = "" if name.startswith("_") or _is_submodule(module, name) else _advice(module, name, origin)
            raise AttributeError(f"module {module!r} has no attribute {name!r}{advice}")
        is_module = origin[name] == module
        value = importlib.import_module(f"{module}.{name}" if is_module else origin[name])
        value = value if is_module else getattr(value, name)
        setattr(sys.modules[module], name, value)  # the next use finds it without a call
        return value

    return get, lambda: sorted({*vars(sys.modules[module]), *origin}), sorted(origin)


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Returns the end of an error about a name that is not known: `. Did you mean 'search'?`; "" if none is like it."""
    import difflib

    near = difflib.get_close_matches(name, names, n=1)
    return f". Did you mean {near[0]!r}?" if near else ""


def _is_submodule(module: str, name: str) -> bool:
    """Returns whether a name is that of a file, which Python imports when it is told that there is no attribute."""
    is_package = hasattr(sys.modules[module], "__path__")
    return is_package and importlib.util.find_spec(f"{module}.{name}") is not None


def _advice(module: str, name: str, origin: Mapping[str, str]) -> str:
    """Returns the end of an error about a name that a module does not have: where it is, or which is like it."""
    for topic in (topic for topic, source in origin.items() if source == module):
        if name in _origins(f"{module}.{topic}"):
            return f". Did you mean '{module}.{topic}.{name}'?"
    return did_you_mean(name, origin)


def _origins(module: str) -> dict[str, str]:
    """Returns the module that each name is imported from; the module itself for those that are its submodules."""
    spec: Any = importlib.util.find_spec(module)
    tree = ast.parse(spec.loader.get_source(module))
    blocks = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    imports = (node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom))
    return {alias.name: str(node.module) for node in imports for alias in node.names if alias.asname}

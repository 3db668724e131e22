"""Name scopes for the modules of flax nnx and Equinox: their operations are called by where the module is in the model.

JAX writes the name scopes that are open while an operation is traced into its name stack. Modules of flax linen open a
scope for each call. Those of nnx open none, and Equinox names only the classes of its own layers. So while a function
is traced, calls of their modules open scopes here: the class of the outermost module, then the place of each module in
the one that calls it, as `Net/layers[0]/up`.
"""

import functools
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any, NamedTuple, cast

import jax

_LIBRARIES = ("flax.nnx", "equinox")  # those with a class `Module`

Path = tuple[str, ...]


class _Call(NamedTuple):
    """A module that is being called: its place, and the places of all modules around and inside it."""

    path: Path
    module: Any
    places: Mapping[int, Path]
    classes: Mapping[type, Sequence[Path]]


class _Calls(threading.local):
    """The modules that this thread is calling, outer ones first; None outside of `module_scopes`."""

    open: list[_Call] | None = None


class _Patch:
    """The public methods of modules, replaced by ones that open scopes for as long as any thread traces.

    The lock is held only while classes change, never while a user's function is traced: that may wait for a thread
    which traces, too.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.num_users = 0
        self.originals: dict[FunctionType, FunctionType] = {}  # by what replaces them

    def enter(self) -> None:
        """Replaces the methods of all classes that are defined by now, as far as they are not replaced yet."""
        with self.lock:
            self.num_users += 1
            for cls, name, method in _methods():
                is_called = name == "__call__" or not name.startswith("_")
                if is_called and method not in self.originals:
                    scoped = _scoped(method, name)
                    self.originals[scoped] = method
                    type.__setattr__(cls, name, scoped)

    def leave(self) -> None:
        """Restores the methods after the last user; what others have put in their place meanwhile stays."""
        with self.lock:
            self.num_users -= 1
            if self.num_users:
                return
            for cls, name, method in _methods():
                if method in self.originals:
                    type.__setattr__(cls, name, self.originals[method])
            self.originals.clear()


_CALLS = _Calls()
_PATCH = _Patch()


@contextmanager
def module_scopes() -> Iterator[None]:
    """Opens a name scope for each call of an nnx or Equinox module that this thread makes inside the context.

    The public methods of all classes of modules that are defined by now are replaced, and restored when no thread is
    inside such a context any more. A context inside another begins with no module around it, as JAX's name stack does.
    """
    around = _CALLS.open
    try:
        _PATCH.enter()
        _CALLS.open = []
        yield
    finally:
        _CALLS.open = around
        _PATCH.leave()


def _methods() -> Iterator[tuple[type, str, FunctionType]]:
    """Yields the methods that each class of modules defines itself, with their names."""
    for cls in _module_classes():
        for name, method in list(vars(cls).items()):
            if isinstance(method, FunctionType):
                yield cls, name, method


def _module_classes() -> list[type]:
    """Returns all classes of modules, without base classes and containers, whose methods only manage state."""
    found: dict[type, None] = {}
    pending = [base for library in _LIBRARIES if (base := getattr(sys.modules.get(library), "Module", None))]
    while pending:
        for cls in type.__subclasses__(pending.pop()):
            if cls not in found:
                found[cls] = None
                pending.append(cls)
    return [cls for cls in found if not issubclass(cls, Sequence | Mapping)]


def _scoped(method: FunctionType, name: str) -> FunctionType:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls = _CALLS.open
        if calls is None or (calls and calls[-1].module is self):
            return method(self, *args, **kwargs)
        entered, scope = _enter(self, calls[-1] if calls else None)
        calls.append(entered)
        try:
            with jax.named_scope(scope if name == "__call__" else f"{scope}.{name}"):
                return method(self, *args, **kwargs)
        finally:
            calls.pop()

    return cast(FunctionType, call)


def _enter(module: Any, caller: _Call | None) -> tuple[_Call, str]:
    """Returns the call of a module, and the name of the scope that it opens inside its caller's."""
    if caller is None:
        call = _outermost(module, (type(module).__name__,))
        return call, call.path[0]
    path = caller.places.get(id(module))
    if path is not None:
        return caller._replace(path=path, module=module), _inside(path, caller.path)
    # A slice of stacked modules, or one that was put together again inside a transformation, is a new object.
    same_class = [p for p in caller.classes.get(type(module), ()) if p[: len(caller.path)] == caller.path]
    name = _inside(same_class[0], caller.path) if len(same_class) == 1 else type(module).__name__
    call = _outermost(module, (*caller.path, name))
    return call, name


def _outermost(module: Any, path: Path) -> _Call:
    places: dict[int, Path] = {}
    classes: dict[type, list[Path]] = {}
    for place, inner in _modules_in(module, path):
        if id(inner) not in places:  # a shared module is called by its first place
            places[id(inner)] = place
            classes.setdefault(type(inner), []).append(place)
    return _Call(path, module, places, classes)


def _modules_in(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Yields all modules in a module, list, tuple or dictionary with their paths, outer ones first."""
    bases = tuple(base for library in _LIBRARIES if (base := getattr(sys.modules.get(library), "Module", None)))
    pending, seen = [(path, value)], set()
    while pending:
        path, value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Mapping):
            pending += [((*path, str(key)), inner) for key, inner in reversed(list(value.items()))]
        elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
            numbered = [((*path[:-1], f"{path[-1]}[{i}]"), inner) for i, inner in enumerate(value)]
            pending += reversed(numbered)
        elif isinstance(value, bases):
            yield path, value
            pending += [((*path, name), inner) for name, inner in reversed(list(vars(value).items()))]


def _inside(path: Path, outer: Path) -> str:
    """Returns a path relative to that of a module around it, or without the outermost module."""
    return "/".join(path[len(outer) :] if path[: len(outer)] == outer else path[1:])

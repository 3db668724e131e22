"""A traced function as text that is the same in every process: without hash seeds, ids, addresses and source lines.

JAX's own text of a jaxpr has some of these, and is slow. Variables are numbered in the order in which they appear, and
a jaxpr inside an equation is written once however many equations share it. Constants that the function closes over
have types only, because a plan does not depend on their values.
"""

import dataclasses
import dis
import enum
import functools
import hashlib
import re
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core
from jax.sharding import AbstractMesh, Mesh, NamedSharding

_ADDRESS = re.compile(r"\b0x[0-9a-f]+")
_LARGEST_SHOWN_CONSTANT = 64
"""Elements of an array inside an equation that are written out; larger ones are data like closed-over arrays."""
_DEPTH = 6
"""How deep the attributes of an unknown object are written: they may lead back to the object."""
_DIGITS_OF_FUNCTION = 32
"""The length of a function's hash: 128 bits in hexadecimal digits."""
_CHANGING_METHODS = frozenset(("add", "append", "extend", "insert", "setdefault", "update"))
"""Methods that change a list, a dict or a set."""
_CALLBACK_DEPTH = 1
"""Shows the function in JAX's wrapper of a callback, by its name and byte code."""


def program_text(jaxpr: core.ClosedJaxpr) -> str:
    """Returns the text of a jaxpr: a line for its arguments, one for each equation, and one for its results."""
    writer = _Writer()
    body = writer.body(jaxpr.jaxpr)
    return "\n".join((*(f"jaxpr {number}\n{text}" for text, number in writer.inner.items()), body))


def value_text(value: Any) -> str:
    """Returns a text of any value that is equal for equal values in every process, as far as that can be known.

    Functions are written by their name and a hash of their byte code, of the values that they close over and of their
    defaults, not of the global variables that they read. Large arrays are written as a hash of their values, objects of
    unknown classes by their attributes.
    """
    return _ValueWriter().value(value)


class _Writer:
    """Writes jaxprs; those that were written already are referred to by number.

    Attributes:
      inner: the texts of jaxprs inside equations, and the number of each.
    """

    def __init__(self) -> None:
        self.inner: dict[str, int] = {}
        self._names: dict[int, tuple[str, Any]] = {}  # by id, with what must stay alive for it to keep its id
        self._types: dict[Any, str] = {}
        self._functions: dict[tuple[int, int], tuple[str, Any]] = {}  # by id and depth, with the function

    def body(self, jaxpr: Any) -> str:
        """Returns the lines of a jaxpr."""
        numbers: dict[Any, int] = {}

        def defined(variable: Any) -> str:
            numbers[variable] = len(numbers)
            return f"{numbers[variable]}:{self._type(variable.aval)}"

        def used(atom: Any) -> str:
            if isinstance(atom, core.Literal):
                return f"{self.value(atom.val)}:{self._type(atom.aval)}"
            return str(numbers[atom])

        lines = [" ".join(("arguments", *map(defined, jaxpr.constvars), "/", *map(defined, jaxpr.invars)))]
        for equation in jaxpr.eqns:
            operands = " ".join([used(atom) for atom in equation.invars])
            params = " ".join([f"{name}={self._param(name, value)}" for name, value in sorted(equation.params.items())])
            results = " ".join([defined(variable) for variable in equation.outvars])
            lines.append(f"{results} = {equation.primitive.name}[{params}] {operands}")
        lines.append(" ".join(("results", *map(used, jaxpr.outvars))))
        return "\n".join(lines)

    def _param(self, name: str, value: Any) -> str:
        """Returns the text of a parameter; of a callback not what it closes over, in which it may collect values."""
        return self.value(value, _CALLBACK_DEPTH if name == "callback" else _DEPTH)

    def value(self, value: Any, depth: int = _DEPTH) -> str:
        """Returns the text of a parameter."""
        if value is None or isinstance(value, bool | int | str | float | complex | bytes):
            return repr(value) if type(value).__module__ == "builtins" else f"{type(value).__name__}({value!r})"
        if isinstance(value, tuple | list):
            return f"({', '.join([self.value(item, depth) for item in value])})"
        if isinstance(value, Mapping):
            return (
                f"{{{', '.join(sorted(f'{self.value(k, depth)}: {self.value(v, depth)}' for k, v in value.items()))}}}"
            )
        if isinstance(value, set | frozenset):
            return f"{{{', '.join(sorted(self.value(item, depth) for item in value))}}}"
        if isinstance(value, core.ClosedJaxpr):
            return self._once(value.jaxpr)
        if hasattr(value, "eqns") and hasattr(value, "outvars"):
            return self._once(value)
        if isinstance(value, np.ndarray | np.generic | jax.Array):
            return self._array(value)
        if isinstance(value, Mesh | AbstractMesh):
            return f"mesh({dict(value.shape)}, {value.axis_types})"
        if isinstance(value, NamedSharding):
            return f"{self.value(value.mesh)}, {value.spec}, {value.memory_kind}"
        if isinstance(value, enum.Enum):
            return str(value)
        return self._object(value, depth)

    def _type(self, aval: Any) -> str:
        text = self._types.get(aval)
        if text is None:
            text = self._types[aval] = _ADDRESS.sub("", f"{aval.str_short()}{'*' * getattr(aval, 'weak_type', False)}")
        return text

    def _once(self, jaxpr: Any) -> str:
        known = self._names.get(id(jaxpr))
        if known is None:  # by text, because it depends on JAX's caches which equations share one
            number = self.inner.setdefault(self.body(jaxpr), len(self.inner))
            known = self._names[id(jaxpr)] = f"<jaxpr {number}>", jaxpr
        return known[0]

    def _array(self, array: Any) -> str:
        is_key = isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
        has_values = not isinstance(array, jax.Array) or (not isinstance(array, Tracer) and array.is_fully_addressable)
        if not has_values:
            return _type_text(array)
        if is_key or array.size > _LARGEST_SHOWN_CONSTANT:
            return self._large_array(array, is_key)
        return f"{array.dtype}({self.value(np.asarray(array).tolist())})"

    def _large_array(self, array: Any, is_key: bool) -> str:
        del is_key
        return _type_text(array)

    def _object(self, value: Any, depth: int) -> str:
        if isinstance(value, functools.partial):
            return f"partial({', '.join(self.value(v, depth) for v in (value.func, value.args, value.keywords))})"
        if isinstance(value, type | np.dtype):
            return str(value)
        if isinstance(value, types.ModuleType):
            return value.__name__
        if isinstance(value, types.MethodType):
            return f"{self._function(value.__func__, depth)} of {self.value(value.__self__, depth - 1)}"
        if isinstance(value, types.FunctionType | types.BuiltinFunctionType):
            return self._function(value, depth)
        text = _text_that_says_all(value)
        is_dataclass = dataclasses.is_dataclass(value)
        if text is not None and (not is_dataclass or depth <= 0):
            return f"{type(value).__qualname__} {text}"
        if depth <= 0:
            return type(value).__qualname__
        if is_dataclass:  # its own text may shorten arrays, and leave out what functions close over
            attributes = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
        else:
            attributes = getattr(value, "__dict__", {})
        return f"{type(value).__qualname__}{self.value(attributes, depth - 1)}"

    def _function(self, function: Callable[..., Any], depth: int) -> str:
        """Returns a function's name and a hash of what it does, which is short where functions refer to each other."""
        name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"
        code = getattr(function, "__code__", None)
        if code is None:
            return name
        known = self._functions.get((id(function), depth))
        if known is None:
            texts = [self._code(code)]
            if depth > 0 and not name.startswith("jax."):  # JAX's own functions close over caches and counters
                values = _closed_over(function)
                defaults = (function.__defaults__, function.__kwdefaults__)
                texts += [self.value(value, depth - 1) for value in (*values, *defaults)]
            digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()[:_DIGITS_OF_FUNCTION]
            known = self._functions[id(function), depth] = f"{name} {digest}", function
        return known[0]

    def _code(self, code: types.CodeType) -> str:
        """Returns the instructions, names and constants of a function's byte code, as text."""
        constants = [self._code(c) if isinstance(c, types.CodeType) else self.value(c) for c in code.co_consts]
        return f"{code.co_code.hex()} {code.co_names} {constants}"


class _ValueWriter(_Writer):
    """Writes values on which a plan depends, unlike on the constants of a program: also large arrays and keys."""

    def _large_array(self, array: Any, is_key: bool) -> str:
        host = np.asarray(jax.random.key_data(array) if is_key else array)
        content = repr(host.tolist()).encode() if host.dtype.hasobject else host.tobytes()
        return f"{_type_text(array)} {hashlib.sha256(content).hexdigest()}"


def _type_text(array: Any) -> str:
    return f"{array.dtype}{list(array.shape)}"


def _closed_over(function: Callable[..., Any]) -> list[Any]:
    """Returns the values that a function closes over; of those that it changes, such as counters, the types only.

    That would be different in every call, and in a process that only waits for another one's result.
    """
    instructions = list(_instructions(function.__code__))
    assigned = {i.argval for i in instructions if i.opname == "STORE_DEREF"}
    changes_items = any(i.opname == "STORE_SUBSCR" or i.argval in _CHANGING_METHODS for i in instructions)
    values = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            value = None
        is_changed = name in assigned or (changes_items and isinstance(value, list | dict | set))
        values.append(type(value) if is_changed else value)
    return values


def _instructions(code: types.CodeType) -> Iterator[dis.Instruction]:
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _instructions(constant)


def _text_that_says_all(value: Any) -> str | None:
    """Returns an object's own text; None where it has addresses, or is shortened as NumPy shortens arrays."""
    text = repr(value)
    return None if _ADDRESS.search(text) or "..." in text else text

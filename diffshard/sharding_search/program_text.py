"""A traced function as text that is the same in every process: without hash seeds, ids, addresses and source lines.

JAX's own text of a jaxpr has some of these, and is slow. Variables are numbered in the order in which they appear, and
a jaxpr inside an equation is written once however many equations share it. Constants that the function closes over
have types only, because a plan does not depend on their values.
"""

import dataclasses
import enum
import functools
import re
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import AbstractMesh, Mesh, NamedSharding

_ADDRESS = re.compile(r"\b0x[0-9a-f]+")
_LARGEST_SHOWN_CONSTANT = 64
"""Elements of an array inside an equation that are written out; larger ones are data like closed-over arrays."""
_DEPTH = 6
"""How deep the attributes of an unknown object are written: they may lead back to the object."""


def program_text(jaxpr: core.ClosedJaxpr) -> str:
    """Returns the text of a jaxpr: a line for its arguments, one for each equation, and one for its results."""
    writer = _Writer()
    body = writer.body(jaxpr.jaxpr)
    return "\n".join((*(f"jaxpr {number}\n{text}" for text, number in writer.inner.items()), body))


def value_text(value: Any) -> str:
    """Returns a text of any value that is equal for equal values in every process, as far as that can be known.

    Functions are written by their name and byte code, objects of unknown classes by their attributes.
    """
    return _Writer().value(value)


class _Writer:
    """Writes jaxprs; those that were written already are referred to by number.

    Attributes:
      inner: the texts of jaxprs inside equations, and the number of each.
    """

    def __init__(self) -> None:
        self.inner: dict[str, int] = {}
        self._names: dict[int, tuple[str, Any]] = {}  # by id, with what must stay alive for it to keep its id
        self._types: dict[Any, str] = {}

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
            params = " ".join([f"{name}={self.value(value)}" for name, value in sorted(equation.params.items())])
            results = " ".join([defined(variable) for variable in equation.outvars])
            lines.append(f"{results} = {equation.primitive.name}[{params}] {operands}")
        lines.append(" ".join(("results", *map(used, jaxpr.outvars))))
        return "\n".join(lines)

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
        if is_key or array.size > _LARGEST_SHOWN_CONSTANT:
            return f"{array.dtype}{list(array.shape)}"
        return f"{array.dtype}({np.asarray(array).tolist()})"

    def _object(self, value: Any, depth: int) -> str:
        if isinstance(value, functools.partial):
            return f"partial({', '.join(self.value(v, depth) for v in (value.func, value.args, value.keywords))})"
        if isinstance(value, type | np.dtype):
            return str(value)
        if isinstance(value, types.MethodType):
            return f"{self._function(value.__func__)} of {self.value(value.__self__, depth - 1)}"
        if isinstance(value, types.FunctionType | types.BuiltinFunctionType):
            return self._function(value)
        text = _text_without_addresses(value)
        if text is not None:
            return f"{type(value).__qualname__} {text}"
        if depth <= 0:
            return type(value).__qualname__
        if dataclasses.is_dataclass(value):
            attributes = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
        else:
            attributes = getattr(value, "__dict__", {})
        return f"{type(value).__qualname__}{self.value(attributes, depth - 1)}"

    def _function(self, function: Callable[..., Any]) -> str:
        code = getattr(function, "__code__", None)
        name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"
        return name if code is None else f"{name} {_code_text(code)}"


def _code_text(code: types.CodeType) -> str:
    """Returns what a function's byte code does: instructions, names and constants."""
    constants = [_code_text(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts]
    is_ordered = not any(isinstance(c, frozenset) for c in code.co_consts)
    return f"{code.co_code.hex()} {code.co_names} {constants if is_ordered else sorted(constants)}"


def _text_without_addresses(value: Any) -> str | None:
    """Returns an object's own text; None where it has addresses, so that it says nothing in another process."""
    text = repr(value)
    return None if _ADDRESS.search(text) else text

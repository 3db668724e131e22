"""Rows that each example reads by its own number, as in `logp[jnp.arange(batch), labels]`, read without these numbers.

A gather that is told the numbers of its rows seems to mix examples, for any row could be named. Where the numbers are
0, 1, 2 and so on, whatever the arguments are, each example reads its own row: the dimension is then one over which the
gather is mapped (`operand_batching_dims`), and can be divided like any other. The same holds for the scatter that is
its derivative.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.extend import core

from search_spaces.replay import REMAT, bind, evaluated, traced_again, with_inner, without_calls

_MOST_ELEMENTS = 2**22
"""How many indices are computed at most to see whether they are the numbers of rows; they take 16 MiB."""


class _Names(NamedTuple):
    """How the dimension numbers of a primitive call what those of gathers and scatters have in common."""

    one_wide: str
    index_map: str
    of_operand: str
    of_indices: str


_GATHER = _Names("collapsed_slice_dims", "start_index_map", "operand_batching_dims", "start_indices_batching_dims")
_SCATTER = _Names(
    "inserted_window_dims", "scatter_dims_to_operand_dims", "operand_batching_dims", "scatter_indices_batching_dims"
)


def with_own_rows(program: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Returns a program whose gathers and scatters name no rows by their own numbers; the same one if none does.

    Calls are part of the program that makes them there: a scatter has its indices from the call of the gather.
    """
    if not any(map(_names_several, with_inner(program.jaxpr.eqns))):
        return program
    flat = without_calls(program)
    level = _Level(flat.jaxpr, flat.consts)
    return traced_again(flat, level.run) if level.changes else program


def _names_several(equation: core.JaxprEqn) -> bool:
    """Returns whether an equation is a gather or scatter that has indices of several dimensions."""
    names = _names_of(equation)
    return names is not None and len(getattr(equation.params["dimension_numbers"], names.index_map)) > 1


def _names_of(equation: core.JaxprEqn) -> _Names | None:
    name = equation.primitive.name
    return _GATHER if name == "gather" else _SCATTER if name.startswith("scatter") else None


class _Level:
    """The equations of a jaxpr, and how some are changed.

    Attributes:
      changes: by the identity of an equation what binds it for its operands.
    """

    def __init__(self, jaxpr: Any, consts: Sequence[Any]):
        self._jaxpr, self._consts = jaxpr, list(consts)
        self._makers = {v: equation for equation in jaxpr.eqns for v in equation.outvars}
        self._known: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        self.changes: dict[int, Callable[[Sequence[Any]], Sequence[Any]]] = {}
        for equation in jaxpr.eqns:
            change = self._change(equation)
            if change is not None:
                self.changes[id(equation)] = change

    def run(self, *arrays: Any) -> list[Any]:
        """Runs the jaxpr with its changes."""

        def changed(equation: core.JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
            return self.changes.get(id(equation), partial(bind, equation))(operands)

        return evaluated(self._jaxpr, self._consts, arrays, changed)

    def _change(self, equation: core.JaxprEqn) -> Callable[[Sequence[Any]], Sequence[Any]] | None:
        if equation.primitive.name in ("scan", *REMAT):
            return _inner_change(equation)
        names = _names_of(equation)
        return None if names is None else self._change_of_rows(equation, names)

    def _change_of_rows(
        self, equation: core.JaxprEqn, names: _Names
    ) -> Callable[[Sequence[Any]], Sequence[Any]] | None:
        numbers, (operand, indices) = equation.params["dimension_numbers"], equation.invars[:2]
        maker = self._makers.get(indices) if isinstance(indices, core.Var) else None
        batch_shape = _shape(indices)[:-1]
        if maker is None or maker.primitive.name != "concatenate" or maker.params["dimension"] != len(batch_shape):
            return None
        columns, index_map = maker.invars, getattr(numbers, names.index_map)
        if any(_shape(column)[-1] != 1 for column in columns) or len(columns) != len(index_map):
            return None
        own: dict[int, int] = {}  # of the operand's dimensions, that of the indices over which rows have own numbers
        taken = set(getattr(numbers, names.of_indices))
        for dim, column in zip(index_map, columns, strict=True):
            along = self._own_numbers(column, _shape(operand)[dim])
            if along is not None and along not in taken and dim in getattr(numbers, names.one_wide):
                own[dim] = along
                taken.add(along)
        kept = [i for i, dim in enumerate(index_map) if dim not in own]
        if not own or not kept:
            return None
        pairs = [
            *zip(getattr(numbers, names.of_operand), getattr(numbers, names.of_indices), strict=True),
            *own.items(),
        ]
        pairs.sort()
        changed = numbers._replace(
            **{
                names.one_wide: tuple(d for d in getattr(numbers, names.one_wide) if d not in own),
                names.index_map: tuple(index_map[i] for i in kept),
                names.of_operand: tuple(dim for dim, _ in pairs),
                names.of_indices: tuple(along for _, along in pairs),
            }
        )

        def change(operands: Sequence[Any]) -> Sequence[Any]:
            columns = [lax.slice_in_dim(operands[1], i, i + 1, axis=-1) for i in kept]
            rest = lax.concatenate(columns, len(batch_shape)) if len(kept) > 1 else columns[0]
            return bind(equation, [operands[0], rest, *operands[2:]], dimension_numbers=changed)

        return change

    def _own_numbers(self, column: Any, count: int) -> int | None:
        """Returns the dimension along which a column of indices is 0, 1, ... below `count`; None if there is none."""
        shape = _shape(column)[:-1]
        if count not in shape or (found := self._value(column)) is None:
            return None
        values = np.asarray(found)[..., 0]
        for dim, size in enumerate(shape):
            if (
                size == count
                and (values == np.arange(count).reshape([-1 if d == dim else 1 for d in range(len(shape))])).all()
            ):
                return dim
        return None

    def _value(self, variable: Any) -> Any:
        """Returns the value of what no argument changes; None for others, and for what is large."""
        if not isinstance(variable, core.Var):
            return variable.val
        if variable not in self._known:
            self._known[variable] = None
            equation = self._makers.get(variable)
            if equation is not None and prod(_shape(variable)) <= _MOST_ELEMENTS and not equation.effects:
                operands = [self._value(v) for v in equation.invars]
                if all(operand is not None for operand in operands):
                    with jax.ensure_compile_time_eval():
                        self._known.update(zip(equation.outvars, bind(equation, operands), strict=True))
        return self._known[variable]


def _inner_change(equation: core.JaxprEqn) -> Callable[[Sequence[Any]], Sequence[Any]] | None:
    """Returns a function that binds a scan or region with its changed jaxpr; None if that is the same."""
    inner = equation.params["jaxpr"]
    is_closed = isinstance(inner, core.ClosedJaxpr)
    closed = inner if is_closed else core.ClosedJaxpr(inner, ())
    changed = with_own_rows(closed)
    if changed is closed or (not is_closed and changed.consts):
        return None
    return partial(bind, equation, jaxpr=changed if is_closed else changed.jaxpr)


def _shape(variable: Any) -> tuple[int, ...]:
    return tuple(variable.aval.shape)

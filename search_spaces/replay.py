"""Evaluates a traced function again: what all code shares that runs a jaxpr equation by equation.

A jaxpr is run again by reading the operands of each equation from an environment, binding its primitive, and putting
the results back. A replay changes something on the way (shardings, collectives); everything else must come out as it
was traced, with the user's source lines and name scopes.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core, source_info_util
from jax.interpreters.partial_eval import dce_jaxpr

from cost.compute import inner_jaxprs

CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",  # the forward part of rematerialised functions since JAX 0.11
}
"""Primitives that only call a jaxpr, with the parameter that holds it."""
REMAT = ("remat2", "checkpoint", "remat")
"""The names that rematerialisation has had as a primitive."""


@contextmanager
def context_of(equation: core.JaxprEqn) -> Iterator[None]:
    """Restores, for what is traced inside, the source line, name scope and settings of an equation."""
    with source_of(equation), equation.ctx.manager:
        yield


def source_of(equation: core.JaxprEqn) -> AbstractContextManager[None]:
    """Restores, for what is traced inside, the source line and name scope of an equation alone."""
    info = equation.source_info
    stack = source_info_util.current_name_stack() + info.name_stack
    return source_info_util.user_context(info.traceback, name_stack=stack)


def bind(equation: core.JaxprEqn, operands: Sequence[Any], **parameters: Any) -> Sequence[Any]:
    """Evaluates an equation for other operands, with some of its parameters changed, and returns its results."""
    params = equation.primitive.get_bind_params({**equation.params, **parameters})
    if equation.primitive.name in ("dynamic_slice", "dynamic_update_slice"):
        operands = _within_range(operands, params.get("slice_sizes"))
    results = equation.primitive.bind(*operands, **params)
    return results if equation.primitive.multiple_results else [results]


def _within_range(operands: Sequence[Any], slice_sizes: Sequence[int] | None) -> list[Any]:
    """Returns the operands of a dynamic slice or its update with starts in range, as both have to take them.

    XLA joins a slice with the one that a sharding makes of its result, and then takes a start beyond the end as it is.
    """
    num_arrays = 1 if slice_sizes is not None else 2
    sizes = jnp.shape(operands[1]) if slice_sizes is None else slice_sizes
    starts = []
    for start, size, whole in zip(operands[num_arrays:], sizes, jnp.shape(operands[0]), strict=True):
        dtype = jnp.result_type(start)
        last = min(whole - size, jnp.iinfo(dtype).max)
        starts.append(lax.clamp(jnp.zeros((), dtype), start, jnp.full((), last, dtype)))
    return [*operands[:num_arrays], *starts]


class ScanOperands(NamedTuple):
    """The operands of a scan, or their variables: the same in each trip, carried, and read slice by slice."""

    constants: list[Any]
    carries: list[Any]
    slices: list[Any]


def scan_operands(equation: core.JaxprEqn, operands: Sequence[Any]) -> ScanOperands:
    """Tells the operands of a scan apart.

    JAX versions name the parameters that count them differently, but what is stacked always has a dimension more than
    its slice.

    Args:
      operands: one for each of its invars, or of its body's invars.
    """
    operands, body = list(operands), equation.params["jaxpr"].jaxpr
    num_slices = sum(_rank(outer) > _rank(v) for outer, v in zip(equation.invars, body.invars, strict=True))
    num_carries = sum(_rank(outer) == _rank(v) for outer, v in zip(equation.outvars, body.outvars, strict=True))
    first_slice = len(operands) - num_slices
    first_carry = first_slice - num_carries
    return ScanOperands(operands[:first_carry], operands[first_carry:first_slice], operands[first_slice:])


def scan_again(
    equation: core.JaxprEqn, body: Callable[[Any, Any], tuple[Any, Any]], carries: Any, slices: Any
) -> tuple[Any, Any]:
    """Runs a scan with another body: as long, in the same direction and as far unrolled as it was traced."""
    params = equation.params
    return lax.scan(body, carries, slices, length=params["length"], reverse=params["reverse"], unroll=params["unroll"])


class WhileOperands(NamedTuple):
    """The operands of a while loop: those that only its condition or its body reads, and what it carries."""

    of_condition: list[Any]
    of_body: list[Any]
    carries: list[Any]


def while_operands(equation: core.JaxprEqn, operands: Sequence[Any]) -> WhileOperands:
    """Tells the operands of a while loop apart."""
    operands, first_of_body = list(operands), equation.params["cond_nconsts"]
    first_carry = first_of_body + equation.params["body_nconsts"]
    return WhileOperands(operands[:first_of_body], operands[first_of_body:first_carry], operands[first_carry:])


def abstract_argument(aval: Any) -> jax.ShapeDtypeStruct:
    """Returns an array of an abstract value's shape and type, to trace a function with; without its sharding."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def with_inner(equations: Iterable[core.JaxprEqn]) -> Iterator[core.JaxprEqn]:
    """Yields equations, and after each one those inside of it, at any depth."""
    for equation in equations:
        yield equation
        for inner in inner_jaxprs(equation):
            yield from with_inner(getattr(inner, "jaxpr", inner).eqns)


def traced_again(program: core.ClosedJaxpr, run: Callable[..., Any]) -> core.ClosedJaxpr:
    """Traces a function of as many arrays as a program has, of the same types."""
    return jax.make_jaxpr(run)(*map(abstract_argument, program.in_avals))


def evaluated(
    jaxpr: Any,
    consts: Sequence[Any],
    operands: Sequence[Any],
    run: Callable[[core.JaxprEqn, list[Any]], Sequence[Any]] = bind,
    calls: Mapping[str, str] | None = None,
    context: Callable[[core.JaxprEqn], AbstractContextManager[None]] = context_of,
) -> list[Any]:
    """Runs a jaxpr equation by equation, and returns its results.

    Args:
      run: `run(equation, operands)` returns the results of an equation, in whose context it is called.
      calls: names of primitives that call a jaxpr, with the parameter that holds it; their equations run in its place.
      context: what is restored of each equation.
    """
    env = {**dict(zip(jaxpr.constvars, consts, strict=True)), **dict(zip(jaxpr.invars, operands, strict=True))}
    for equation in jaxpr.eqns:
        given = [atom.val if isinstance(atom, core.Literal) else env[atom] for atom in equation.invars]
        called = equation.params.get((calls or {}).get(equation.primitive.name, ""))
        with context(equation):
            if called is None:
                made = run(equation, given)
            else:
                inner = (called.jaxpr, called.consts) if isinstance(called, core.ClosedJaxpr) else (called, ())
                made = evaluated(*inner, given, run, calls, context)
        env.update(zip(equation.outvars, made, strict=True))
    return [atom.val if isinstance(atom, core.Literal) else env[atom] for atom in jaxpr.outvars]


def without_dead_code(program: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Returns a program without what no result needs, such as derivatives of metrics beside a loss."""
    live, _ = dce_jaxpr(program.jaxpr, [True] * len(program.jaxpr.outvars), instantiate=True)
    return core.ClosedJaxpr(live, program.consts)


def without_calls(program: core.ClosedJaxpr, calls: Mapping[str, str] = CALLS) -> core.ClosedJaxpr:
    """Returns a program in which the equations of the programs that it calls stand in place of the calls.

    Args:
      program: the one that calls.
      calls: names of primitives that call a jaxpr, with the parameter that holds it.
    """
    if not any(equation.primitive.name in calls for equation in program.jaxpr.eqns):
        return program
    return traced_again(program, lambda *operands: evaluated(program.jaxpr, program.consts, operands, calls=calls))


def custom_vjp_with_tangents(equation: core.JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
    """Runs a user's `jax.custom_vjp` under `jax.jvp`: its tangents are the transpose of its custom backward.

    A custom backward that is not linear, such as one that clips, counts with its derivative at cotangents of 0.
    """
    differentiable = [_has_tangents(x) for x in operands]

    def results(numbers: Sequence[jax.Array], others: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        return _separate(bind(equation, _interleave(differentiable, numbers, others)))

    @jax.custom_jvp
    def op(numbers: Sequence[jax.Array], others: Sequence[Any]) -> list[jax.Array]:
        return results(numbers, others)[0]

    @op.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        numbers, others = primals
        y, pull, _ = jax.vjp(lambda x: results(x, others), lax.stop_gradient(numbers), has_aux=True)
        _, push = jax.vjp(lambda cotangents: pull(cotangents)[0], jax.tree.map(jnp.zeros_like, y))
        return results(numbers, others)[0], push(lax.stop_gradient(tangents[0]))[0]

    numbers, others = _separate(operands)
    kinds = [jnp.issubdtype(var.aval.dtype, jnp.inexact) for var in equation.outvars]  # type: ignore[attr-defined]
    other_results = [] if all(kinds) else results(lax.stop_gradient(numbers), others)[1]
    return _interleave(kinds, op(numbers, others), other_results)


def _rank(variable: Any) -> int:
    return len(variable.aval.shape)


def _has_tangents(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def _separate(values: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Separates the values that have tangents from the others."""
    values = list(values)
    return [x for x in values if _has_tangents(x)], [x for x in values if not _has_tangents(x)]


def _interleave(differentiable: Sequence[bool], numbers: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Undoes `_separate`."""
    next_number, next_other = iter(numbers), iter(others)
    return [next(next_number if is_one else next_other) for is_one in differentiable]


_LIBRARIES = ("jax", "flax", "optax", "equinox", "haiku", "chex")  # what models are written with
_OWN_FOLDER = Path(__file__).resolve().parents[1]
_ENTRY = f"{_OWN_FOLDER / 'diffshard'}{os.sep}"
_INSIDE = (  # code of ours that runs between a line of the user and an operation
    f"{_OWN_FOLDER / 'search_spaces'}{os.sep}",
    f"{_OWN_FOLDER / 'cost'}{os.sep}",
    str(_OWN_FOLDER / "diffshard" / "sharding_search" / "module_scopes.py"),  # around each call of a module
)


def user_source(equation: core.JaxprEqn, callers: Sequence[core.JaxprEqn] = ()) -> str:
    """Returns file, line and function of the user's code that an equation comes from: `net.py:12 (Net.__call__)`.

    That is the innermost line outside the libraries that models are written with; where there is none, the innermost
    line outside JAX. JAX traces a function of a library once and keeps it, so that its equations may name no user, or
    another one: then those that call it are asked.
    """
    inside_out = (equation, *reversed(callers))
    lines = (_user_line(e) for e in inside_out)
    summaries = (source_info_util.summarize(e.source_info) for e in inside_out)
    return next(filter(None, (*lines, *summaries)), "")


def _user_line(equation: core.JaxprEqn) -> str:
    """Returns the innermost line outside the libraries, empty if there is none."""
    traceback: Any = equation.source_info.traceback
    folders = tuple(
        f"{os.path.dirname(module.__file__)}{os.sep}"
        for name in _LIBRARIES
        if (module := sys.modules.get(name)) is not None and module.__file__
    )
    for frame in traceback.frames if traceback is not None else ():
        if frame.file_name.startswith((*_INSIDE, *folders, "<")):
            continue
        if frame.file_name.startswith(_ENTRY):
            break  # further out is the call of the search, not of the function that it is about
        return f"{frame.file_name}:{frame.line_num} ({frame.function_name})"
    return ""


def function_source(fn: Any) -> str:
    """Returns file, line and name of a function's definition; its name alone where Python does not know them."""
    inner = fn
    while (deeper := getattr(inner, "__wrapped__", None) or getattr(inner, "func", None)) is not None:
        inner = deeper
    code = getattr(inner, "__code__", None) or getattr(vars(type(inner)).get("__call__"), "__code__", None)
    name = getattr(inner, "__name__", None) or type(inner).__name__
    return name if code is None else f"{code.co_filename}:{code.co_firstlineno} ({name})"

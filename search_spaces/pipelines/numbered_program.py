"""A traced program without calls, whose equations carry numbers that outlive further traces.

A number is a name scope around an equation. Whatever runs the equations again keeps their scopes, so that what a later
program has in place of an equation is known by its number. `without_numbers` takes them away in the end.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core, source_info_util

from search_spaces.replay import bind, context_of
from search_spaces.sharding.tracing import INLINED_BODIES

_NUMBER = re.compile(r"equation#(\d+)$")
_SEGMENT = re.compile(r"segment#(\d+)$")


class Mark(NamedTuple):
    """Where an equation comes from.

    Attributes:
      number: of the equation of the numbered program.
      segment: of the layers, 0 where the equation is not divided.
    """

    number: int
    segment: int


def numbered_program(program: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Traces a program again without calls; each of its equations gets a number, which `mark_of` reads."""
    count = 0

    def run(jaxpr: core.Jaxpr, constants: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
        nonlocal count
        env: dict[core.Var, Any] = dict(zip(jaxpr.constvars, constants, strict=True))
        env.update(zip(jaxpr.invars, operands, strict=True))
        for equation in jaxpr.eqns:
            values = [env[v] if isinstance(v, core.Var) else v.val for v in equation.invars]
            body = equation.params.get(INLINED_BODIES.get(equation.primitive.name, ""))
            if body is not None:
                closed = body if isinstance(body, core.ClosedJaxpr) else core.ClosedJaxpr(body, [])
                with context_of(equation):
                    results = run(closed.jaxpr, closed.consts, values)
            else:
                with source_info_util.extend_name_stack(f"equation#{count}"), context_of(equation):
                    results = bind(equation, values)
                count += 1
            env.update(zip(equation.outvars, results, strict=True))
        return [env[v] if isinstance(v, core.Var) else v.val for v in jaxpr.outvars]

    return jax.make_jaxpr(lambda *arrays: run(program.jaxpr, program.consts, arrays))(*map(shape_of, program.in_avals))


def in_segment(number: int) -> Any:
    """Returns a context in which equations are of a segment of the layers."""
    return source_info_util.extend_name_stack(f"segment#{number}")


def mark_of(equation: core.JaxprEqn) -> Mark | None:
    """Returns where an equation comes from; None of one that is in no numbered program."""
    scopes = [scope.name for scope in equation.source_info.name_stack.stack]
    numbers = [int(found[1]) for scope in scopes if (found := _NUMBER.match(scope))]
    segments = [int(found[1]) for scope in scopes if (found := _SEGMENT.match(scope))]
    return Mark(numbers[0], segments[0] if segments else 0) if numbers else None


def without_numbers(program: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Returns a program whose equations have no numbers."""

    def unmarked(equation: core.JaxprEqn) -> core.JaxprEqn:
        info = equation.source_info
        scopes = (s for s in info.name_stack.stack if not (_NUMBER.match(s.name) or _SEGMENT.match(s.name)))
        stack = source_info_util.NameStack(tuple(scopes))
        return equation.replace(source_info=info.replace(name_stack=stack))

    jaxpr = program.jaxpr.replace(eqns=[unmarked(equation) for equation in program.jaxpr.eqns])
    return core.ClosedJaxpr(jaxpr, program.consts)


def shape_of(aval: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape, dtype and weak type of a variable."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))

"""Operations that `jax.vmap` breaks unless all their operands have the mapped dimension, or none.

JAX gives an operand without the dimension one of size 1, and some primitives do not stretch it when they are lowered.
Such operations become calls with a rule of their own, which stretches their operands first.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from search_spaces.pipelines.numbered_program import shape_of
from search_spaces.replay import bind, context_of

_OF_EQUAL_SHAPES = ("threefry2x32",)
"""Primitives that JAX cannot lower if only some operands have the mapped dimension."""


def with_equal_shapes(program: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Returns a program whose operations of `_OF_EQUAL_SHAPES` `jax.vmap` can map."""
    if not _needs_equal_shapes(program.jaxpr):
        return program

    def run(*arrays: Any) -> list[Any]:
        jaxpr = program.jaxpr
        env: dict[core.Var, Any] = dict(zip(jaxpr.constvars, program.consts, strict=True))
        env.update(zip(jaxpr.invars, arrays, strict=True))
        for equation in jaxpr.eqns:
            operands = [env[v] if isinstance(v, core.Var) else v.val for v in equation.invars]
            with context_of(equation):
                if equation.primitive.name in _OF_EQUAL_SHAPES:
                    results = _side_by_side(equation, operands)
                else:
                    results = bind(equation, operands, **{n: _changed(v) for n, v in equation.params.items()})
            env.update(zip(equation.outvars, results, strict=True))
        return [env[v] if isinstance(v, core.Var) else v.val for v in jaxpr.outvars]

    return jax.make_jaxpr(run)(*map(shape_of, program.in_avals))


def _changed(parameter: Any) -> Any:
    """Returns a parameter of an equation, with `with_equal_shapes` of the programs in it."""
    if isinstance(parameter, core.ClosedJaxpr):
        return with_equal_shapes(parameter)
    if isinstance(parameter, core.Jaxpr):
        return with_equal_shapes(core.ClosedJaxpr(parameter, ())).jaxpr if _needs_equal_shapes(parameter) else parameter
    return type(parameter)(map(_changed, parameter)) if type(parameter) in (tuple, list) else parameter


def _needs_equal_shapes(jaxpr: core.Jaxpr) -> bool:
    return any(
        equation.primitive.name in _OF_EQUAL_SHAPES
        or any(map(_needs_equal_shapes, core.jaxprs_in_params(equation.params)))
        for equation in jaxpr.eqns
    )


def _side_by_side(equation: core.JaxprEqn, operands: list[Any]) -> Any:
    """Evaluates an equation; over all groups each operand has their dimension, also where it is the same in all."""
    call = jax.custom_batching.custom_vmap(lambda *arrays: tuple(bind(equation, arrays)))

    @call.def_vmap
    def of_all_groups(axis_size: int, in_batched: list[bool], *arrays: Any) -> tuple[Any, Any]:
        shape = equation.outvars[0].aval.shape  # type: ignore[attr-defined]
        each = []
        for array, is_batched in zip(arrays, in_batched, strict=True):
            own = array.shape[1:] if is_batched else array.shape
            array = array.reshape(axis_size if is_batched else 1, *[1] * (len(shape) - len(own)), *own)
            each.append(jnp.broadcast_to(array, (axis_size, *shape)))
        return tuple(bind(equation, each)), (True,) * len(equation.outvars)

    return call(*operands)

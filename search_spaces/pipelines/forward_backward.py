"""Which equations of a differentiated program are of its forward and which of its backward pass, and where they belong.

Reverse-mode differentiation runs through the forward equations backwards. So every backward equation belongs to a
forward one: to the latest that touches (reads or makes) what it reads, but none later than those of the cotangents that
it reads. A cut between two forward equations then cuts the backward pass at the same place.
"""

from collections.abc import Collection
from math import prod
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from search_spaces.sharding.graph import CONTRACTIONS

Pass = Literal["forward", "backward", "anywhere"]


class Place(NamedTuple):
    """Where an equation belongs.

    Attributes:
      direction: "forward", "backward", or "anywhere": cheap, and of no parameters, such as masks, which every stage
        makes for itself.
      position: the index of the forward equation to which it belongs; its own of a forward equation.
    """

    direction: Pass
    position: int


def places(jaxpr: core.Jaxpr, parameters: Collection[core.Var]) -> list[Place]:
    """Returns for each equation of a program where it belongs.

    Args:
      parameters: the inputs with respect to which it may have been differentiated: all floats but the batch.
    """
    of_parameters: set[core.Var] = set(parameters)
    of_backward: set[core.Var] = set()
    seeds: set[core.Var] = set()  # that backward equations make of numbers and masks alone, such as zeros
    directions: list[Pass] = []
    for equation in jaxpr.eqns:
        operands = [v for v in equation.invars if isinstance(v, core.Var)]
        is_backward = is_transposed(equation) or any(v in of_backward or v in seeds for v in operands)
        is_fixed = not any(v in of_backward or v in of_parameters for v in operands) and not _is_expensive(equation)
        if is_backward and is_fixed:
            directions.append("anywhere")
            seeds.update(equation.outvars)
        elif is_backward:
            directions.append("backward")
            of_backward.update(equation.outvars)
        elif any(v in of_parameters for v in operands) or _is_expensive(equation):
            directions.append("forward")
            of_parameters.update(equation.outvars)
        else:
            directions.append("anywhere")
    touched: dict[core.Var, list[int]] = {}  # the forward equations that touch a variable, in order
    for index, (equation, direction) in enumerate(zip(jaxpr.eqns, directions, strict=True)):
        if direction == "forward":
            for variable in (*equation.invars, *equation.outvars):
                if isinstance(variable, core.Var):
                    touched.setdefault(variable, []).append(index)
    last = max((i for i, direction in enumerate(directions) if direction == "forward"), default=0)
    position: dict[core.Var, int] = {}  # of the variables that backward equations make
    result = []
    for index, (equation, direction) in enumerate(zip(jaxpr.eqns, directions, strict=True)):
        if direction != "backward":
            result.append(Place(direction, index))
            continue
        operands = [v for v in equation.invars if isinstance(v, core.Var)]
        latest = min((position[v] for v in operands if v in position), default=last)
        at = latest
        for operand in operands:
            at = min(at, max((i for i in touched.get(operand, ()) if i <= latest), default=at))
        position.update(dict.fromkeys(equation.outvars, at))
        result.append(Place(direction, at))
    return result


def is_transposed(equation: core.JaxprEqn) -> bool:
    """Returns whether reverse-mode differentiation made an equation: JAX says so in its name stack."""
    return "transpose(" in str(equation.source_info.name_stack)


def num_bytes(aval: Any) -> int:
    """Returns the bytes of an array; those of a random key, which has a few, are counted as 8."""
    shape = getattr(aval, "shape", ())
    return prod(shape) * (8 if jnp.issubdtype(aval.dtype, jax.dtypes.extended) else jnp.dtype(aval.dtype).itemsize)


def _is_expensive(equation: core.JaxprEqn) -> bool:
    """Returns whether an equation has products inside, so that it is better computed once."""
    if equation.primitive.name in CONTRACTIONS:
        return True
    return any(any(_is_expensive(inner) for inner in jaxpr.eqns) for jaxpr in core.jaxprs_in_params(equation.params))

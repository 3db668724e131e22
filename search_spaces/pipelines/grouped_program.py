"""A forward or backward program that computes all groups of a micro-batch's examples side by side, by `jax.vmap`.

JAX gives an operand without the mapped dimension one of size 1, and some primitives do not stretch it when they are
lowered. Such operations become calls with a rule of their own, which stretches their operands first.

Equations of a traced program carry numbers that outlive further traces. A number is a name scope around an equation.
Whatever runs the equations again keeps their scopes, so that what a later program has in place of an equation is known
by its number. `without_numbers` takes them away in the end.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core, source_info_util
from jax.interpreters.partial_eval import dce_jaxpr

from search_spaces.pipelines.stage_labels import NUMBER
from search_spaces.pipelines.stage_programs import StageProgram
from search_spaces.replay import CALLS, abstract_argument, bind, context_of, user_source
from search_spaces.sharding.tracing import INLINED_BODIES

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

    return jax.make_jaxpr(run)(*map(abstract_argument, program.in_avals))


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


class GroupedProgram:
    """A forward or backward program that computes all groups of a micro-batch side by side.

    Args:
      program: of one of M·R parts.
      dims: of each array that it reads the dimension of the groups; None where it has none.
      num_groups: R.
      num_microbatches: M.
    """

    def __init__(self, program: StageProgram, dims: list[int | None], num_groups: int, num_microbatches: int):
        self.reads, self.program, self.dims = program.reads, with_equal_shapes(program.program), dims
        self.num_groups, self.num_microbatches = num_groups, num_microbatches

    def __call__(self, *arrays: Any) -> list[Any]:
        """Returns the program's results, with the groups along the first dimension."""
        number = dict(zip(self.reads, arrays, strict=True)).get(NUMBER)

        def of_group(group: Any, *own: Any) -> list[Any]:
            return self._run(group, number, own)

        of_groups = jnp.arange(self.num_groups, dtype=jnp.int32)
        return jax.vmap(of_group, in_axes=(0, *self.dims))(of_groups, *arrays)

    def _run(self, group: Any, number: Any, arrays: Any) -> list[Any]:
        """Runs the program for one group."""
        numbered = [key == NUMBER for key in self.reads]
        own = [group * self.num_microbatches + number if n else a for a, n in zip(arrays, numbered, strict=True)]
        return self._run_body(self.program.jaxpr, self.program.consts, own, numbered, group, number)

    def _run_body(
        self,
        jaxpr: core.Jaxpr,
        constants: Sequence[Any],
        arrays: Sequence[Any],
        numbered: Sequence[bool],
        group: Any,
        number: Any,
    ) -> list[Any]:
        """Runs a body; `numbered` tells which of its arguments are the number of the part."""
        env: dict[core.Var, Any] = dict(zip(jaxpr.constvars, constants, strict=True))
        env.update(zip(jaxpr.invars, arrays, strict=True))
        numbers = {v for v, is_number in zip(jaxpr.invars, numbered, strict=True) if is_number}
        for equation in jaxpr.eqns:
            operands = [env[v] if isinstance(v, core.Var) else v.val for v in equation.invars]
            of_numbers = [isinstance(v, core.Var) and v in numbers for v in equation.invars]
            if _is_number(equation, of_numbers):
                numbers.add(equation.outvars[0])
            dim = self._dim_of_parts(equation, of_numbers)
            body = equation.params.get(CALLS.get(equation.primitive.name, ""))
            with context_of(equation):
                if dim is not None:
                    results = [self._own_part(operands, dim, equation.params["slice_sizes"], group, number)]
                elif body is not None:
                    inner, constants = getattr(body, "jaxpr", body), getattr(body, "consts", ())
                    results = self._run_body(inner, constants, operands, of_numbers, group, number)
                else:
                    results = _bind(equation, operands)
            env.update(zip(equation.outvars, results, strict=True))
        return [env[v] if isinstance(v, core.Var) else v.val for v in jaxpr.outvars]

    def _dim_of_parts(self, equation: core.JaxprEqn, of_numbers: Sequence[bool]) -> int | None:
        """Returns the dimension from which an equation takes the part of its group; None for other equations."""
        if equation.primitive.name != "dynamic_slice":
            return None
        sizes, shape = equation.params["slice_sizes"], equation.invars[0].aval.shape  # type: ignore[attr-defined]
        at = [dim for dim, is_number in enumerate(of_numbers[1:]) if is_number]
        parts = self.num_groups * self.num_microbatches
        return at[0] if len(at) == 1 and sizes[at[0]] == 1 and shape[at[0]] == parts else None

    def _own_part(self, operands: list[Any], dim: int, sizes: tuple[int, ...], group: Any, number: Any) -> Any:
        """Returns the part of a group: all groups' parts are one slice, which needs no gather."""
        array, *starts = operands
        shape = array.shape[:dim], (self.num_groups, self.num_microbatches), array.shape[dim + 1 :]
        array = array.reshape([n for sizes in shape for n in sizes])
        starts = [*starts[:dim], 0, number, *starts[dim + 1 :]]
        starts = [jnp.asarray(start, jnp.int32) for start in starts]
        parts = lax.dynamic_slice(array, starts, (*sizes[:dim], self.num_groups, 1, *sizes[dim + 1 :]))
        return _of_group(jnp.moveaxis(parts, dim, 0), group)


@jax.custom_batching.custom_vmap
def _of_group(arrays: Any, group: Any) -> Any:
    """Returns the array of a group, of `[R, ...]`; over all groups these are the arrays as they are."""
    return lax.dynamic_index_in_dim(arrays, group, keepdims=False)


@_of_group.def_vmap
def _of_all_groups(axis_size: int, in_batched: list[bool], arrays: Any, groups: Any) -> tuple[Any, bool]:
    del axis_size
    if not in_batched[0]:
        return arrays, True
    return jax.vmap(lambda own, group: lax.dynamic_index_in_dim(own, group, keepdims=False))(arrays, groups), True


def _is_number(equation: core.JaxprEqn, of_numbers: Sequence[bool]) -> bool:
    """Returns whether an equation makes the number of the part again, as an index that counts from the front."""
    if equation.primitive.name == "select_n" and len(of_numbers) == 3:  # select_n(number < 0, number, number + size)
        return of_numbers[1]
    return equation.primitive.name in ("convert_element_type", "copy") and of_numbers[0]


def _bind(equation: core.JaxprEqn, operands: list[Any]) -> Any:
    try:
        return bind(equation, operands)
    except NotImplementedError as error:
        name = f"{equation.primitive.name} ({user_source(equation)})"
        raise ValueError(f"{name} cannot compute groups of examples side by side: {error}") from None


def with_own_dims(
    traced: core.ClosedJaxpr, num_groups: int, forced: list[bool]
) -> tuple[core.ClosedJaxpr, list[int | None]]:
    """Returns a program whose results have their groups where they come to lie, and these dimensions.

    Results that are the same in all groups have no such dimension, unless it is forced. So weights are not copied for
    each group, and what a scan over layers stacks is not transposed.
    """
    jaxpr = traced.jaxpr
    makers = {v: equation for equation in jaxpr.eqns for v in equation.outvars}
    results, dims = [], []
    for variable, is_forced in zip(jaxpr.outvars, forced, strict=True):
        maker = makers.get(variable) if isinstance(variable, core.Var) else None
        source, dim = variable, 0
        if maker is not None and maker.primitive.name == "transpose":
            permutation = maker.params["permutation"]
            rest = [d for d in range(len(permutation)) if d != permutation[0]]
            if list(permutation[1:]) == rest:
                source, dim = maker.invars[0], permutation[0]
        elif maker is not None and maker.primitive.name == "broadcast_in_dim" and not is_forced:
            operand = maker.invars[0].aval  # type: ignore[attr-defined]
            shape, kept = maker.params["shape"], maker.params["broadcast_dimensions"]
            if tuple(shape) == (num_groups, *operand.shape) and tuple(kept) == tuple(range(1, len(shape))):
                source, dim = maker.invars[0], None
        results.append(source)
        dims.append(dim)
    live, _ = dce_jaxpr(jaxpr.replace(outvars=results), [True] * len(results), instantiate=True)
    return core.ClosedJaxpr(live, traced.consts), dims


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

    return jax.make_jaxpr(lambda *arrays: run(program.jaxpr, program.consts, arrays))(
        *map(abstract_argument, program.in_avals)
    )


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

"""A training step in three parts: what runs before all micro-batches, in each of them, and after them.

Each part is a program of its own whose inputs and results are values of the traced step. So they can be cut further,
into stages, without knowing of batches.

A micro-batch has a forward and a backward pass. Reverse-mode differentiation runs through the forward equations
backwards. So every backward equation belongs to a forward one: to the latest that touches (reads or makes) what it
reads, but none later than those of the cotangents that it reads. A cut between two forward equations then cuts the
backward pass at the same place.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from cost.compute import CONTRACTIONS
from search_spaces.pipelines.batch_states import Split, State, Step, operands_of, values_of
from search_spaces.pipelines.microbatches import MicrobatchedFunction
from search_spaces.replay import with_inner
from search_spaces.sharding.graph import Value


@dataclass(frozen=True)
class Part:
    """A part of a step.

    Attributes:
      program: a function of the values that it reads; of `StepParts.each` the number of the micro-batch comes first.
      reads: the ids of these values.
      makes: the ids of the values that it returns.
    """

    program: core.ClosedJaxpr
    reads: tuple[int, ...]
    makes: tuple[int, ...]


@dataclass(frozen=True)
class StepParts:
    """A step in three parts.

    Attributes:
      before: runs once; reads arguments. Of a batch it makes `[M, B / M, ...]`, under the id of the batch.
      after: runs once; reads arguments, what `before` made, and what micro-batches made together. Its results are in
        `outputs`.
      inputs: the ids of the flat arguments.
      states: how the results of the micro-batches are put together, by id: a sum, a maximum or a minimum, examples
        along a dimension, or "whole", the same in all.
      outputs: the flat results: ids, or literals.
      replaced: for each flat result the position of the flat argument that it replaces in the next step, or None.
      constants: the arrays that the step closes over, by id.
      shapes: the shape and dtype of the flat arguments, by id.
      num_microbatches: M.
      num_groups: into how many neighbouring groups the batch is divided; M / R micro-batches after the other are those
        of a group.
    """

    before: Part
    each: Part
    after: Part
    inputs: tuple[int, ...]
    batch: tuple[int, ...]
    states: dict[int, State]
    outputs: tuple[int | core.Literal, ...]
    replaced: tuple[int | None, ...]
    constants: dict[int, Any]
    shapes: dict[int, jax.ShapeDtypeStruct]
    num_microbatches: int
    num_groups: int = 1

    @property
    def replaced_by(self) -> tuple[int | None, ...]:
        """For each flat argument the flat result that replaces it in the next step, or None."""
        found: list[int | None] = [None] * len(self.inputs)
        for result, argument in enumerate(self.replaced):
            if argument is not None:
                found[argument] = result
        return tuple(found)


def step_parts(function: MicrobatchedFunction, feedback: Sequence[int | None] | None = None) -> StepParts:
    """Traces a function that runs in micro-batches as three programs.

    Args:
      feedback: for each flat result the position of the flat argument that it replaces in the next step, or None; by
        default that of its graph.
    """
    graph, flow, order = function.graph, function.flow, function.order
    inputs = [vertex.results[0] for vertex in graph.inputs]
    constants = {vertex.results[0].id for vertex in graph.constants}
    batch = [value for value in inputs if isinstance(flow.states[value.id], Split)]
    batch_ids = {value.id for value in batch}
    of_each, of_after = _read_by(order.each), _read_by(order.after)
    results = {o.id: o for o in graph.outputs if isinstance(o, Value)}
    made_before = _made_by(order.before)
    kept = function.values_read_afterwards()
    begun = [v for i, v in made_before.items() if i in of_each or i in of_after or i in results]
    read_before = [v for v in inputs if v.id in _read_by(order.before) or v.id in batch_ids]
    made_in_each = _made_by(order.each)
    read_each = [v for i, v in of_each.items() if i not in made_in_each and i not in constants]
    made_after = _made_by(order.after)
    read_after = [v for i, v in of_after.items() if i not in made_after and i not in constants]

    def before(*arrays: Any) -> list[Any]:
        env = function.environment(dict(zip((v.id for v in read_before), arrays, strict=True)))
        function.run_before(env)
        divided = [function.divided(env[v.id]) for v in batch]
        return [env[v.id] for v in begun] + divided

    def each(number: Any, *arrays: Any) -> list[Any]:
        env = function.environment(dict(zip((v.id for v in read_each), arrays, strict=True)))
        for value in batch:
            if value.id in of_each:
                env[value.id] = lax.dynamic_index_in_dim(env[value.id], number, keepdims=False)
        function.run_each(env, number)
        return [env[v.id] for v in kept]

    def after(*arrays: Any) -> list[Any]:
        env = function.environment(dict(zip((v.id for v in read_after), arrays, strict=True)))
        function.run_after(env)
        return [env[i] for i in results if i in made_after]

    divided_shapes = {v.id: jax.eval_shape(function.divided, abstract(v)) for v in batch}
    shapes_each = [divided_shapes.get(v.id, abstract(v)) for v in read_each]
    return StepParts(
        Part(jax.make_jaxpr(before)(*map(abstract, read_before)), _ids(read_before), (*_ids(begun), *_ids(batch))),
        Part(jax.make_jaxpr(each)(jax.ShapeDtypeStruct((), jnp.int32), *shapes_each), _ids(read_each), _ids(kept)),
        Part(
            jax.make_jaxpr(after)(*map(abstract, read_after)),
            _ids(read_after),
            tuple(i for i in results if i in made_after),
        ),
        _ids(inputs),
        _ids(batch),
        {v.id: flow.states[v.id] for v in kept},
        tuple(o.id if isinstance(o, Value) else o for o in graph.outputs),
        tuple(graph.feedback if feedback is None else feedback),
        {v.results[0].id: array for v, array in zip(graph.constants, graph.constant_arrays, strict=True)},
        {value.id: abstract(value) for value in inputs},
        function.num_microbatches,
        function.num_groups,
    )


def parameters_of(parts: StepParts) -> list[core.Var]:
    """Returns the inputs of a micro-batch that it may be differentiated for: all floats of arguments but the batch."""
    of_arguments = set(parts.inputs) - set(parts.batch)
    jaxpr = parts.before.program.jaxpr
    found = {v for v, i in zip(jaxpr.invars, parts.before.reads, strict=True) if i in of_arguments and is_float(v)}
    for equation in jaxpr.eqns:
        if any(v in found for v in equation.invars if isinstance(v, core.Var)):
            found.update(equation.outvars)
    made = zip(jaxpr.outvars, parts.before.makes, strict=True)
    of_arguments.update(i for v, i in made if isinstance(v, core.Var) and v in found)
    inputs = zip(parts.each.program.jaxpr.invars[1:], parts.each.reads, strict=True)
    return [v for v, i in inputs if i in of_arguments and is_float(v)]


def is_float(variable: core.Var) -> bool:
    """Returns whether a variable of a jaxpr has a gradient by its type."""
    return jnp.issubdtype(variable.aval.dtype, jnp.inexact)  # type: ignore[attr-defined]


def _ids(values: Iterable[Value]) -> tuple[int, ...]:
    return tuple(value.id for value in values)


def abstract(value: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of a value or of an abstract one."""
    return jax.ShapeDtypeStruct(value.shape, value.dtype)


def _read_by(steps: Iterable[Step]) -> dict[int, Value]:
    """Returns the values that steps read, by id."""
    return {o.id: o for step in steps for o in operands_of(step) if isinstance(o, Value)}


def _made_by(steps: Iterable[Step]) -> dict[int, Value]:
    """Returns the values that steps make, by id."""
    return {value.id: value for step in steps for value in values_of(step)}


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
        is_fixed = not any(v in of_backward or v in of_parameters for v in operands) and not contracts(equation)
        if is_backward and is_fixed:
            directions.append("anywhere")
            seeds.update(equation.outvars)
        elif is_backward:
            directions.append("backward")
            of_backward.update(equation.outvars)
        elif any(v in of_parameters for v in operands) or contracts(equation):
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


def contracts(equation: core.JaxprEqn) -> bool:
    """Returns whether an equation contracts arrays, itself or inside, as a scan over layers does."""
    return any(inner.primitive.name in CONTRACTIONS for inner in with_inner([equation]))

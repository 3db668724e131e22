"""From a jaxpr to a graph: calls are inlined, loops, branches and rematerialised regions become regions.

A library may wrap a computation in a primitive of its own to give it a derivative or a batching rule, as Equinox and
Lineax do. Once a function is traced, such a primitive only calls its implementation. The graph has the operations of
this implementation instead, each of which has a rule, a price and a form on one device's part.

The same is done for a `while_loop` under `vmap` whose condition depends on the example. JAX traces it as a loop with a
condition for each example, which is no loop that JAX's own functions can make again.
"""

import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from search_spaces.replay import (
    CALLS,
    REMAT,
    abstract_argument,
    bind,
    context_of,
    scan_operands,
    user_source,
    while_operands,
)
from search_spaces.sharding.custom_calls.operations import CUSTOM_CALLS
from search_spaces.sharding.graph import Block, Graph, Kind, Operand, Region, Value, Vertex, values_of
from search_spaces.sharding.own_collectives import stated_seconds
from search_spaces.sharding.shardy import PLATFORMS, signature_of

INLINED_BODIES = {
    **CALLS,
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "call_jaxpr",
    "custom_vmap_call": "call",
}


class _Builder:
    def __init__(self) -> None:
        self.vertices: list[Vertex] = []
        self.values: list[Value] = []
        self.constants: list[Vertex] = []
        self.constant_arrays: list[Any] = []
        self.notes: list[str] = []
        self.implementation_of = Implementations()
        self.position = 0
        # The equations whose bodies are being added, the outermost first, and their name stacks.
        self.callers: tuple[core.JaxprEqn, ...] = ()
        self.scopes: list[str] = []

    def add_vertex(
        self,
        kind: Kind,
        equation: core.JaxprEqn | None,
        operands: Sequence[Operand],
        avals: Sequence[Any],
        weight: float,
        operand_weight: Sequence[float] | None = None,
        name: str = "",
    ) -> Vertex:
        weights = [weight] * len(operands) if operand_weight is None else list(operand_weight)
        own = "" if equation is None else str(equation.source_info.name_stack)
        vertex = Vertex(
            index=len(self.vertices),
            kind=kind,
            equation=equation,
            operands=list(operands),
            operand_weight=weights,
            results=[],
            weight=weight,
            position=self.position,
            name=name,
            scope="/".join(part for part in (*self.scopes, own) if part),
            callers=self.callers,
        )
        self.vertices.append(vertex)
        for i, aval in enumerate(avals):
            shape, dtype = getattr(aval, "shape", ()), getattr(aval, "dtype", None)
            is_on_host = getattr(aval, "memory_space", None) == jax.memory.Space.Host
            value = Value(len(self.values), shape, dtype, vertex.index, i, self.position, self.position, is_on_host)
            self.values.append(value)
            vertex.results.append(value)
        self.touch(operands)
        return vertex

    def touch(self, operands: Sequence[Operand]) -> None:
        for value in values_of(operands):
            value.last_read_at = max(value.last_read_at, self.position)

    def add_constant(self, aval: Any, array: Any) -> Value:
        vertex = self.add_vertex("constant", None, [], [aval], 1.0, name=f"constant {len(self.constants)}")
        vertex.results[0].made_at = -1
        self.constants.append(vertex)
        self.constant_arrays.append(array)
        return vertex.results[0]

    def add_body(self, equation: core.JaxprEqn, jaxpr: Any, inputs: Sequence[Operand], weight: float) -> Block:
        """Adds the jaxpr of an equation, whose name stack goes before those of the equations inside."""
        self.scopes.append(str(equation.source_info.name_stack))
        self.callers = (*self.callers, equation)
        block = self.add_jaxpr(jaxpr, inputs, weight)
        self.scopes.pop()
        self.callers = self.callers[:-1]
        return block

    def add_jaxpr(self, jaxpr: Any, inputs: Sequence[Operand], weight: float) -> Block:
        """Adds the equations of a closed or open jaxpr, with the given values bound to its invars."""
        consts, jaxpr = getattr(jaxpr, "consts", ()), getattr(jaxpr, "jaxpr", jaxpr)
        env: dict[Any, Operand] = {
            v: self.add_constant(v.aval, array) for v, array in zip(jaxpr.constvars, consts, strict=True)
        }
        env.update(zip(jaxpr.invars, inputs, strict=True))
        steps: list[Vertex | Region] = []
        for equation in jaxpr.eqns:
            operands = [v if isinstance(v, core.Literal) else env[v] for v in equation.invars]
            results = self.add_equation(equation, operands, weight, steps)
            env.update(zip(equation.outvars, results, strict=True))
        outputs = [v if isinstance(v, core.Literal) else env[v] for v in jaxpr.outvars]
        return Block(values_of(inputs), steps, outputs)

    def add_equation(
        self, equation: core.JaxprEqn, operands: list[Operand], weight: float, steps: list[Vertex | Region]
    ) -> Sequence[Operand]:
        name = equation.primitive.name
        inlined = self.inlined(equation)
        if inlined is not None:
            inputs = _solve_operands(equation, operands) if name == "custom_linear_solve" else operands
            block = self.add_body(equation, inlined, inputs, weight)
            for loop in (step for step in block.steps if name == "while" and isinstance(step, Region)):
                loop.ends_by_example = True
            steps.extend(block.steps)
            return block.outputs
        regions: dict[str, Callable[..., Region]] = {
            "scan": self.add_scan,
            "while": self.add_while,
            "cond": self.add_cond,
        }
        if name in REMAT:
            block = self.add_body(equation, equation.params["jaxpr"], operands, weight)
            steps.append(Region(equation, operands, [block], values_of(block.outputs)))
            return block.outputs
        if name in regions:
            region = regions[name](equation, operands, weight)
            self.position += 1
            self.touch(operands)
            for carry in region.carries:
                self.touch(carry.results)
            steps.append(region)
            return region.results
        if name == "shard_map":
            seconds = stated_seconds(equation)
            if seconds is not None:
                text = f"a shard_map says itself that it takes {1e6 * seconds:.3g} µs, with what it sends."
                self.add_note(equation, text)
        vertex = self.add_vertex("operation", equation, operands, [v.aval for v in equation.outvars], weight)
        self.position += 1
        steps.append(vertex)
        return vertex.results

    def inlined(self, equation: core.JaxprEqn) -> Any:
        """Returns the jaxpr that stands in the graph in place of an equation; None where the equation stays."""
        name, params = equation.primitive.name, equation.params
        if name == "custom_linear_solve":
            return params["jaxprs"].solve
        if INLINED_BODIES.get(name) not in params:
            return self.implementation_of(equation)
        if any(getattr(sharding, "spec", None) is not None for sharding in params.get("in_shardings", ())):
            self.add_note(
                equation, "the shardings of this jit are not kept; give them as `in_shardings` of the search."
            )
        return params[INLINED_BODIES[name]]

    def add_note(self, equation: core.JaxprEqn, text: str) -> None:
        """Notes something that a reader of the plan should know about an equation."""
        where = user_source(equation, self.callers)
        if f"{where}: {text}" not in self.notes:
            self.notes.append(f"{where}: {text}")

    def add_carry(self, equation: core.JaxprEqn, init: Operand, aval: Any, weight: float) -> Vertex:
        """Adds a loop's carry: its first result is what the body reads, its second what comes out of the loop."""
        return self.add_vertex("carry", equation, [init], [aval, aval], weight)

    def close_carries(self, carries: Sequence[Vertex], outputs: Sequence[Operand], weight: float) -> None:
        for vertex, output in zip(carries, outputs, strict=True):
            vertex.operands.append(output)
            vertex.operand_weight.append(weight)
        self.touch(outputs)

    def add_scan(self, equation: core.JaxprEqn, operands: list[Operand], weight: float) -> Region:
        params = equation.params
        trips = weight * params["length"]
        consts, init, xs = scan_operands(equation, operands)
        _, inner_carries, inner_slices = scan_operands(equation, params["jaxpr"].jaxpr.invars)
        num_carry = len(init)
        carries = [self.add_carry(equation, x, v.aval, weight) for x, v in zip(init, inner_carries, strict=True)]
        slices = [
            self.add_vertex("slice", equation, [x], [v.aval], trips) for x, v in zip(xs, inner_slices, strict=True)
        ]
        body_inputs = [*consts, *(c.results[0] for c in carries), *(s.results[0] for s in slices)]
        block = self.add_body(equation, params["jaxpr"], body_inputs, trips)
        self.close_carries(carries, block.outputs[:num_carry], trips)
        start = min((v.position for v in (*carries, *slices)), default=self.position)
        results = [c.results[1] for c in carries]
        for out, var in zip(block.outputs[num_carry:], equation.outvars[num_carry:], strict=True):
            stack = self.add_vertex("stack", equation, [out], [var.aval], trips)
            stack.results[0].made_at = start
            results.append(stack.results[0])
        return Region(equation, operands, [block], results, carries, slices)

    def add_while(self, equation: core.JaxprEqn, operands: list[Operand], weight: float) -> Region:
        params = equation.params
        of_condition, of_body, init = while_operands(equation, operands)
        carries = [self.add_carry(equation, x, v.aval, weight) for x, v in zip(init, equation.outvars, strict=True)]
        carried_values = [c.results[0] for c in carries]
        condition = self.add_body(equation, params["cond_jaxpr"], [*of_condition, *carried_values], weight)
        body = self.add_body(equation, params["body_jaxpr"], [*of_body, *carried_values], weight)
        self.close_carries(carries, body.outputs, weight)
        self.add_note(equation, "the length of this while loop is not known; it is priced as one trip.")
        return Region(equation, operands, [condition, body], [c.results[1] for c in carries], carries)

    def add_cond(self, equation: core.JaxprEqn, operands: list[Operand], weight: float) -> Region:
        branches = equation.params["branches"]
        self.add_note(equation, "each branch is priced as if it ran equally often.")
        share = weight / len(branches)
        blocks = [self.add_body(equation, branch, operands[1:], share) for branch in branches]
        results = []
        for i, var in enumerate(equation.outvars):
            outs = [block.outputs[i] for block in blocks]
            results += self.add_vertex("join", equation, outs, [var.aval], weight, [share] * len(outs)).results
        return Region(equation, operands, blocks, results)


def _solve_operands(equation: core.JaxprEqn, operands: list[Operand]) -> list[Operand]:
    """Returns the operands of the solver of a `custom_linear_solve`: its own constants and the right-hand sides.

    The products by which it is differentiated have been traced by now where they are used.
    """
    lengths = equation.params["const_lengths"]
    first = lengths.matvec + lengths.vecmat
    return [*operands[first : first + lengths.solve], *operands[sum(lengths) :]]


def feedback_of(
    outputs: Any, arguments: Sequence[Any], flatten: Callable[[Any], tuple[Sequence[Any], Any]] = jax.tree.flatten
) -> list[int | None]:
    """Returns which argument each flat result replaces in the next call: an equal pytree of equal shapes, used once.

    Args:
      outputs: the function's result as a pytree of things with a shape and a dtype.
      flatten: returns the things of a pytree, and what two pytrees must have in common beside them.
    """

    def key(tree: Any) -> Any:
        leaves, structure = flatten(tree)
        return structure, tuple((tuple(x.shape), x.dtype) for x in leaves)

    starts, flat = [], 0
    for argument in arguments:
        starts.append(flat)
        flat += len(flatten(argument)[0])
    free = {i: key(a) for i, a in enumerate(arguments) if flatten(a)[0]}

    def match(tree: Any) -> list[int | None]:
        wanted_key = key(tree)
        size = len(wanted_key[1])
        for i, argument in free.items():
            if size and argument == wanted_key:
                del free[i]
                return list(range(starts[i], starts[i] + size))
        if type(tree) in (tuple, list):
            return [index for part in tree for index in match(part)]
        return [None] * size

    return match(outputs)


def build_graph(jaxpr: core.ClosedJaxpr, feedback: Sequence[int | None], names: Sequence[str]) -> Graph:
    """Makes the graph of a traced function.

    Args:
      feedback: for each flat result the flat argument that it replaces (see `feedback_of`), or None.
    """
    builder = _Builder()
    inputs = []
    for var, name in zip(jaxpr.jaxpr.invars, names, strict=True):
        vertex = builder.add_vertex("input", None, [], [var.aval], 1.0, name=name)
        vertex.results[0].made_at = -1
        inputs.append(vertex)
    block = builder.add_jaxpr(jaxpr, [v.results[0] for v in inputs], 1.0)
    for output in values_of(block.outputs):
        output.last_read_at = builder.position
    return Graph(
        builder.vertices,
        builder.values,
        inputs,
        builder.constants,
        builder.constant_arrays,
        block,
        block.outputs,
        list(feedback),
        builder.position,
        builder.notes,
    )


_KERNEL = re.compile(r"stablehlo\.custom_call @([\w.$]+)")


class Implementations:
    """The implementations of the primitives in one traced function; equal equations are looked at once."""

    def __init__(self) -> None:
        self._of_signature: dict[Hashable, core.ClosedJaxpr | None] = {}

    def __call__(self, equation: core.JaxprEqn) -> core.ClosedJaxpr | None:
        """Traces what a primitive of another library computes.

        Returns:
          The implementation as a function of the equation's operands. None for primitives of JAX (other than a loop
          with a condition for each example), for custom calls, and for primitives whose implementation is not
          written in JAX or is not what runs: some are lowered to kernels, and their implementation only says what
          these compute.
        """
        if equation.primitive.name == "while" and equation.params["cond_jaxpr"].out_avals[0].shape:
            with context_of(equation):
                return _with_one_condition(equation)
        if equation.primitive.name in CUSTOM_CALLS or _is_of_jax(equation.primitive):
            return None
        key = equation.primitive, signature_of(equation)
        if key not in self._of_signature:
            with context_of(equation):
                self._of_signature[key] = _traced(equation)
        return self._of_signature[key]


def _is_of_jax(primitive: core.Primitive) -> bool:
    """Returns whether a primitive is implemented in JAX's own modules, or nowhere."""
    implementation = getattr(primitive.impl, "func", primitive.impl)
    return (getattr(implementation, "__module__", None) or "jax").split(".")[0] in ("jax", "jaxlib")


def _traced(equation: core.JaxprEqn) -> core.ClosedJaxpr | None:
    primitive, arguments = equation.primitive, [abstract_argument(v.aval) for v in equation.invars]

    def implementation(*operands: Any) -> Sequence[Any]:
        results = primitive.impl(*operands, **primitive.get_bind_params(equation.params))
        return results if primitive.multiple_results else [results]

    try:
        jaxpr = jax.make_jaxpr(implementation)(*arguments)
    except Exception:  # whatever an implementation raises that cannot be traced
        return None
    kernels = [_kernels(lambda *operands: bind(equation, operands), arguments, platform) for platform in PLATFORMS]
    is_what_runs = kernels == [_kernels(core.jaxpr_as_fun(jaxpr), arguments, platform) for platform in PLATFORMS]
    return jaxpr if is_what_runs and any(names is not None for names in kernels) else None


def _with_one_condition(equation: core.JaxprEqn) -> core.ClosedJaxpr:
    """Returns a loop that goes on while an example does; the carries of examples that do not stay as they are."""
    condition, body = (core.jaxpr_as_fun(equation.params[name]) for name in ("cond_jaxpr", "body_jaxpr"))

    def loop(*operands: Any) -> Any:
        of_condition, of_body, init = while_operands(equation, operands)

        def step(carries: list[Any]) -> list[Any]:
            (goes_on,) = condition(*of_condition, *carries)
            results = body(*of_body, *carries)
            return [
                jnp.where(lax.expand_dims(goes_on, range(goes_on.ndim, new.ndim)), new, old)
                for new, old in zip(results, carries, strict=True)
            ]

        return lax.while_loop(lambda carries: jnp.any(condition(*of_condition, *carries)[0]), step, list(init))

    return jax.make_jaxpr(loop)(*(abstract_argument(v.aval) for v in equation.invars))


def _kernels(function: Callable[..., Any], arguments: Sequence[Any], platform: str) -> set[str] | None:
    """Returns the targets of the custom calls of a function, or None if it cannot be lowered for a platform."""
    try:
        lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,))
    except Exception:  # whatever the lowering of a foreign primitive raises
        return None
    return set(_KERNEL.findall(lowered.as_text()))

"""Runs a traced function with other operations in place of its collectives.

A *place* is a collective equation's operand, or a user's `alternatives`, by its path: the number of the equation in
each jaxpr on the way down (and of the branch, for a `cond`).
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core, source_info_util

from search_spaces.communication.collectives import CollectiveOp
from search_spaces.sharding.graph import REMAT
from search_spaces.sharding.tracing import scan_parts

Path = tuple[int, ...]
CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"}
_INNER = {**CALLS, **dict.fromkeys(REMAT, "jaxpr"), "scan": "jaxpr", "while": "body_jaxpr"}
_OWN_WAY_BACK = {"custom_vjp_call"}
_ALTERNATIVES = re.compile(r"alternatives\[(.*):(.*)\]$")


@dataclass(frozen=True)
class Place:
    """Where a function's strategy can be chosen.

    Attributes:
      path: of the equation, and the number of the operand.
      stack: the name scopes around it.
      trips: how often it runs: the product of the lengths of the scans around it.
      collective: what runs there; None for alternatives.
      labels: of alternatives, in the order of their functions.
      shape, dtype: of the operand on one device; of alternatives, of the first result.
      branch: where it lies in a branch of alternatives, their path and the number of the branch.
    """

    path: Path
    stack: str
    trips: int
    collective: CollectiveOp | None
    labels: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: Any
    branch: tuple[Path, int] | None = None


def alternatives(name: str, functions: Mapping[str, Callable[..., Any]], *operands: Any) -> Any:
    """A place where the search chooses between functions; the first one runs where nothing was searched.

    All functions must take the operands and return arrays of the same shapes and types, for example an expert layer
    with different capacity factors, or attention over different windows.

    Args:
      name: of the place.
      functions: by label.
      operands: of each function.

    Raises:
      ValueError: no mapping of at least two functions by labels, or a label or name with ":", "|" or "/".
    """
    if not isinstance(functions, Mapping) or len(functions) < 2 or not all(map(callable, functions.values())):
        raise ValueError(f"`functions` of {name!r} must be a dict of at least two functions by label, got {functions}.")
    for text in (name, *functions):
        if not isinstance(text, str) or not text or re.search("[:|/]", text):
            raise ValueError(f"`name` and the labels must not be empty nor hold ':', '|' or '/'; got {text!r}.")
    # A branch on a number that the compiler may not look into: every transformation of JAX knows what to do with it.
    first = lax.optimization_barrier(jnp.int32(0))
    with jax.named_scope(f"alternatives[{name}:{'|'.join(functions)}]"):
        try:
            return lax.switch(first, list(functions.values()), *operands)
        except TypeError as error:
            error.add_note(f"In the alternatives {name!r} of {', '.join(functions)}: all must return the same types.")
            raise


def find_places(jaxpr: core.Jaxpr, mesh_axes: Mapping[str, int]) -> tuple[list[Place], list[str]]:
    """All places of a function, and notes on collectives that are none."""
    notes: list[str] = []
    return list(_walk(jaxpr, mesh_axes, (), "", 1, None, notes)), list(dict.fromkeys(notes))


def _walk(
    jaxpr: core.Jaxpr,
    mesh_axes: Mapping[str, int],
    path: Path,
    stack: str,
    trips: int,
    branch: tuple[Path, int] | None,
    notes: list[str],
) -> Iterator[Place]:
    for i, equation in enumerate(jaxpr.eqns):
        name, here = equation.primitive.name, (*path, i)
        scope = "/".join(part for part in (stack, str(equation.source_info.name_stack)) if part)
        if name == "cond":
            found = _ALTERNATIVES.search(scope)
            if found:
                out: Any = equation.outvars[0].aval
                yield Place(here, scope[: found.start()] + found[1], trips, None, tuple(found[2].split("|")),
                            out.shape, out.dtype, branch)  # fmt: skip
            for b, body in enumerate(equation.params["branches"]):
                scope_in = scope[: found.start()] + found[1] if found else scope
                inside = (here, b) if found else branch
                yield from _walk(body.jaxpr, mesh_axes, (*here, b), scope_in, trips, inside, notes)
        elif name in _INNER:
            if name == "while" and _holds(equation, _COLLECTIVES):
                notes.append(f"{scope or 'the function'}: a while loop's collectives are priced as one trip.")
            inner = equation.params[_INNER[name]]
            times = trips * (equation.params["length"] if name == "scan" else 1)
            yield from _walk(getattr(inner, "jaxpr", inner), mesh_axes, here, scope, times, branch, notes)
        else:
            if equation.params.get("axis_index_groups") is not None:
                raise ValueError(
                    f"`loss_fn` has a {name} with `axis_index_groups` in {scope or 'the function'}, which no emulation "
                    f"of the mesh can run; give the mesh an axis for these groups."
                )
            collectives = collectives_of(equation, mesh_axes)
            for k, (var, collective) in enumerate(zip(equation.invars, collectives, strict=False)):
                aval: Any = var.aval
                shape, dtype = aval.shape, aval.dtype
                yield Place((*here, k), scope, trips, collective, (), shape, dtype, branch)
            if not collectives and _holds(equation, _COLLECTIVES):
                notes.append(f"{scope or 'the function'}: {name} stays exact and its bytes are not counted.")


_COLLECTIVES = {
    "psum",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "ppermute",
    "pmax",
    "pmin",
    "pgather",
    "pbroadcast",
}


def _holds(equation: core.JaxprEqn, primitives: set[str]) -> bool:
    if equation.primitive.name in primitives:
        return True
    inner = [x for value in equation.params.values() for x in (value if isinstance(value, tuple) else (value,))]
    jaxprs = [getattr(x, "jaxpr", x) for x in inner if isinstance(x, (core.Jaxpr, core.ClosedJaxpr))]
    return any(_holds(e, primitives) for jaxpr in jaxprs for e in jaxpr.eqns)


def collectives_of(equation: core.JaxprEqn, mesh_axes: Mapping[str, int]) -> list[CollectiveOp]:
    """The collective that an equation is, once for each operand; none if it is not one that a strategy can run."""
    params, name = equation.params, equation.primitive.name
    axes = params.get("axes", params.get("axis_name", ()))
    axes = axes if isinstance(axes, tuple) else (axes,)
    if any(axis not in mesh_axes for axis in axes):
        return []
    if prod(mesh_axes[axis] for axis in axes) == 1:
        return []
    axes = tuple(axis for axis in axes if mesh_axes[axis] > 1)
    sizes = tuple(mesh_axes[axis] for axis in axes)
    match name:
        case "psum":
            return [CollectiveOp("all_reduce", axes, sizes)] * len(equation.invars)
        case "all_gather":
            return [CollectiveOp("all_gather", axes, sizes, (params["all_gather_dimension"],), params["tiled"])]
        case "reduce_scatter":
            return [CollectiveOp("reduce_scatter", axes, sizes, (params["scatter_dimension"],), params["tiled"])]
        case "all_to_all":
            dimensions = (params["split_axis"], params["concat_axis"])
            return [CollectiveOp("all_to_all", axes, sizes, dimensions, params["tiled"])]
        case "ppermute" if len(axes) == 1 and params["perm"]:
            return [CollectiveOp("collective_permute", axes, sizes, permutation=tuple(params["perm"]))]
    return []


@dataclass(frozen=True)
class Interpreter:
    """Evaluates a jaxpr with `at_collective` and `at_alternatives` in the places' stead.

    Attributes:
      places: the number of each place by its path.
      at_collective: called with the place's number, its operand and a random key; returns the result.
      at_alternatives: called with the place's number, the branches as functions of the flat operands, and those.
      at_own_way_back: called with an equation that is a `jax.custom_vjp` and its operands, or None to leave them alone.
    """

    places: Mapping[Path, int]
    at_collective: Callable[[int, jax.Array, jax.Array], jax.Array]
    at_alternatives: Callable[[int, Sequence[Callable[..., list[Any]]], Sequence[Any]], Sequence[Any]]
    at_own_way_back: Callable[[core.JaxprEqn, Sequence[Any]], Sequence[Any]] | None = None

    def run(self, jaxpr: Any, arguments: Sequence[Any], key: jax.Array, path: Path = ()) -> list[Any]:
        """The jaxpr's results; places in a loop get another key in each trip."""
        consts: Sequence[Any] = ()
        if isinstance(jaxpr, core.ClosedJaxpr):
            jaxpr, consts = jaxpr.jaxpr, jaxpr.consts
        env: dict[core.Var, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, arguments, strict=True))

        def read(var: Any) -> Any:
            return var.val if isinstance(var, core.Literal) else env[var]

        for i, equation in enumerate(jaxpr.eqns):
            operands = [read(var) for var in equation.invars]
            info = equation.source_info
            stack = source_info_util.current_name_stack() + info.name_stack
            with source_info_util.user_context(info.traceback, name_stack=stack), equation.ctx.manager:
                results = self._equation(equation, operands, key, (*path, i))
            env.update(zip(equation.outvars, results, strict=True))
        return [read(var) for var in jaxpr.outvars]

    @cached_property
    def _above(self) -> frozenset[Path]:
        """Paths of equations that are or hold places."""
        return frozenset(place[:n] for place in self.places for n in range(1, len(place) + 1))

    def _equation(self, equation: core.JaxprEqn, operands: list[Any], key: jax.Array, path: Path) -> Sequence[Any]:
        name = equation.primitive.name
        if self.at_own_way_back is not None and name in _OWN_WAY_BACK:
            return self.at_own_way_back(equation, operands)
        if path not in self._above and not (self.at_own_way_back and _holds(equation, _OWN_WAY_BACK)):
            return bind(equation, operands)
        if name in CALLS:
            return self.run(equation.params[CALLS[name]], operands, key, path)
        if name in REMAT:
            params = equation.params
            body = jax.checkpoint(
                lambda key, *xs: self.run(params["jaxpr"], xs, key, path),
                prevent_cse=params["prevent_cse"],
                policy=params["policy"],
            )
            return body(key, *operands)
        loops = {"scan": self._scan, "while": self._while, "cond": self._cond}
        if name in loops:
            return loops[name](equation, operands, key, path)
        if (*path, 0) in self.places:
            return [self.at_collective(self.places[(*path, k)], x, key) for k, x in enumerate(operands)]
        return bind(equation, operands)

    def _scan(self, equation: core.JaxprEqn, operands: list[Any], key: jax.Array, path: Path) -> Sequence[Any]:
        params = equation.params
        num_consts, num_carry = scan_parts(equation)
        consts, init = operands[:num_consts], operands[num_consts : num_consts + num_carry]

        def body(carry: list[Any], trip_and_xs: tuple[jax.Array, list[Any]]) -> tuple[list[Any], list[Any]]:
            trip, xs = trip_and_xs
            results = self.run(params["jaxpr"], [*consts, *carry, *xs], jax.random.fold_in(key, trip), path)
            return results[:num_carry], results[num_carry:]

        xs = (jnp.arange(params["length"]), operands[num_consts + num_carry :])
        carry, ys = lax.scan(
            body, init, xs, length=params["length"], reverse=params["reverse"], unroll=params["unroll"]
        )
        return [*carry, *ys]

    def _while(self, equation: core.JaxprEqn, operands: list[Any], key: jax.Array, path: Path) -> Sequence[Any]:
        params = equation.params
        n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
        for_condition, for_body = operands[:n_cond], operands[n_cond : n_cond + n_body]

        def proceed(carry: tuple[jax.Array, list[Any]]) -> Any:
            return core.jaxpr_as_fun(params["cond_jaxpr"])(*for_condition, *carry[1])[0]

        def body(carry: tuple[jax.Array, list[Any]]) -> tuple[jax.Array, list[Any]]:
            trip, values = carry
            return trip + 1, self.run(params["body_jaxpr"], [*for_body, *values], jax.random.fold_in(key, trip), path)

        return lax.while_loop(proceed, body, (jnp.int32(0), operands[n_cond + n_body :]))[1]

    def _cond(self, equation: core.JaxprEqn, operands: list[Any], key: jax.Array, path: Path) -> Sequence[Any]:
        index, *xs = operands

        def branch(b: int) -> Callable[..., list[Any]]:
            return lambda key, *xs: self.run(equation.params["branches"][b], xs, key, (*path, b))

        branches = [branch(b) for b in range(len(equation.params["branches"]))]
        if path in self.places:
            return self.at_alternatives(self.places[path], branches, (key, *xs))
        return lax.switch(index, branches, key, *xs)


def bind(equation: core.JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
    """An equation's results for other operands."""
    found = equation.primitive.bind(*operands, **equation.primitive.get_bind_params(equation.params))
    return found if equation.primitive.multiple_results else [found]

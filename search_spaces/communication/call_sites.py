"""Finds the call sites of a traced loss, and runs the loss with other functions there.

The loss stays as its author wrote it: it is traced once to a jaxpr, and evaluated equation by equation. Only equations
that are call sites, or that hold some, are evaluated differently; all others are bound as they are.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from search_spaces.communication.base import CallSite, CollectiveOp, Path
from search_spaces.replay import CALLS, REMAT, bind, evaluated, scan_again, scan_operands, user_source, while_operands

_INNER = {**CALLS, **dict.fromkeys(REMAT, "jaxpr"), "scan": "jaxpr", "while": "body_jaxpr"}
_CUSTOM_VJP = {"custom_vjp_call"}
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
_ALTERNATIVES = re.compile(r"alternatives\[(.*):(.*)\]$")


def alternatives(name: str, functions: Mapping[str, Callable[..., Any]], *operands: Any) -> Any:
    """Runs one of several functions, which the search chooses; the first one runs where nothing was searched.

    All functions must take the operands and return arrays of the same shapes and types. Examples are an expert layer
    with different capacity factors, and attention over different windows.

    Args:
      name: of the call site.
      functions: by label; the first one is the exact one.
      operands: of every function.

    Raises:
      ValueError: `functions` is not a mapping of at least two functions, or a label or the name has ":", "|" or "/".
    """
    if not isinstance(functions, Mapping) or len(functions) < 2 or not all(map(callable, functions.values())):
        raise ValueError(f"`functions` of {name!r} must be a dict of at least two functions by label, got {functions}.")
    for text in (name, *functions):
        if not isinstance(text, str) or not text or re.search("[:|/]", text):
            raise ValueError(f"`name` and the labels must not be empty, nor contain ':', '|' or '/'; got {text!r}.")
    # A branch on a number that the compiler cannot simplify away, and that every transformation of JAX accepts.
    first = lax.optimization_barrier(jnp.int32(0))
    with jax.named_scope(f"alternatives[{name}:{'|'.join(functions)}]"):
        try:
            return lax.switch(first, list(functions.values()), *operands)
        except TypeError as error:
            error.add_note(f"In the alternatives {name!r} of {', '.join(functions)}: all must return the same types.")
            raise


def find_call_sites(jaxpr: core.Jaxpr, mesh_axes: Mapping[str, int]) -> tuple[list[CallSite], list[str]]:
    """Returns all call sites of a function, and notes on the collectives that cannot be call sites."""
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
) -> Iterator[CallSite]:
    for i, equation in enumerate(jaxpr.eqns):
        name, here = equation.primitive.name, (*path, i)
        scope = "/".join(part for part in (stack, str(equation.source_info.name_stack)) if part)
        if name == "cond":
            match = _ALTERNATIVES.search(scope)
            if match:
                out: Any = equation.outvars[0].aval
                yield CallSite(here, scope[: match.start()] + match[1], trips, None, tuple(match[2].split("|")),
                            out.shape, out.dtype, branch)  # fmt: skip
            for b, body in enumerate(equation.params["branches"]):
                scope_in = scope[: match.start()] + match[1] if match else scope
                inside = (here, b) if match else branch
                yield from _walk(body.jaxpr, mesh_axes, (*here, b), scope_in, trips, inside, notes)
        elif name in _INNER:
            if name == "while" and _holds(equation, _COLLECTIVES):
                notes.append(f"{_where(equation, scope)}: a while loop's collectives are priced as one trip.")
            inner = equation.params[_INNER[name]]
            times = trips * (equation.params["length"] if name == "scan" else 1)
            yield from _walk(getattr(inner, "jaxpr", inner), mesh_axes, here, scope, times, branch, notes)
        else:
            if equation.params.get("axis_index_groups") is not None:
                raise ValueError(
                    f"`loss_fn` has a {name} with `axis_index_groups` in {scope or 'the function'}, which a simulated "
                    f"mesh cannot run; give the mesh an axis for these groups."
                )
            collectives = collectives_of(equation, mesh_axes)
            for k, (var, collective) in enumerate(zip(equation.invars, collectives, strict=False)):
                aval: Any = var.aval
                shape, dtype = aval.shape, aval.dtype
                yield CallSite((*here, k), scope, trips, collective, (), shape, dtype, branch)
            if not collectives and _holds(equation, _COLLECTIVES):
                notes.append(f"{_where(equation, scope)}: {name} stays exact and its bytes are not counted.")


def _where(equation: core.JaxprEqn, scope: str) -> str:
    """Returns the line of the user's code, and the name scopes around it."""
    return f"{user_source(equation)}, {scope}" if scope else user_source(equation)


def _holds(equation: core.JaxprEqn, primitives: set[str]) -> bool:
    if equation.primitive.name in primitives:
        return True
    inner = [x for value in equation.params.values() for x in (value if isinstance(value, tuple) else (value,))]
    jaxprs = [getattr(x, "jaxpr", x) for x in inner if isinstance(x, (core.Jaxpr, core.ClosedJaxpr))]
    return any(_holds(e, primitives) for jaxpr in jaxprs for e in jaxpr.eqns)


def collectives_of(equation: core.JaxprEqn, mesh_axes: Mapping[str, int]) -> list[CollectiveOp]:
    """Returns the collective of an equation once for each operand; nothing if no strategy can run it."""
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
    """Evaluates a jaxpr with other functions at its call sites.

    Attributes:
      call_sites: the number of each call site by its path.
      at_collective: called with the call site's number, its operand and a random key; returns the result.
      at_alternatives: called with the call site's number, the branches as functions of the flat operands, and the
        operands.
      at_custom_vjp: called with an equation that is a `jax.custom_vjp` and its operands; None to bind it as it is.
    """

    call_sites: Mapping[Path, int]
    at_collective: Callable[[int, jax.Array, jax.Array], jax.Array]
    at_alternatives: Callable[[int, Sequence[Callable[..., list[Any]]], Sequence[Any]], Sequence[Any]]
    at_custom_vjp: Callable[[core.JaxprEqn, Sequence[Any]], Sequence[Any]] | None = None

    def run(self, jaxpr: Any, arguments: Sequence[Any], key: jax.Array, path: Path = ()) -> list[Any]:
        """Returns the jaxpr's results; a call site in a loop gets another key in each trip."""
        consts: Sequence[Any] = ()
        if isinstance(jaxpr, core.ClosedJaxpr):
            jaxpr, consts = jaxpr.jaxpr, jaxpr.consts
        numbers = count()

        def run(equation: core.JaxprEqn, operands: list[Any]) -> Sequence[Any]:
            return self._equation(equation, operands, key, (*path, next(numbers)))

        return evaluated(jaxpr, consts, arguments, run)

    @cached_property
    def _paths_to_call_sites(self) -> frozenset[Path]:
        """The paths of all equations that are call sites or hold some."""
        return frozenset(call_site[:n] for call_site in self.call_sites for n in range(1, len(call_site) + 1))

    def _equation(self, equation: core.JaxprEqn, operands: list[Any], key: jax.Array, path: Path) -> Sequence[Any]:
        name = equation.primitive.name
        if self.at_custom_vjp is not None and name in _CUSTOM_VJP:
            return self.at_custom_vjp(equation, operands)
        has_custom_vjp = self.at_custom_vjp is not None and _holds(equation, _CUSTOM_VJP)
        if path not in self._paths_to_call_sites and not has_custom_vjp:
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
        if (*path, 0) in self.call_sites:
            return [self.at_collective(self.call_sites[(*path, k)], x, key) for k, x in enumerate(operands)]
        return bind(equation, operands)

    def _scan(self, equation: core.JaxprEqn, operands: list[Any], key: jax.Array, path: Path) -> Sequence[Any]:
        params = equation.params
        consts, init, xs = scan_operands(equation, operands)

        def body(carry: list[Any], trip_and_xs: tuple[jax.Array, list[Any]]) -> tuple[list[Any], list[Any]]:
            trip, xs = trip_and_xs
            results = self.run(params["jaxpr"], [*consts, *carry, *xs], jax.random.fold_in(key, trip), path)
            return results[: len(init)], results[len(init) :]

        carry, ys = scan_again(equation, body, init, (jnp.arange(params["length"]), xs))
        return [*carry, *ys]

    def _while(self, equation: core.JaxprEqn, operands: list[Any], key: jax.Array, path: Path) -> Sequence[Any]:
        params = equation.params
        for_condition, for_body, init = while_operands(equation, operands)

        def proceed(carry: tuple[jax.Array, list[Any]]) -> Any:
            return core.jaxpr_as_fun(params["cond_jaxpr"])(*for_condition, *carry[1])[0]

        def body(carry: tuple[jax.Array, list[Any]]) -> tuple[jax.Array, list[Any]]:
            trip, values = carry
            return trip + 1, self.run(params["body_jaxpr"], [*for_body, *values], jax.random.fold_in(key, trip), path)

        return lax.while_loop(proceed, body, (jnp.int32(0), init))[1]

    def _cond(self, equation: core.JaxprEqn, operands: list[Any], key: jax.Array, path: Path) -> Sequence[Any]:
        index, *xs = operands

        def branch(b: int) -> Callable[..., list[Any]]:
            return lambda key, *xs: self.run(equation.params["branches"][b], xs, key, (*path, b))

        branches = [branch(b) for b in range(len(equation.params["branches"]))]
        if path in self.call_sites:
            return self.at_alternatives(self.call_sites[path], branches, (key, *xs))
        return lax.switch(index, branches, key, *xs)

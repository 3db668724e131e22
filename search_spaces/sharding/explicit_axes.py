"""From a function of explicit mesh axes to one of automatic axes, in which only what the user wrote is fixed.

With explicit axes (`jax.sharding.AxisType.Explicit`) the type of every array says how it is split, and JAX derives the
types of results from those of operands. A search chooses these anew. What remains are the places where the user said
something: `jax.sharding.reshard`, and `out_sharding=` of products, reductions, gathers and the like, become sharding
constraints. Where an operation makes or reshapes an array (`jnp.zeros`, `jnp.reshape`), JAX writes down what it derived
in the same place as what the user said, so that these are free.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from cost.compute import inner_jaxprs
from search_spaces.replay import REMAT, bind, source_of
from search_spaces.sharding.tracing import INLINED_BODIES


def with_constraints(jaxpr: core.ClosedJaxpr, mesh: Mesh | AbstractMesh) -> core.ClosedJaxpr:
    """Returns a jaxpr without shardings in its types, and with constraints where the user says how an array is split.

    Raises:
      ValueError: there is a `jax.shard_map` inside, whose types cannot be taken away.
    """
    return _Evaluation(mesh, is_explicit=True).closed(jaxpr)


def without_context_mesh(jaxpr: core.ClosedJaxpr, mesh: Mesh | AbstractMesh) -> core.ClosedJaxpr:
    """Returns a jaxpr that was traced under a context mesh of automatic axes as if there had been none.

    JAX writes such a mesh into the parameters of operations and adds reshards that split nothing; inside a program for
    each device it means something else.
    """
    return _Evaluation(mesh, is_explicit=False).closed(jaxpr)


def has_reshards(jaxpr: Any) -> bool:
    """Tells whether a jaxpr, or one inside it, has a `jax.sharding.reshard` of an array that could be split."""
    reshards = (equation for equation in _equations(jaxpr) if equation.primitive.name == "reshard")
    return any(_rank(equation.outvars[0]) for equation in reshards)


def _rank(variable: Any) -> int:
    return len(variable.aval.shape)


def has_constraints(jaxpr: Any) -> bool:
    """Tells whether a jaxpr, or one inside it, says how an array is split, such as on a context mesh."""
    return any(e.primitive.name in ("sharding_constraint", "shard_map") for e in _equations(jaxpr))


def _equations(jaxpr: Any) -> Iterator[core.JaxprEqn]:
    for equation in jaxpr.eqns:
        yield equation
        for inner in inner_jaxprs(equation):
            yield from _equations(getattr(inner, "jaxpr", inner))


@dataclass(frozen=True)
class _Evaluation:
    """Evaluates jaxprs again, on a mesh of automatic axes; `is_explicit` where they were traced with explicit ones."""

    mesh: Mesh | AbstractMesh
    is_explicit: bool

    def closed(self, jaxpr: core.ClosedJaxpr) -> core.ClosedJaxpr:
        def run(*operands: Any) -> list[Any]:
            return self.results_of(jaxpr.jaxpr, jaxpr.consts, operands)

        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            return jax.make_jaxpr(run)(*map(_without_sharding, jaxpr.in_avals))

    def results_of(self, jaxpr: Any, constants: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *operands), strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, core.Literal) else values[atom]

        for equation in jaxpr.eqns:
            with source_of(equation):
                results = self._results(equation, [read(atom) for atom in equation.invars])
            values.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _results(self, equation: core.JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
        name, params = equation.primitive.name, equation.params
        if name == "shard_map" and self.is_explicit:
            raise ValueError(
                "A `jax.shard_map` inside a function of explicit mesh axes cannot be planned. Give the search a mesh "
                "of automatic axes, or leave out `reshard` and `out_sharding`."
            )
        if name == "reshard":
            return [self._constrained(operands[0], params["dst_sharding"])]
        if name in INLINED_BODIES:
            body = params[INLINED_BODIES[name]]
            return self.results_of(getattr(body, "jaxpr", body), getattr(body, "consts", ()), operands)
        changed = {key: self._changed(value) for key, value in params.items() if _is_changed(name, key, value)}
        results = bind(equation, operands, **changed)
        if self.is_explicit and params.get("out_sharding") is not None:
            results = [self._constrained(result, params["out_sharding"]) for result in results]
        return results

    def _constrained(self, array: Any, sharding: Any) -> Any:
        spec = getattr(sharding, "spec", sharding)
        if not jax.numpy.ndim(array) or not (self.is_explicit or any(spec)):  # JAX adds such reshards itself
            return array
        return jax.lax.with_sharding_constraint(array, NamedSharding(self.mesh, spec))

    def _changed(self, value: Any) -> Any:
        if isinstance(value, core.ClosedJaxpr):
            return self.closed(value)
        if isinstance(value, core.Jaxpr):
            return self.closed(core.ClosedJaxpr(value, ())).jaxpr
        return tuple(map(self.closed, value)) if isinstance(value, tuple) else None


def _is_changed(name: str, key: str, value: Any) -> bool:
    if name in ("scan", "while", "cond", *REMAT):
        is_branches = isinstance(value, tuple) and bool(value) and isinstance(value[0], core.ClosedJaxpr)
        return is_branches or isinstance(value, core.ClosedJaxpr | core.Jaxpr)
    return name != "sharding_constraint" and key in ("sharding", "out_sharding") and value is not None


def _without_sharding(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))

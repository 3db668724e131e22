"""From a function of explicit mesh axes to one of automatic axes, in which only what the user wrote is fixed.

With explicit axes (`jax.sharding.AxisType.Explicit`) the type of every array says how it is split, and JAX derives the
types of results from those of operands. A search chooses these anew. What remains are the places where the user said
something: `jax.sharding.reshard`, and `out_sharding=` of products, reductions, gathers and the like, become sharding
constraints. Where an operation makes or reshapes an array (`jnp.zeros`, `jnp.reshape`), JAX writes down what it derived
in the same place as what the user said, so that these are free.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.extend import core
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from search_spaces.replay import bind, source_of
from search_spaces.sharding.tracing import INLINED_BODIES


def with_constraints(jaxpr: core.ClosedJaxpr, mesh: Mesh | AbstractMesh) -> core.ClosedJaxpr:
    """Returns a jaxpr without shardings in its types, and with constraints where it says how an array is split.

    Args:
      jaxpr: traced under a mesh with explicit axes.
      mesh: the same mesh with automatic axes.

    Raises:
      ValueError: there is a `jax.shard_map` inside, whose types cannot be taken away.
    """

    def evaluate(*operands: Any) -> list[Any]:
        return _evaluate(jaxpr.jaxpr, jaxpr.consts, operands, mesh)

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.make_jaxpr(evaluate)(*map(_without_sharding, jaxpr.in_avals))


def has_reshards(jaxpr: Any) -> bool:
    """Tells whether a jaxpr, or one inside it, says by `jax.sharding.reshard` how an array is split."""
    return any(
        equation.primitive.name == "reshard" or any(has_reshards(inner) for inner in _inner_jaxprs(equation))
        for equation in jaxpr.eqns
    )


def _inner_jaxprs(equation: core.JaxprEqn) -> Iterator[Any]:
    for value in equation.params.values():
        for entry in value if isinstance(value, tuple | list) else (value,):
            if isinstance(entry, core.ClosedJaxpr | core.Jaxpr):
                yield getattr(entry, "jaxpr", entry)


def _evaluate(jaxpr: Any, constants: Sequence[Any], operands: Sequence[Any], mesh: Mesh | AbstractMesh) -> list[Any]:
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *operands), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    for equation in jaxpr.eqns:
        with source_of(equation):
            results = _results(equation, [read(atom) for atom in equation.invars], mesh)
        values.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _results(equation: core.JaxprEqn, operands: Sequence[Any], mesh: Mesh | AbstractMesh) -> Sequence[Any]:
    name, params = equation.primitive.name, equation.params
    if name == "shard_map":
        raise ValueError(
            "A `jax.shard_map` inside a function of explicit mesh axes cannot be planned. Give the search a mesh of "
            "automatic axes, or leave out `reshard` and `out_sharding`."
        )
    if name == "reshard":
        return [_constrained(operands[0], params["dst_sharding"], mesh)]
    if name in INLINED_BODIES:
        body = params[INLINED_BODIES[name]]
        constants = getattr(body, "consts", ())
        return _evaluate(getattr(body, "jaxpr", body), constants, operands, mesh)
    changed = {key: _without_types(value, mesh) for key, value in params.items() if _has_types(key, value)}
    results = bind(equation, operands, **changed)
    if params.get("out_sharding") is not None:
        results = [_constrained(result, params["out_sharding"], mesh) for result in results]
    return results


def _constrained(array: Any, sharding: Any, mesh: Mesh | AbstractMesh) -> Any:
    if not jax.numpy.ndim(array):  # JAX adds such reshards itself, and there is nothing to split
        return array
    return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, getattr(sharding, "spec", sharding)))


def _has_types(key: str, value: Any) -> bool:
    is_jaxpr = isinstance(value, core.ClosedJaxpr | core.Jaxpr)
    is_branches = isinstance(value, tuple) and bool(value) and isinstance(value[0], core.ClosedJaxpr)
    return is_jaxpr or is_branches or (key in ("sharding", "out_sharding") and value is not None)


def _without_types(value: Any, mesh: Mesh | AbstractMesh) -> Any:
    if isinstance(value, core.ClosedJaxpr):
        return with_constraints(value, mesh)
    if isinstance(value, core.Jaxpr):
        return with_constraints(core.ClosedJaxpr(value, ()), mesh).jaxpr
    return tuple(with_constraints(branch, mesh) for branch in value) if isinstance(value, tuple) else None


def _without_sharding(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))

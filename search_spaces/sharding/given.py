"""What the user or the function itself fixes: specs of arguments, sharding constraints, `shard_map`s."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.core import Tracer
from jax.extend import core
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from search_spaces.partition_specs import IndexedSpec, broadcast_specs, checked_axes_of, split_shape
from search_spaces.replay import REMAT, abstract_argument, bind, evaluated, source_of, with_inner
from search_spaces.sharding.base import GivenSpec, ShardingStrategy
from search_spaces.sharding.graph import Graph, Operand, Vertex, rank_of
from search_spaces.sharding.rules import shapes_of
from search_spaces.sharding.tracing import INLINED_BODIES


def dimensions_of(
    spec: PartitionSpec, rank: int, axis_names: Sequence[str], axis_sizes: Sequence[int], name: str
) -> list[tuple[int, ...] | None]:
    """Returns a `PartitionSpec` as axis indices for each dimension; None where it leaves a dimension unconstrained.

    Axes of one device split nothing and are left out.

    Raises:
      ValueError: as `checked_axes_of`; `name` is the array's, for the message.
    """
    sizes = dict(zip(axis_names, axis_sizes, strict=True))
    return [
        None if axes is None else tuple(axis_names.index(axis) for axis in axes if sizes[axis] > 1)
        for axes in checked_axes_of(spec, rank, axis_names, name)
    ]


def fits(spec: IndexedSpec, given: GivenSpec) -> bool:
    """Returns whether a spec agrees with the given one in every dimension that is not free."""
    return all(given_axes is None or tuple(given_axes) == axes for axes, given_axes in zip(spec, given, strict=True))


def is_constrained(vertex: Vertex) -> bool:
    """Returns whether the function itself says how an operation is sharded: a sharding constraint or a `shard_map`."""
    return vertex.primitive in ("shard_map", "sharding_constraint")


def constraint_of(vertex: Vertex, axis_names: Sequence[str], sizes: Sequence[int]) -> GivenSpec | None:
    """Returns the spec that a sharding constraint asks for; None for every other vertex."""
    if vertex.primitive != "sharding_constraint":
        return None
    spec = getattr(vertex.params["sharding"], "spec", None)
    if spec is None:
        return None
    return dimensions_of(spec, len(vertex.results[0].shape), axis_names, sizes, "a sharding constraint's array")


def shard_map_strategy(vertex: Vertex, axis_names: Sequence[str], sizes: tuple[int, ...]) -> ShardingStrategy | None:
    """Returns the only strategy of a `shard_map`, which has its own specs; None for every other vertex."""
    if vertex.primitive != "shard_map":
        return None
    params = vertex.params
    of_map = tuple(getattr(params.get("mesh"), "axis_names", axis_names))
    if not set(of_map) <= set(axis_names):
        raise ValueError(
            f"A shard_map in the function ({vertex.user_source}), such as a lookup of tables or a layer of experts, "
            f"is for a mesh with the axes {of_map}, not {tuple(axis_names)}. Search on its mesh: give `mesh`, not "
            "`devices`."
        )

    def specs(given: Sequence[Any], arrays: Sequence[Operand]) -> tuple[IndexedSpec, ...]:
        dimensions = [
            dimensions_of(s, rank_of(x), axis_names, sizes, "a `shard_map`'s array")
            for s, x in zip(given, arrays, strict=True)
        ]
        return tuple(tuple(axes or () for axes in dims) for dims in dimensions)

    results = specs(params["out_specs"], vertex.results)
    names = params.get("newly_manual_axes", params.get("manual_axes", axis_names))
    parts = math.prod(n for name, n in zip(axis_names, sizes, strict=True) if name in names)
    return ShardingStrategy(specs(params["in_specs"], vertex.operands), results, parts, ((),) * len(results), results)


def axes_with_meaning(
    graph: Graph, given: Mapping[int, GivenSpec], axis_names: Sequence[str], sizes: tuple[int, ...]
) -> frozenset[int]:
    """Returns the mesh axes that given specs, constraints or `shard_map`s name: these cannot be swapped with others."""
    fixed_axes = {axis for dims in given.values() for axes in dims for axis in axes or ()}
    for vertex in graph.operations():
        fixed_axes.update(axis for axes in constraint_of(vertex, axis_names, sizes) or () for axis in axes or ())
        strategy = shard_map_strategy(vertex, axis_names, sizes)
        specs = () if strategy is None else (*strategy.operands, *strategy.results)
        fixed_axes.update(axis for spec in specs for axes in spec for axis in axes)
    return frozenset(fixed_axes)


def check_prefix(in_shardings: Any, mesh: Mesh | AbstractMesh) -> None:
    """Holds `in_shardings` against the mesh, as far as that goes without the arguments.

    Raises:
      TypeError: an entry is not a sharding.
      ValueError: a spec names an axis that the mesh does not have.
    """
    for name, leaf in _entries(in_shardings, "a PartitionSpec, a NamedSharding or None"):
        spec = _spec(leaf)
        checked_axes_of(spec, len(spec), tuple(mesh.axis_names), name)
        _check_mesh(name, leaf, mesh)


def check_open_prefix(in_shardings: Any, axis_names: Sequence[str], why: str) -> None:
    """Holds `in_shardings` against the names of axes where the mesh is not chosen yet; `why` ends errors.

    Raises:
      TypeError, ValueError: as `check_prefix`, or an entry is on a mesh.
    """
    for name, leaf in _entries(in_shardings, "a PartitionSpec or None"):
        if isinstance(leaf, NamedSharding):
            raise ValueError(f"{name} is on the mesh {dict(leaf.mesh.shape)}, but {why}")
        try:
            checked_axes_of(leaf, len(leaf), axis_names, name)
        except ValueError as error:
            raise ValueError(f"{error} {why[0].upper()}{why[1:]}") from None


def _entries(in_shardings: Any, kinds: str) -> Iterator[tuple[str, PartitionSpec | NamedSharding]]:
    """Yields the entries that are given, with their names for errors."""
    for path, leaf in jax.tree.leaves_with_path(in_shardings, is_leaf=_is_spec):
        name = f"`in_shardings{jax.tree_util.keystr(path)}`"
        if not _is_spec(leaf):
            raise TypeError(f"{name} must be {kinds}, not {leaf!r}.")
        if leaf is not None:
            yield name, leaf


def given_specs(in_shardings: Any, args: Sequence[Any]) -> list[PartitionSpec | NamedSharding | None]:
    """Returns the given spec of each leaf of the positional arguments; None where there is none.

    Args:
      in_shardings: as in `search`: an entry for each argument, without the static ones.
      args: the arguments without the static ones.

    Raises:
      ValueError: the entries are not those of the arguments; names the first place that differs.
    """
    if in_shardings is None:
        return [None] * len(jax.tree.leaves(args))
    tuples = isinstance(in_shardings, tuple | list) and not _is_spec(in_shardings)
    prefix = tuple(in_shardings) if tuples else (in_shardings,)
    if len(prefix) != len(args):
        raise ValueError(
            f"`in_shardings` must be a tuple with an entry for each of the {len(args)} positional arguments, not "
            f"{len(prefix)}; None leaves an argument free."
        )
    try:
        return broadcast_specs(prefix, tuple(args), _is_spec)
    except (ValueError, TypeError):
        path, own, argument = next(_differences(prefix, tuple(args)))
        raise ValueError(
            f"`in_shardings{path}` is {own}, where the arguments have {argument}. Give an entry for each part, or one "
            "PartitionSpec or None for all of them."
        ) from None


def _differences(prefix: Any, tree: Any, path: str = "") -> Iterator[tuple[str, str, str]]:
    """Yields the places where specs are not a prefix of a tree, with what either has there in words."""
    if _is_spec(prefix):
        return
    (own, own_node), (parts, node) = (
        jax.tree.flatten_with_path(x, is_leaf=lambda part, x=x: part is not x) for x in (prefix, tree)
    )
    if own_node == node:
        for (key, entry), (_, part) in zip(own, parts, strict=True):
            yield from _differences(entry, part, path + jax.tree_util.keystr(key))
    else:
        yield path, _in_words(prefix, own), _in_words(tree, parts)


def _in_words(value: Any, parts: Sequence[tuple[Any, Any]]) -> str:
    """Describes a part of a tree by the paths of its own parts: `a dict with ['bias'], ['kernel']`."""
    names = [jax.tree_util.keystr(path) for path, _ in parts]
    if value is None or names == [""]:
        return "None" if value is None else "one array"
    kind = type(value).__name__
    return f"a{'n' * (kind[0] in 'AEIOUaeiou')} {kind} with {', '.join(names) or 'nothing'}"


def given_dimensions(
    specs: Sequence[PartitionSpec | NamedSharding | None],
    arrays: Sequence[jax.ShapeDtypeStruct],
    paths: Sequence[str],
    mesh: Mesh | AbstractMesh,
) -> dict[int, GivenSpec]:
    """Returns the spec that each flat argument must keep, by its number; a dimension that is None is free.

    Args:
      specs: for each array the spec that is given, or None.

    Raises:
      ValueError: a spec does not fit its array.
    """
    kept_specs = {}
    axis_names = tuple(map(str, mesh.axis_names))
    for i, (sharding, array) in enumerate(zip(specs, arrays, strict=True)):
        if sharding is not None:
            spec, shape, name = _spec(sharding), array.shape, f"{paths[i]}, whose sharding is given,"
            split_shape(shape, checked_axes_of(spec, len(shape), axis_names, name), mesh.shape, name)
            kept_specs[i] = dimensions_of(spec, len(shape), axis_names, tuple(mesh.shape.values()), name)
    return kept_specs


def carried_spec(leaf: Any, mesh: Mesh | AbstractMesh) -> PartitionSpec | None:
    """Returns the spec of an array that is already sharded over the mesh, or None."""
    if isinstance(leaf, Tracer):  # has a sharding only where the mesh's axes are explicit
        return None
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, NamedSharding) and getattr(leaf, "committed", True):
        return sharding.spec if _is_same(sharding.mesh, mesh) else None
    return None


def _is_same(one: Mesh | AbstractMesh, other: Mesh | AbstractMesh) -> bool:
    """Returns whether two meshes have the same axes and, where both have devices, the same ones."""
    if list(one.shape.items()) != list(other.shape.items()):
        return False
    return not (isinstance(one, Mesh) and isinstance(other, Mesh)) or one.devices.tolist() == other.devices.tolist()


def _check_mesh(name: str, sharding: PartitionSpec | NamedSharding, mesh: Mesh | AbstractMesh) -> None:
    if isinstance(sharding, NamedSharding) and not _is_same(sharding.mesh, mesh):
        raise ValueError(
            f"{name} is on the mesh {sharding.mesh}, not on `mesh`, {mesh}. Give its PartitionSpec instead."
        )


def _is_spec(x: Any) -> bool:
    return x is None or isinstance(x, PartitionSpec | NamedSharding)


def as_sharding(spec: PartitionSpec | NamedSharding, mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Returns a given spec or sharding as a sharding on a mesh."""
    return NamedSharding(mesh, _spec(spec))


def _spec(sharding: PartitionSpec | NamedSharding) -> PartitionSpec:
    return sharding.spec if isinstance(sharding, NamedSharding) else sharding


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
    """Returns whether a jaxpr, or one inside it, has a `jax.sharding.reshard` of an array that could be split."""
    reshards = (equation for equation in with_inner(jaxpr.eqns) if equation.primitive.name == "reshard")
    return any(shape for equation in reshards for shape in shapes_of(equation.outvars))


def has_constraints(jaxpr: Any) -> bool:
    """Returns whether a jaxpr, or one inside it, says how an array is split, such as on a context mesh."""
    return any(e.primitive.name in ("sharding_constraint", "shard_map") for e in with_inner(jaxpr.eqns))


@dataclass(frozen=True)
class _Evaluation:
    """Evaluates jaxprs again, on a mesh of automatic axes; `is_explicit` where they were traced with explicit ones."""

    mesh: Mesh | AbstractMesh
    is_explicit: bool

    def closed(self, jaxpr: core.ClosedJaxpr) -> core.ClosedJaxpr:
        def run(*operands: Any) -> list[Any]:
            return evaluated(jaxpr.jaxpr, jaxpr.consts, operands, self._results, INLINED_BODIES, source_of)

        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            return jax.make_jaxpr(run)(*map(abstract_argument, jaxpr.in_avals))

    def _results(self, equation: core.JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
        name, params = equation.primitive.name, equation.params
        if name == "shard_map" and self.is_explicit:
            raise ValueError(
                "A `jax.shard_map` inside a function of explicit mesh axes cannot be planned. Give the search a mesh "
                "of automatic axes, or leave out `reshard` and `out_sharding`."
            )
        if name == "reshard":
            return [self._constrained(operands[0], params["dst_sharding"])]
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

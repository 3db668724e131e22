"""A function traced for some arguments, and the space of everything that can be chosen about it."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from cost.base import Hardware
from diffshard.plans.base import LogicalAxisRules
from diffshard.sharding_search.options import Options, with_automatic_axes
from search_spaces.sharding.given import carried_spec, given_dimensions
from search_spaces.sharding.graph import Graph
from search_spaces.sharding.space import ShardingSpace
from search_spaces.sharding.tracing import build_graph, feedback_of
from search_spaces.sharding.whole_operations import impossible_operations


@dataclass(frozen=True)
class TracedFunction:
    """A function traced for arguments of some shapes.

    Attributes:
      jaxpr: the function as JAX traces it.
      graph: the graph of the function.
      args: the arguments without the static ones, as `jax.ShapeDtypeStruct`s.
      static: the values of the static arguments.
      donated: for each flat argument, whether its memory may be used for results.
      carried: for each flat argument the spec that it already has, or None.
      paths: a name for each flat argument.
      out_paths: a name for each flat result.
      out_tree: structure of the result.
    """

    jaxpr: core.ClosedJaxpr
    graph: Graph
    args: tuple[Any, ...]
    static: list[Any]
    donated: tuple[bool, ...]
    carried: list[PartitionSpec | None]
    paths: list[str]
    out_paths: list[str]
    out_tree: Any


def trace_function(options: Options, args: Sequence[Any]) -> TracedFunction:
    """Traces the function for arguments that are arrays or `jax.ShapeDtypeStruct`; errors of JAX are passed on.

    Raises:
      ValueError: a donated or static position is beyond the last argument.
    """
    for name, numbers in (("donate_argnums", options.donate_argnums), ("static_argnums", options.static_argnums)):
        if any(n >= len(args) for n in numbers):
            raise ValueError(f"`{name}` {numbers} names a position that the {len(args)} arguments do not have.")
    abstract = abstract_arguments(options, args)
    # In a context mesh of explicit axes JAX would ask for a sharding in the types of every operation.
    with jax.sharding.use_abstract_mesh(with_automatic_axes(jax.sharding.get_abstract_mesh())):
        fn = _under_rules(options.fn, options.logical_axis_rules, options.mesh)
        trace = jax.jit(fn, static_argnums=options.static_argnums or None).trace(*abstract)
    dynamic = options.dynamic(abstract)
    names = _argument_names(options.fn, len(args))
    paths = _argument_paths(dynamic, options.dynamic(names))
    donated = [[i in options.donate_argnums] * len(jax.tree.leaves(a)) for i, a in enumerate(abstract)]
    return TracedFunction(
        jaxpr=trace.jaxpr,
        graph=build_graph(trace.jaxpr, feedback_of(trace.out_info, dynamic), paths),
        args=dynamic,
        static=options.static(args),
        donated=tuple(d for flags in options.dynamic(donated) for d in flags),
        carried=[carried_spec(leaf, options.mesh) for leaf in jax.tree.leaves(options.dynamic(args))],
        paths=paths,
        out_paths=["result" + jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(trace.out_info)],
        out_tree=jax.tree.structure(trace.out_info),
    )


def abstract_arguments(options: Options, args: Sequence[Any]) -> list[Any]:
    """Returns the arguments with shapes and dtypes in place of arrays; static ones as they are."""
    return [a if i in options.static_argnums else jax.tree.map(abstract_array, a) for i, a in enumerate(args)]


def abstract_array(leaf: Any) -> jax.ShapeDtypeStruct:
    """Returns shape, dtype and weak type of an array, a `jax.ShapeDtypeStruct` or a Python number."""
    aval = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def space_of(options: Options, traced_function: TracedFunction) -> ShardingSpace:
    """Returns the space of everything that can be chosen about a traced function, as its executor can run it.

    Raises:
      ValueError: a given sharding does not fit its argument.
    """
    is_default = options.executor is None and runs_as_program(options.hardware, traced_function.graph)
    return ShardingSpace(
        traced_function.graph,
        options.axis_names,
        options.axis_sizes,
        options.hardware,
        given_dimensions(
            options.in_shardings, traced_function.args, traced_function.carried, traced_function.paths, options.mesh
        ),
        traced_function.donated,
        options.memory_limit_bytes,
        as_program=is_default or options.executor == "program",
    )


def runs_as_program(hardware: Hardware, graph: Graph) -> bool:
    """Tells whether a function runs as a program for each device if the user names no executor.

    A program decides what runs beside what, so it is the default where collectives run beside arithmetic, unless there
    is an operation that cannot be part of one.
    """
    return hardware.exposed_share < 1 and not impossible_operations(graph)


def _under_rules(fn: Callable[..., Any], rules: LogicalAxisRules, mesh: Mesh | AbstractMesh) -> Callable[..., Any]:
    """Returns a function whose flax modules read logical axis names by the rules, on the mesh."""
    if not rules:
        return fn
    from flax import linen as nn  # imported here, because few users need it and it takes a second

    def ruled(*args: Any) -> Any:  # a new function each time: `jax.jit` caches by function, and does not know the rules
        by_rules = nn.logical_axis_rules([(name, axes or None) for name, axes in rules])
        with by_rules, jax.sharding.use_abstract_mesh(mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh):
            return fn(*args)

    return ruled


def path_inside(path: Sequence[Any]) -> str:
    """Writes where a leaf is inside its argument; `path` begins with the argument's position."""
    return jax.tree_util.keystr(tuple(path[1:]))


def _argument_paths(args: Sequence[Any], names: Sequence[str]) -> list[str]:
    """Names each leaf of the arguments: the parameter's name, then the place inside."""
    leaves = jax.tree_util.tree_leaves_with_path(tuple(args))
    return [f"{names[path[0].idx]}{path_inside(path)}" for path, _ in leaves]


def _argument_names(fn: Callable[..., Any], count: int) -> list[str]:
    try:
        parameters = inspect.signature(fn).parameters.values()
        names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    except (TypeError, ValueError):  # built-in functions have no signature
        names = []
    return names[:count] + [f"argument_{i}" for i in range(len(names), count)]

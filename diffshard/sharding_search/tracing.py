"""A function traced for a call, and the space of everything that can be chosen about it.

What is traced is a function of flat arrays, but a user knows another one. JAX says which function it was tracing and on
which of its arguments a value depends; it takes both from a function's signature and from what it wraps.

A traced function gets copies of its arguments. So changes in place, of modules of flax's nnx or of dictionaries, are
lost, and reported.
"""

import inspect
import keyword
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.extend import core
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from diffshard.base import InfeasibleError
from diffshard.plans.base import LogicalAxisRules
from diffshard.sharding_search.call import (
    Call,
    Structure,
    abstract_split,
    array_paths,
    call_of,
    check_rows,
    is_random_key,
    plain,
    split,
)
from diffshard.sharding_search.mesh_candidates import LevelNames
from diffshard.sharding_search.module_scopes import module_scopes
from diffshard.sharding_search.options import Options, has_explicit_axes, with_automatic_axes
from search_spaces.rematerialisation.program import RematerialisedFunction
from search_spaces.replay import without_dead_code
from search_spaces.sharding.custom_calls.cudnn import planned_without_cudnn
from search_spaces.sharding.given import (
    as_sharding,
    given_dimensions,
    has_constraints,
    has_reshards,
    with_constraints,
    without_context_mesh,
)
from search_spaces.sharding.graph import Graph, check_sizes
from search_spaces.sharding.host_state import early_updates
from search_spaces.sharding.replicated_operations import impossible_operations
from search_spaces.sharding.space import ShardingSpace
from search_spaces.sharding.tracing import build_graph, feedback_of

ReportLostChanges = Callable[[str], None]
"""What is done with the sentence that says which changes are lost: a warning, or an error."""


def lost_changes(
    function_name: str,
    structure: Structure,
    names: Sequence[str],
    before: Sequence[Any],
    arguments: Any,
    results: Sequence[Any],
) -> str:
    """Returns a sentence that names arguments into which a function has put other arrays that it does not return.

    It is "" where there are none.

    Args:
      names: for each array of the arguments the name of its argument.
      before: the arrays that were in the arguments when the function was called.
      arguments: what the function was called with, afterwards.
    """
    after = structure.arrays_of(arguments)
    returned = {id(array) for array in results}
    lost = dict.fromkeys(
        f"`{name}`"
        for name, old, new in zip(names, before, before if after is None else after, strict=True)
        if new is not old and id(new) not in returned
    )
    changed = f"{function_name} changes {' and '.join(lost)} in place"
    return f"{changed}, and these changes are lost, as under `jax.jit`." if lost else ""


def warn_of_lost_changes(sentence: str) -> None:
    """Warns of changes that are lost, and says what to do."""
    warnings.warn(
        f"{sentence} Return the new state, or use `diffshard.nnx.search` for modules of flax's nnx.", stacklevel=2
    )


_LEAST_NOTED_BYTES = 2**20
"""An argument below this size is no training state worth a note."""


@dataclass(frozen=True)
class TracedFunction:
    """A function traced for the arguments of a call."""

    jaxpr: core.ClosedJaxpr
    graph: Graph
    call: Call
    result: Structure
    out_paths: tuple[str, ...]

    @property
    def is_state(self) -> list[bool]:
        """Returns for each flat argument whether it is state; all others are batch.

        State is what the function updates or may write over. Where there is neither, it is the first argument.
        """
        updated = {argument for argument in self.graph.feedback if argument is not None}
        is_state = [i in updated or is_donated for i, is_donated in enumerate(self.call.donated)]
        return is_state if any(is_state) else [number == self.call.numbers[0] for number in self.call.numbers]

    @property
    def loaded(self) -> frozenset[int]:
        """The flat arguments that are loaded anew for each step: arrays of the batch, without random keys."""
        arrays = zip(self.call.arrays, self.is_state, strict=True)
        return frozenset(
            i for i, (array, is_state) in enumerate(arrays) if array.ndim and not is_state and not is_random_key(array)
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """Names an argument that is larger than all others together, and of which nothing comes back.

        That is right for inference; a training step that forgets to return its state does not train.
        """
        num_bytes = [math.prod(array.shape) * array.dtype.itemsize for array in self.call.arrays]
        if any(argument is not None for argument in self.graph.feedback):
            return ()
        for number in sorted(set(self.call.numbers)):
            own = sum(n for n, other in zip(num_bytes, self.call.numbers, strict=True) if other == number)
            if own > max(_LEAST_NOTED_BYTES, sum(num_bytes) / 2):
                return (
                    f"`{self.call.parameters[number]}`: none of the results replaces it in the next call. A training "
                    "step has to return its new state.",
                )
        return ()


def trace_function(options: Options, args: Sequence[Any]) -> TracedFunction:
    """Traces the function for arguments that are arrays or `jax.ShapeDtypeStruct`; errors of JAX are passed on."""
    return trace_call(options, call_of(options, args, {}))


def traced_measured_function(options: Options) -> tuple[Options, TracedFunction]:
    """Returns the function that formats measure in the place of the searched one, with options of its own."""
    formats = options.formats
    assert formats is not None
    first = formats.calls[0] if formats.calls else formats.validation_runs[0][0]
    options = measured_options(options)
    return options, trace_function(options, first)


def measured_options(options: Options) -> Options:
    """Returns the options of the function by which formats are measured: the searched one, or one in its place."""
    if options.formats is None or options.formats.measured_fn is None:
        return options
    fn, one = options.formats.measured_fn, AbstractMesh((1,), ("device",), axis_types=(AxisType.Auto,))
    return replace(options, fn=fn, mesh=one, in_shardings=None, memory_limit_bytes=math.inf)


def trace_call(options: Options, call: Call, report_lost: ReportLostChanges = warn_of_lost_changes) -> TracedFunction:
    """Traces the function for the arguments of a call, as a function of flat arrays; errors of JAX are passed on.

    Nothing but arrays and tracers is put into the user's pytrees here: their constructors may look at what they get.
    `report_lost` is told which arguments the function changes in place without returning them.

    Raises:
      ValueError: an array or a loop is too large for any device, or the batch has no rows.
    """
    results: list[tuple[Structure, tuple[str, ...], list[int | None]]] = []
    names = [call.parameters[number] for number in call.numbers]

    def flat(*arrays: Any) -> list[Any]:
        args, kwargs = call.structure.unflatten(arrays)
        result = _called(options, args, kwargs)
        leaves, structure = split(result)
        if lost := lost_changes(options.function_name, call.structure, names, arrays, (args, kwargs), leaves):
            report_lost(lost)
        feedback = feedback_of(result, (*args, *kwargs.values()), abstract_split)
        results.append((structure, array_paths("result", result), feedback))
        return leaves

    with planned_without_cudnn():
        jaxpr = _trace(flat, options, call)
    result, out_paths, feedback = results[-1]
    graph = build_graph(jaxpr, feedback, call.paths)
    check_sizes(graph)
    traced_function = TracedFunction(jaxpr, graph, call, result, out_paths)
    loaded = sorted(traced_function.loaded)
    check_rows([call.paths[i] for i in loaded], [call.arrays[i] for i in loaded])
    if options.state is None:
        return traced_function
    return traced_again(traced_function, RematerialisedFunction(early_updates(graph), frozenset()))


def traced_again(traced_function: TracedFunction, flat: Callable[..., list[Any]]) -> TracedFunction:
    """Returns a traced function that another function of its flat arrays computes, without what no result needs."""
    types = [v.aval for v in traced_function.jaxpr.jaxpr.invars]
    arrays = [jax.ShapeDtypeStruct(t.shape, t.dtype, weak_type=t.weak_type) for t in types]
    jaxpr = without_dead_code(jax.make_jaxpr(flat)(*arrays))
    graph = build_graph(jaxpr, traced_function.graph.feedback, traced_function.call.paths)
    return replace(traced_function, jaxpr=jaxpr, graph=graph)


def _called(options: Options, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Calls the user's function and returns its results."""
    try:
        return options.fn(*map(plain, args), **{name: plain(argument) for name, argument in kwargs.items()})
    except ValueError as error:
        if hasattr(options.fn, "lower") and str(error).startswith("Non-hashable static arguments"):
            raise TypeError(
                f"{options.function_name} is under `jax.jit` with static arguments, which the search cannot see. Give "
                "them to `diffshard.search` as well, as `static_argnums` or `static_argnames`."
            ) from error
        raise


def _trace(flat: Callable[..., list[Any]], options: Options, call: Call) -> core.ClosedJaxpr:
    """Returns the jaxpr of a function of flat arrays.

    It is traced with automatic axes first: with explicit ones JAX asks for a sharding in the types of every operation,
    which only functions that are written for them give.

    Raises:
      ValueError: the function needs explicit axes, and there are rules for logical axes, which these do not take.
    """
    automatic = with_automatic_axes(options.mesh)
    flat = named_as_user(flat, options, call.paths)
    ruled = _under_rules(flat, options.logical_axis_rules, automatic)
    context = with_automatic_axes(jax.sharding.get_abstract_mesh())
    has_context = bool(context.axis_names or options.logical_axis_rules)
    jaxpr = None
    try:
        jaxpr = _jaxpr_under(context, ruled, call.arrays)
    except (TypeError, ValueError):
        if not has_explicit_axes(options.mesh):
            raise
    if jaxpr is None or (has_explicit_axes(options.mesh) and has_reshards(jaxpr.jaxpr)):
        try:
            return _trace_with_explicit_axes(flat, options, call)
        except (TypeError, ValueError):
            if jaxpr is None:
                raise
    if not has_context:
        return jaxpr
    if has_constraints(jaxpr.jaxpr):
        return without_context_mesh(jaxpr, automatic)
    return _jaxpr_under(AbstractMesh((), ()), flat, call.arrays)  # a plan is the same in any context


def _jaxpr_under(
    mesh: AbstractMesh, fn: Callable[..., list[Any]], arrays: Sequence[jax.ShapeDtypeStruct]
) -> core.ClosedJaxpr:
    """Traces a function of flat arrays under a context mesh; anew each time, where `jax.jit` alone would remember."""
    with jax.sharding.use_abstract_mesh(mesh), module_scopes():
        return jax.jit(renamed(lambda *tracers: fn(*tracers), fn)).trace(*arrays).jaxpr


def _trace_with_explicit_axes(flat: Callable[..., list[Any]], options: Options, call: Call) -> core.ClosedJaxpr:
    """Returns the jaxpr of a function of flat arrays that is written for explicit axes."""
    if options.logical_axis_rules:
        raise ValueError(
            f"`logical_axis_rules` {dict(options.logical_axis_rules)} split activations over automatic axes, but "
            f"{options.function_name} is written for explicit ones. Leave out the rules, or give automatic axes."
        )
    shardings = [None if spec is None else as_sharding(spec, options.mesh) for spec in call.given]
    typed = [
        jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding, weak_type=array.weak_type)
        for array, sharding in zip(call.arrays, shardings, strict=True)
    ]
    jaxpr = _jaxpr_under(options.mesh.abstract_mesh, flat, typed)
    return with_constraints(jaxpr, with_automatic_axes(options.mesh))


def space_of(
    options: Options,
    traced_function: TracedFunction,
    specs: Sequence[PartitionSpec | NamedSharding | None] | None = None,
) -> ShardingSpace:
    """Returns the space of everything that can be chosen about a traced function, as its executor can run it.

    Args:
      specs: for each flat argument the spec that it must keep, or None; by default those that the call gives.

    Raises:
      ValueError: a given sharding does not fit its argument.
      InfeasibleError: it does not, on this one of several meshes.
    """
    call = traced_function.call
    specs = call.given if specs is None else specs
    if options.names_levels:
        specs = [None if spec is None else LevelNames.on_axes(spec, options.axis_names) for spec in specs]  # pyright: ignore[reportArgumentType]  # no NamedSharding is let in
    try:
        given = given_dimensions(specs, call.arrays, call.paths, options.mesh)
    except ValueError as error:
        if not options.names_levels:
            raise
        raise InfeasibleError(f"{error} Another mesh may be able to.", is_proven=True) from None
    is_default = options.executor is None and not impossible_operations(traced_function.graph)
    return ShardingSpace(
        traced_function.graph,
        options.axis_names,
        options.axis_sizes,
        options.hardware,
        given,
        call.donated,
        options.memory_limit_bytes,
        as_program=is_default or options.executor == "program",
        loaded=traced_function.loaded,
        offloads_state=options.state is not None,
    )


def _under_rules(fn: Callable[..., Any], rules: LogicalAxisRules, mesh: Mesh | AbstractMesh) -> Callable[..., Any]:
    """Returns a function whose flax modules read logical axis names by the rules, on the mesh."""
    if not rules:
        return fn
    from flax import linen as nn  # imported here, because few users need it and it takes a second

    def ruled(*args: Any) -> Any:  # a new function each time: `jax.jit` caches by function, and does not know the rules
        by_rules = nn.logical_axis_rules([(name, axes or None) for name, axes in rules])
        with by_rules, jax.sharding.use_abstract_mesh(mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh):
            return fn(*args)

    return renamed(ruled, fn)


class _ArgumentPath(str):
    """The name of a flat argument, such as `state[0]/w`, that a signature takes for the name of a parameter."""

    __slots__ = ()

    def isidentifier(self) -> bool:
        """Returns True."""
        return True


def named_as_user(flat: Callable[..., list[Any]], options: Options, paths: Sequence[str]) -> Callable[..., list[Any]]:
    """Returns a function of flat arrays that JAX's errors call by the user's function and its arguments."""

    def named(*arrays: Any) -> list[Any]:
        return flat(*arrays)

    kind = inspect.Parameter.POSITIONAL_ONLY
    if len(set(paths)) == len(paths) and not any(map(keyword.iskeyword, paths)):
        parameters = [inspect.Parameter(_ArgumentPath(path), kind) for path in paths]
        named.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    if hasattr(inspect.unwrap(options.fn), "__code__"):  # of other objects JAX would write the value
        named.__wrapped__ = options.fn  # pyright: ignore[reportFunctionMemberAccess]
    named.__name__ = options.function_name
    return named


def renamed(fn: Callable[..., Any], like: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a function the names by which JAX calls another one, and returns it."""
    for name in ("__signature__", "__wrapped__", "__name__"):
        if hasattr(like, name):
            setattr(fn, name, getattr(like, name))
    return fn

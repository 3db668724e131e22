"""What a plan must know of each kind of custom call: its rule, its price, and how it runs on one device's part.

JAX's `custom_partitioning` is split by the sharding rule that it was given, and run by its own `partition`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax
from jax.extend import core
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from cost.base import AttentionWork, Work
from cost.compute import jaxpr_flops
from search_spaces.partition_specs import IndexedSpec, named_spec, partition_spec
from search_spaces.replay import bind
from search_spaces.sharding.base import Rule, ShardingStrategy
from search_spaces.sharding.custom_calls.cudnn import BACKWARD, CUDNN_TARGETS, FORWARD, rule_of_attention
from search_spaces.sharding.custom_calls.kernel import Kernel, Parts, arrays_bytes, dtype_of_work
from search_spaces.sharding.custom_calls.notation import NamedDimensions, NamedRule, Shape, parse_rule
from search_spaces.sharding.custom_calls.pallas import (
    PALLAS_TARGETS,
    name_of_call,
    rule_of_call,
    run_call,
    work_of_call,
)
from search_spaces.sharding.custom_calls.ring import ring_collectives, run_attention, sequence_rules, work_of_parts
from search_spaces.sharding.graph import Value, Vertex
from search_spaces.sharding.own_collectives import OwnCollective
from search_spaces.sharding.rules import RIGHT_SIDES, shapes_of
from search_spaces.sharding.spec import parts_of

_BATCHING = "…"  # how JAX writes `...` in a rule, with the number of its group


class _Type(NamedTuple):
    """The type of an operand or result, for a function that makes a rule."""

    shape: Shape
    element_type: Any

    @property
    def rank(self) -> int:
        """The number of dimensions."""
        return len(self.shape)


def name_of_partitioning(equation: core.JaxprEqn) -> str:
    """Returns the name of the function that has its own partitioning."""
    body = equation.params["call"].jaxpr
    info = str(getattr(getattr(body, "debug_info", None), "func_src_info", ""))
    return f"custom_partitioning {info.split(' ')[0]!r}"


def rule_of_partitioning(equation: core.JaxprEqn) -> Rule | None:
    """Returns the rule that an operation was given; None if it has none, or one that cannot be read."""
    given: Any = equation.params["sharding_rule"]
    operands, results = _partitioned_types(equation.invars), _partitioned_types(equation.outvars)
    try:
        if callable(given):
            mesh = AbstractMesh((1,), ("unused",), axis_types=(AxisType.Auto,))
            given = given(*equation.params["static_args"], mesh, operands, results)
        if isinstance(given, str):
            rule, sizes = parse_rule(given), {}
        elif given is None:
            return None
        else:
            rule, sizes = _named_rule(given, operands, results), given.factor_sizes
        return rule.rule([x.shape for x in operands], [x.shape for x in results], sizes)
    except (AttributeError, TypeError, ValueError):  # a rule that a foreign function makes of what it does not have
        return None


def run_partitioning(equation: core.JaxprEqn, operands: Sequence[Any], parts: Parts) -> list[Any]:
    """Runs an operation on parts: what its own `partition` returns for one device."""
    params = equation.params
    if not parts.is_split:
        return list(core.jaxpr_as_fun(params["call"])(*operands))
    mesh = AbstractMesh(parts.axis_sizes, parts.axis_names, axis_types=(AxisType.Auto,) * len(parts.axis_sizes))

    def typed(variables: Sequence[Any], specs: Sequence[IndexedSpec]) -> list[jax.ShapeDtypeStruct]:
        shardings = [NamedSharding(mesh, partition_spec(named_spec(spec, parts.axis_names))) for spec in specs]
        pairs = zip(variables, shardings, strict=True)
        return [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, sharding=sharding) for v, sharding in pairs]

    arguments, results = typed(equation.invars, parts.operands), typed(equation.outvars, parts.results)
    _, function, result_shardings, argument_shardings = params["partition"](
        *params["static_args"],
        mesh,
        params["in_tree"].unflatten(arguments),
        params["out_tree"].unflatten(results),
    )
    wanted = [*jax.tree.leaves(argument_shardings), *jax.tree.leaves(result_shardings)]
    for array, sharding in zip((*arguments, *results), wanted, strict=True):
        if not sharding.is_equivalent_to(array.sharding, len(array.shape)):
            raise ValueError(f"its `partition` takes {sharding.spec} where its rule allows {array.sharding.spec}")
    return list(jax.tree.leaves(function(*params["in_tree"].unflatten(operands))))


def work_of_partitioning(equation: core.JaxprEqn, operands: Sequence[jax.ShapeDtypeStruct], share: float) -> Work:
    """Returns the work of one device: its share of the function's arithmetic, on its operands and results."""
    flops = share * jaxpr_flops(equation.params["call"])
    results = arrays_bytes([v.aval for v in equation.outvars])
    return Work(flops, arrays_bytes(operands) + share * results, dtype_of_work(operands))


def _partitioned_types(variables: Sequence[Any]) -> list[_Type]:
    return [_Type(tuple(v.aval.shape), v.aval.dtype) for v in variables]


def _named_rule(given: Any, operands: Sequence[_Type], results: Sequence[_Type]) -> NamedRule:
    """Returns JAX's `SdyShardingRule` as ours."""

    def array(mapping: Sequence[Any], shape: Shape) -> NamedDimensions:
        dims: list[tuple[str, ...]] = []
        for dim in mapping:
            if isinstance(dim, str) and dim.startswith(_BATCHING):
                group = dim.removeprefix(_BATCHING) or "0"
                dims += [(f"{_BATCHING}{group}_{i}",) for i in range(len(shape) - len(mapping) + 1)]
            else:
                dims.append((dim,) if isinstance(dim, str) else tuple(dim))
        return tuple(dims)

    return NamedRule(
        tuple(array(m, x.shape) for m, x in zip(given.operand_mappings, operands, strict=True)),
        tuple(array(m, x.shape) for m, x in zip(given.result_mappings, results, strict=True)),
        tuple((factor, "finished") for factor in given.reduction_factors),
        frozenset((*given.need_replication_factors, *given.permutation_factors)),
    )


class CustomCall(NamedTuple):
    """A kind of operation whose inside no compiler sees.

    Attributes:
      rule: of an equation, or None where nothing is known of its dimensions.
      work: of an equation, the operands of one device and its share of the whole work.
      run: of an equation and one device's operands, its results there, where partial results are not combined yet;
        raises an error where it does not accept such parts.
      combine: of an equation, what combines its partial results.
      name: of an equation, for a reader of a plan.
      more_rules: of an equation, other rules by which it runs on parts, with collectives of its own.
      collectives: of an equation and how its arrays are split, the collectives that it runs itself.
    """

    rule: Callable[[core.JaxprEqn], Rule | None]
    work: Callable[[core.JaxprEqn, Sequence[jax.ShapeDtypeStruct], float], Work | AttentionWork]
    run: Callable[[core.JaxprEqn, Sequence[Any], Parts], Sequence[Any]]
    combine: Callable[[core.JaxprEqn], str]
    name: Callable[[core.JaxprEqn], str]
    more_rules: Callable[[core.JaxprEqn], Sequence[Rule]] = lambda equation: ()
    collectives: Callable[[core.JaxprEqn, Parts], Sequence[OwnCollective]] = lambda equation, parts: ()


def _kernel(equation: core.JaxprEqn) -> Kernel:
    return equation.params["kernel"]


def _bind(equation: core.JaxprEqn, operands: Sequence[Any], parts: Parts) -> Sequence[Any]:
    """Runs an operation whose parameters hold no shapes."""
    del parts
    return bind(equation, operands)


_ATTENTION = CustomCall(
    rule_of_attention,
    work_of_parts,
    run_attention,
    lambda e: "sum",
    lambda e: "cuDNN's attention",
    sequence_rules,
    ring_collectives,
)
CUSTOM_CALLS: dict[str, CustomCall] = {
    "kernel": CustomCall(
        rule=lambda e: _kernel(e).rule.rule(shapes_of(e.invars), shapes_of(e.outvars)),
        work=lambda e, operands, share: _kernel(e).work(operands, share),
        run=_bind,
        combine=lambda e: _kernel(e).rule.combine,
        name=lambda e: f"kernel {_kernel(e).name!r}",
    ),
    "pallas_call": CustomCall(rule_of_call, work_of_call, run_call, lambda e: "sum", name_of_call),
    "custom_partitioning": CustomCall(
        rule_of_partitioning, work_of_partitioning, run_partitioning, lambda e: "finished", name_of_partitioning
    ),
    FORWARD: _ATTENTION,
    BACKWARD: _ATTENTION,
}
"""By the names of primitives."""
CUSTOM_CALL_TARGETS = (*PALLAS_TARGETS, *CUDNN_TARGETS)
"""The names in XLA of what Pallas calls and cuDNN's attention lower to."""
_MAY_NAME_AXES = ("custom_partitioning", FORWARD, BACKWARD)
"""Primitives whose form on parts may have collectives, and so names the mesh's axes."""
UNEVEN = "the parts are uneven"
"""Why a custom call is not split over axes that do not divide a dimension."""


def custom_call_of(vertex: Vertex) -> CustomCall | None:
    """Returns the kind of custom call that a vertex's operation is; None for every other vertex."""
    return CUSTOM_CALLS.get(vertex.primitive)


def runs_on_parts(vertex: Vertex) -> bool:
    """Returns whether every executor runs an operation on each device's own part, and leaves XLA nothing to partition.

    These are custom calls, those with independent right-hand sides, and convolutions with groups. Where the
    contracted features of such a convolution are split, XLA's partitioner adds the partial results of
    `batch_group_count` more than once, and may end the process.
    """
    if custom_call_of(vertex) is not None or vertex.primitive in RIGHT_SIDES:
        return True
    is_convolution = vertex.primitive == "conv_general_dilated"
    return is_convolution and max(vertex.params["feature_group_count"], vertex.params["batch_group_count"]) > 1


def name_of(vertex: Vertex) -> str:
    """Returns the name of an operation for a reader of a plan."""
    custom_call = custom_call_of(vertex)
    return vertex.primitive if custom_call is None or vertex.equation is None else custom_call.name(vertex.equation)


def local_operands(
    vertex: Vertex, strategy: ShardingStrategy, axis_sizes: tuple[int, ...]
) -> list[jax.ShapeDtypeStruct]:
    """Returns the operands of one device; dimensions that do not divide are rounded up."""
    operands = []
    for operand, spec in zip(vertex.operands, strategy.operands, strict=True):
        aval: Any = operand if isinstance(operand, Value) else operand.aval
        operands.append(_part(aval.shape, aval.dtype, spec, axis_sizes))
    return operands


def _part(shape: Sequence[int], dtype: Any, spec: Any, axis_sizes: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    sizes = tuple(-(-size // parts) for size, parts in zip(shape, parts_of(spec, axis_sizes), strict=True))
    return jax.ShapeDtypeStruct(sizes, dtype)


def local_work(vertex: Vertex, strategy: ShardingStrategy, axis_sizes: tuple[int, ...]) -> Work | AttentionWork:
    """Returns the work of one device in a custom call."""
    custom_call = custom_call_of(vertex)
    assert custom_call is not None
    assert vertex.equation is not None
    operands = local_operands(vertex, strategy, axis_sizes)
    return custom_call.work(vertex.equation, operands, 1.0 / strategy.parts)


def own_collectives(
    vertex: Vertex, strategy: ShardingStrategy, axis_names: tuple[str, ...], axis_sizes: tuple[int, ...]
) -> Sequence[OwnCollective]:
    """Returns the collectives that an operation runs itself with a strategy; only some custom calls have any."""
    custom_call = custom_call_of(vertex)
    if custom_call is None or vertex.equation is None:
        return ()
    return custom_call.collectives(
        vertex.equation, Parts(strategy.operands, strategy.unreduced, axis_names, axis_sizes)
    )


def refusal(vertex: Vertex, strategy: ShardingStrategy, axis_sizes: tuple[int, ...]) -> str | None:
    """Returns why a custom call does not run on the parts of a strategy; None if it does.

    It does on even parts that its function accepts.

    Raises:
      ValueError: the function gives results of other shapes than its rule says.
    """
    known = _refusals.setdefault(vertex, {})
    key = strategy._replace(reductions=(), results=()), axis_sizes
    if key not in known:
        known[key] = _refusal(vertex, *key)
    return known[key]


_refusals: WeakKeyDictionary[Vertex, dict[tuple[ShardingStrategy, tuple[int, ...]], str | None]] = WeakKeyDictionary()
"""What `refusal` has found out: each search asks several times, and an answer takes a trace. Freed with the graph."""


def _refusal(vertex: Vertex, strategy: ShardingStrategy, axis_sizes: tuple[int, ...]) -> str | None:
    custom_call = custom_call_of(vertex)
    assert custom_call is not None
    assert vertex.equation is not None
    arrays = (*vertex.operands, *vertex.results)
    for array, spec in zip(arrays, (*strategy.operands, *strategy.unreduced), strict=True):
        of_type: Any = array if isinstance(array, Value) else array.aval
        shape = of_type.shape
        if any(size % parts for size, parts in zip(shape, parts_of(spec, axis_sizes), strict=True)):
            return UNEVEN
    operands = local_operands(vertex, strategy, axis_sizes)
    names = tuple(f"axis_{a}" for a in range(len(axis_sizes)))
    parts = Parts(strategy.operands, strategy.unreduced, names, axis_sizes)
    try:
        types = _types(vertex, operands, parts)
    except Exception as error:  # whatever a foreign function raises for shapes that it does not take
        return str(error).strip().split("\n")[0] or type(error).__name__
    expected = [
        _part(value.shape, value.dtype, spec, axis_sizes)
        for value, spec in zip(vertex.results, strategy.unreduced, strict=True)
    ]
    if [(tuple(x.shape), x.dtype) for x in types] != [(x.shape, x.dtype) for x in expected]:
        raise ValueError(
            f"The rule of {custom_call.name(vertex.equation)} ({vertex.user_source}) does not fit its function: "
            f"for one device's operands {_written(operands)} it says that the results are {_written(expected)}, but "
            f"the function returns {_written(types)}. Name factors that must not be split in `need_replication`."
        )
    return None


def _types(vertex: Vertex, operands: Sequence[jax.ShapeDtypeStruct], parts: Parts) -> list[jax.ShapeDtypeStruct]:
    """Returns the results that a custom call gives on one device of a mesh, which names its axes."""
    custom_call, equation = custom_call_of(vertex), vertex.equation
    assert custom_call is not None
    assert equation is not None
    if vertex.primitive == "kernel":
        return _kernel(equation).results(operands)  # traced once for each shape
    if vertex.primitive not in _MAY_NAME_AXES:
        results = jax.eval_shape(lambda *arrays: custom_call.run(equation, arrays, parts), *operands)
        return list(results)
    mesh = AbstractMesh(parts.axis_sizes, parts.axis_names, axis_types=(AxisType.Auto,) * len(parts.axis_sizes))
    types: list[jax.ShapeDtypeStruct] = []

    def on_one_device(*arrays: Any) -> list[Any]:
        results = custom_call.run(equation, arrays, parts)
        types.extend(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results)
        return []

    replicated = (PartitionSpec(),) * len(operands)
    on_each = jax.shard_map(on_one_device, mesh=mesh, in_specs=replicated, out_specs=[], check_vma=False)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):  # a program for each device asks inside of its own mesh
        jax.eval_shape(on_each, *operands)
    return types


def _written(arrays: Sequence[jax.ShapeDtypeStruct]) -> str:
    return ", ".join(f"{x.dtype}{list(x.shape)}" for x in arrays)

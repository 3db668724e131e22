"""JAX's `custom_partitioning`: split by the sharding rule that it was given, and run by its own `partition`.

Its rule may be an object or a function of types, in Shardy's terms. What `partition` returns for one device finishes
its own reductions, so the plan's collectives for them are priced and not run again.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from cost.base import Work
from cost.compute import jaxpr_flops
from search_spaces.partition_specs import IndexedSpec, named_spec, partition_spec
from search_spaces.sharding.base import Rule
from search_spaces.sharding.opaque.notation import NamedDimensions, NamedRule, Shape, parse_rule
from search_spaces.sharding.opaque.work import Parts, arrays_bytes, dtype_of_work

_BATCHING = "…"  # how JAX writes `...` in a rule, with the number of its group


class _Type(NamedTuple):
    """What a function that makes a rule may ask of an operand or result."""

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
    operands, results = _types(equation.invars), _types(equation.outvars)
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
    """Returns what one device does: its share of the function's arithmetic, on its operands and results."""
    flops = share * jaxpr_flops(equation.params["call"])
    results = arrays_bytes([v.aval for v in equation.outvars])
    return Work(flops, arrays_bytes(operands) + share * results, dtype_of_work(operands))


def _types(variables: Sequence[Any]) -> list[_Type]:
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

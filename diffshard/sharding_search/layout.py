"""Between the layouts of a sharding space, which number mesh axes and values, and plans, which write them by name."""

import math
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, cast

from cost.base import CollectiveKind
from diffshard.base import PlanError
from diffshard.plans.base import Operation, PlanData
from search_spaces.partition_specs import IndexedSpec, indexed_spec
from search_spaces.sharding.base import Coded, Layout, ReshardStep, ShardingStrategy
from search_spaces.sharding.coded_exchanges import with_used_exchanges
from search_spaces.sharding.coded_sums import can_be_coded
from search_spaces.sharding.codes import CODES, SUMS, is_narrower, sums_in
from search_spaces.sharding.execution import make_layout
from search_spaces.sharding.graph import Value, Vertex
from search_spaces.sharding.host_state import on_host
from search_spaces.sharding.product_formats import FORMATS, FormattedProduct, takes
from search_spaces.sharding.space import ShardingSpace
from search_spaces.sharding.spec import axes_in, shards

_WEAK_TYPES = (
    " Such a conversion only drops a weak type, which arrays made of Python numbers have, and which the arguments had "
    "at one time and not at the other: give them a dtype, as in `jnp.full(shape, 0.25, jnp.float32)`, and plan again."
)


def layout_of(plan: PlanData, space: ShardingSpace) -> Layout:
    """Returns the layout that a plan stands for, on a function's graph."""
    vertices = space.graph.vertices
    for i, (vertex, operation) in enumerate(zip(vertices, plan.operations, strict=False)):
        signature = signature_of(vertex)
        if (operation.kind, operation.signature) != (vertex.kind, signature):
            raise PlanError(
                f"The plan does not fit the function: at operation {i} the plan has {operation.signature} "
                f"({operation.source or operation.kind}), the function {signature} ({vertex.source or vertex.kind})."
                f"{_WEAK_TYPES * (_drops_weak_type(operation.signature) or _drops_weak_type(signature))}"
            )
    if len(vertices) != len(plan.operations):
        raise PlanError(
            f"The plan does not fit the function: it has {len(plan.operations)} operations, "
            f"the function {len(vertices)}."
        )
    if len(plan.outputs) != len(space.graph.outputs):
        raise PlanError(
            f"The plan does not fit the function: it was made for {len(plan.outputs)} results, the function has "
            f"{len(space.graph.outputs)}. Search again for this function."
        )
    value_specs: list[IndexedSpec] = [()] * len(space.graph.values)
    strategies = []
    for vertex, operation in zip(vertices, plan.operations, strict=True):
        operands, unreduced, results, kept_specs = (
            tuple(indexed_spec(spec, space.axis_names) for spec in specs)
            for specs in (operation.operands, operation.unreduced, operation.results, operation.value_specs)
        )
        if (len(operands), len(results)) != (len(vertex.operands), len(vertex.results)):
            raise PlanError(
                f"The plan does not fit the function: its {operation.signature} ({operation.source or operation.kind}) "
                f"has specs for {len(operands)} operands and {len(results)} results."
            )
        if vertex.kind == "operation":
            reductions = _reductions(operation, unreduced, results, space)
        else:
            reductions = tuple(map(space.reshard_costs.path, unreduced, results))
        split = {axis for spec in (*operands, *unreduced) for axis in axes_in(spec)}
        parts = math.prod(space.axis_sizes[axis] for axis in split)
        strategies.append(ShardingStrategy(operands, results, parts, reductions, unreduced))
        for value, spec in zip(vertex.results, kept_specs, strict=True):
            value_specs[value.id] = spec
    in_formats = _rounded(plan, space) | _coded(plan, space, strategies)
    layout = make_layout(space.graph, strategies, value_specs).with_formats(in_formats)
    _check_exchanges(plan, space, layout)
    return on_host(layout, _on_host(plan, space), space.graph)


def _on_host(plan: PlanData, space: ShardingSpace) -> list[bool]:
    """Returns for each flat argument whether it is in the host's memory."""
    possible = {array.vertex for array in space.host_arrays}
    for tensor, vertex in zip(plan.arguments, space.graph.inputs, strict=True):
        if tensor.on_host and vertex.index not in possible:
            raise PlanError(
                f"The plan has `{tensor.path}` in the host's memory, but only state can be there that nothing reads "
                "but its own update."
            )
    return [tensor.on_host for tensor in plan.arguments]


def _rounded(plan: PlanData, space: ShardingSpace) -> frozenset[FormattedProduct]:
    rounded = [(i, operation.format) for i, operation in enumerate(plan.operations) if operation.format]
    for i, name in rounded:
        if name not in FORMATS:
            raise PlanError(f"The plan has a product in {name!r}, which is none of the formats {', '.join(FORMATS)}.")
        if not takes(space.graph.vertices[i], name):
            raise PlanError(
                f"The plan has {plan.operations[i].signature} ({plan.operations[i].source}) in {name}, which only "
                "products of floating-point arrays can be in, those of blocks if they contract whole blocks."
            )
    return frozenset(rounded)


def _coded(plan: PlanData, space: ShardingSpace, strategies: Sequence[ShardingStrategy]) -> frozenset[Coded]:
    sums = [Coded(i, operation.sent_in) for i, operation in enumerate(plan.operations) if operation.sent_in]
    kept = [Coded(i, operation.kept_in, "kept") for i, operation in enumerate(plan.operations) if operation.kept_in]
    residuals = {residual.value.vertex for residual in space.residuals.of_value.values()} if kept else set()
    exchanged = [Coded(i, o.exchanged_in, "exchange") for i, o in enumerate(plan.operations) if o.exchanged_in]
    for coded in (*sums, *kept):
        vertex, operation = space.graph.vertices[coded.vertex], plan.operations[coded.vertex]
        is_kept = coded.kind == "kept"
        if is_kept:
            can_be = coded.format in CODES and coded.vertex in residuals
        else:
            can_be = coded.format in SUMS and sums_in(vertex, coded.format)
            can_be = can_be and can_be_coded(vertex, strategies[coded.vertex], coded.format, space.axis_sizes)
        if not can_be:
            raise PlanError(
                f"The plan {'keeps the result' if is_kept else 'sends the sums'} of {operation.signature} "
                f"({operation.source}) in {coded.format}, in which that cannot be."
            )
    return frozenset((*sums, *kept, *exchanged))


def _check_exchanges(plan: PlanData, space: ShardingSpace, layout: Layout) -> None:
    exchangeable = {vertex.index for vertex in space.exchangeable} if layout.coded else set()
    used = with_used_exchanges(space.reshard_costs.path, space.graph, layout).coded
    for coded in layout.coded:
        vertex, operation = space.graph.vertices[coded.vertex], plan.operations[coded.vertex]
        is_format = coded.vertex in exchangeable and coded.format in CODES
        can_be = is_format and is_narrower(coded.format, vertex.results[0].dtype) and coded in used
        if coded.kind == "exchange" and not can_be:
            raise PlanError(
                f"The plan exchanges the result of {operation.signature} ({operation.source}) in {coded.format}, in "
                "which that cannot be."
            )


def _reductions(
    operation: Operation,
    unreduced: tuple[IndexedSpec, ...],
    results: tuple[IndexedSpec, ...],
    space: ShardingSpace,
) -> tuple[tuple[ReshardStep, ...], ...]:
    """Returns the collectives that finish each result; all have the spec that the last one leaves."""
    reductions = []
    for kinds_and_axes, before, after in zip(
        operation.reductions or ((),) * len(results), unreduced, results, strict=True
    ):
        fraction, steps = 1.0 / shards(before, space.axis_sizes), []
        for kind, name in kinds_and_axes:
            axis = space.axis_names.index(name)
            steps.append(ReshardStep(cast(CollectiveKind, kind), axis, fraction, after))
            fraction /= space.axis_sizes[axis]
        reductions.append(tuple(steps))
    return tuple(reductions)


def signature_of(vertex: Vertex) -> str:
    """Writes primitive and types of a vertex, by which a plan recognises the function that it was made for."""

    def type_name(x: Any) -> str:
        return _type_name(x.dtype, x.shape) if isinstance(x, Value) else _type_name(x.aval.dtype, x.aval.shape)

    name = vertex.kind if vertex.kind != "operation" or vertex.equation is None else vertex.equation.primitive.name
    return f"{name}({', '.join(map(type_name, vertex.operands))}) -> {', '.join(map(type_name, vertex.results))}"


@lru_cache(maxsize=10_000)
def _type_name(dtype: Any, shape: tuple[int, ...]) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"


def _drops_weak_type(signature: str) -> bool:
    """Returns whether an operation converts to the type that its operand has."""
    match = re.fullmatch(r"convert_element_type\((.*)\) -> (.*)", signature)
    return match is not None and match[1] == match[2]

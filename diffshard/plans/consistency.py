"""Checks of what a plan from a file means: numbers that can be, specs of its own mesh, places that are there."""

import itertools
import math
import re
from collections.abc import Iterable, Sequence

import jax.numpy as jnp

from cost.base import COLLECTIVE_KINDS
from cost.real_numbers import as_float
from diffshard.plans.base import Operation, PlanData, Tensor
from search_spaces.partition_specs import NamedSpec

_MOST_DEVICES = 2**31  # of a mesh: more than JAX can count
_MOST = 2**63
"""What no number of devices and no dimension of an array reaches."""
_TYPES = r"(?:[\w<>]+\[[\d, ]*\](?:, )?)*"
_SIGNATURE = re.compile(rf"[^()]+\({_TYPES}\) -> {_TYPES}")


def check_plan(plan: PlanData, distinct: Iterable[int] | None = None) -> None:
    """Checks that the fields of a plan fit each other; that they have the right types is known.

    Args:
      plan: the plan.
      distinct: indices of operations that differ; all others are equal to one of these but for their place. None are
        all operations.

    Raises:
      ValueError: names the field, the rule and the value.
    """
    axes = plan.mesh_axes
    if not axes or min(axes.values()) < 1 or math.prod(axes.values()) >= _MOST_DEVICES:
        raise ValueError(f"`mesh_axes` is {axes!r}, not axes with their numbers of devices")
    for axis, size in axes.items():
        if size > 1 and axis not in plan.hardware.links:
            raise ValueError(f"`hardware` has no link for the axis {axis!r} of `mesh_axes`")
    indices = range(len(plan.operations)) if distinct is None else distinct
    operations = [(f"operations[{i}]", plan.operations[i]) for i in indices]
    _check_numbers(plan, operations)
    _check_positions(plan)
    for field in ("arguments", "outputs"):
        for i, tensor in enumerate(getattr(plan, field)):
            check_tensor(tensor, axes, f"{field}[{i}]")
    for name, operation in operations:
        _check_operation(operation, axes, name)
    is_input = [operation.kind == "input" for operation in plan.operations]
    if is_input.count(True) != len(plan.arguments) or not all(is_input[: len(plan.arguments)]):
        raise ValueError(f"`operations` must begin with the {len(plan.arguments)} arguments, and have no other input")
    _check_collectives(plan)
    _check_memory(plan)


def _check_numbers(plan: PlanData, operations: Iterable[tuple[str, Operation]]) -> None:
    costs = {name: getattr(plan, name) for name in ("compute_s", "peak_bytes", "search_s")}
    for name, operation in operations:
        costs |= {f"{name}.count": operation.count, f"{name}.compute_s": operation.compute_s}
    for i, collective in enumerate(plan.collectives):
        fields = {name: getattr(collective, name) for name in ("num_bytes", "count", "seconds", "link_s")}
        costs |= {f"collectives[{i}].{name}": value for name, value in fields.items() if value is not None}
    for name, value in costs.items():
        if not 0 <= as_float(value) < math.inf:
            raise ValueError(f"`{name}` must be a finite number, zero or more, not {value!r}")
    if not as_float(plan.memory_limit_bytes) > 0:
        raise ValueError(f"`memory_limit_bytes` must be positive, not {plan.memory_limit_bytes!r}")
    if not as_float(plan.lower_bound_s) < math.inf:
        raise ValueError(f"`lower_bound_s` must be a finite number, or -inf, not {plan.lower_bound_s!r}")
    if not as_float(plan.gap) >= 0:
        raise ValueError(f"`gap` must be a number, zero or more, not {plan.gap!r}")
    for i, entry in enumerate(plan.history):
        if any(math.isnan(as_float(number)) for number in entry):
            raise ValueError(f"`history[{i}]` must not hold NaN, as {entry!r} does")


def _check_positions(plan: PlanData) -> None:
    for name in ("static_argnums", "donate_argnums"):
        if any(number < 0 for number in getattr(plan, name)):
            raise ValueError(f"`{name}` must be positions of arguments, 0 or more, not {getattr(plan, name)!r}")
    with_arrays = {re.split(r"\W", tensor.path, maxsplit=1)[0] for tensor in plan.arguments}
    for number in plan.static_argnums:
        if number < len(plan.parameters) and plan.parameters[number] in with_arrays:
            raise ValueError(f"`static_argnums` has {number}, but {plan.parameters[number]} has arrays in `arguments`")


def check_tensor(tensor: Tensor, axes: Iterable[str], name: str) -> None:
    """Checks that an argument or a result has a type that arrays can have, and specs of the axes of a mesh.

    Raises:
      ValueError: names the field, the rule and the value.
    """
    if not all(0 <= size < _MOST for size in tensor.shape):
        raise ValueError(f"`{name}.shape` must have sizes of 0 or more that arrays can have, not {tensor.shape}")
    if "<" not in tensor.dtype:  # random keys have types like key<fry>
        try:
            jnp.dtype(tensor.dtype)
        except TypeError:
            raise ValueError(f"`{name}.dtype` is {tensor.dtype!r}, which is no type of arrays") from None
    _check_spec(tensor.spec, axes, f"{name}.spec", len(tensor.shape))
    if tensor.next_best_spec is not None:
        _check_spec(tensor.next_best_spec, axes, f"{name}.next_best_spec", len(tensor.shape))


def _check_operation(operation: Operation, axes: Iterable[str], name: str) -> None:
    if not _SIGNATURE.fullmatch(operation.signature):
        raise ValueError(f"`{name}.signature` is {operation.signature!r}, not a primitive with types of arrays")
    for field in ("operands", "unreduced", "results", "value_specs"):
        for spec in getattr(operation, field):
            _check_spec(spec, axes, f"{name}.{field}")
    count = len(operation.results)
    if len(operation.unreduced) != count or len(operation.value_specs) != count:
        raise ValueError(
            f"`{name}` must have as many `unreduced` and `value_specs` as `results`, {count}, not "
            f"{len(operation.unreduced)} and {len(operation.value_specs)}"
        )
    if operation.reductions and len(operation.reductions) != count:
        raise ValueError(f"`{name}.reductions` must be of {count} results or none, not {len(operation.reductions)}")
    for kind, axis in itertools.chain.from_iterable(operation.reductions):
        if kind not in COLLECTIVE_KINDS or axis not in axes:
            raise ValueError(f"`{name}.reductions` has {kind!r} along {axis!r}, which is no collective of this mesh")
    if operation.next_best_spec is not None:
        _check_spec(operation.next_best_spec, axes, f"{name}.next_best_spec")


def _check_spec(spec: NamedSpec, axes: Iterable[str], name: str, rank: int | None = None) -> None:
    if rank is not None and len(spec) != rank:
        raise ValueError(f"`{name}` has {len(spec)} dimensions, where the array has {rank}")
    named_axes = [axis for dimension in spec for axis in dimension]
    for axis in named_axes:
        if axis not in axes:
            raise ValueError(f"`{name}` names {axis!r}, which is no axis of `mesh_axes`, {tuple(axes)}")
    if len(set(named_axes)) < len(named_axes):
        raise ValueError(f"`{name}` splits two dimensions over one axis: {spec}")


def _check_collectives(plan: PlanData) -> None:
    """Checks that each collective is a known one, along an axis of the mesh, between operations of the plan."""
    for i, collective in enumerate(plan.collectives):
        if collective.kind not in COLLECTIVE_KINDS:
            raise ValueError(f"`collectives[{i}].kind` must be one of {COLLECTIVE_KINDS}, not {collective.kind!r}")
        if collective.axis not in plan.mesh_axes:
            raise ValueError(f"`collectives[{i}].axis` is {collective.axis!r}, which is no axis of `mesh_axes`")
        for name in ("operation", "made_by", "read_by"):
            index = getattr(collective, name)
            if index is not None and not 0 <= index < len(plan.operations):
                raise ValueError(f"`{name}` of a collective is {index}, not one of {len(plan.operations)} operations")


def _check_memory(plan: PlanData) -> None:
    """Checks that the profile of memory names the plan's own operations, in order, and its own peak."""
    if plan.memory is None:
        return
    indices = [index for index, _ in plan.memory.changes]
    last = len(plan.operations) - 1
    if indices[:1] != [-1] or indices[-1] > last or any(a >= b for a, b in itertools.pairwise(indices)):
        raise ValueError(f"`memory.changes` must ascend from -1 to at most {last}, not be {_shown(indices)}")
    sizes = [as_float(num_bytes) for _, num_bytes in plan.memory.changes]
    sizes += [as_float(tensor.num_bytes) for tensor in plan.memory.at_peak]
    if not all(0 <= size < math.inf for size in sizes):
        raise ValueError("`memory` must have finite numbers of bytes, zero or more")
    largest = max(sizes[: len(indices)])
    if not math.isclose(largest, plan.peak_bytes, rel_tol=1e-6, abs_tol=1.0):
        raise ValueError(f"`memory.changes` have the peak {largest:,.0f}, where `peak_bytes` is {plan.peak_bytes:,.0f}")
    for tensor in plan.memory.at_peak:
        if not 0 <= tensor.operation <= last or not 0 <= tensor.result < len(plan.operations[tensor.operation].results):
            raise ValueError(f"`memory.at_peak` has {tensor}, which none of the {last + 1} operations makes")


def _shown(indices: Sequence[int]) -> str:
    return f"{list(indices[:8])}{' and so on' if len(indices) > 8 else ''}"

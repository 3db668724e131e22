"""Checks of what a plan from a file means: numbers that can be, specs of its own mesh, places that are there."""

import itertools
import math
import re
from collections.abc import Iterable, Sequence

import jax.numpy as jnp

from cost.base import COLLECTIVE_KINDS
from diffshard.plans.base import Operation, PlanData, Tensor
from diffshard.plans.plan_record import check_certificate
from search_spaces.partition_specs import NamedSpec
from search_spaces.sharding.codes import has_feedback
from search_spaces.sharding.delayed_scales import NAME as DELAYED

_MOST_DEVICES = 2**31  # of a mesh: more than JAX can count
_TOLERANCE = 1e-6  # relative: sums of the same numbers in another order
_LEAST_S = 1e-12  # of seconds that are compared: less is rounding
_TYPES = r"(?:[\w<>]+\[[\d, ]*\](?:, )?)*"
_SIGNATURE = re.compile(rf"[^()]+\({_TYPES}\) -> {_TYPES}")

_RESIDUAL = re.compile(r"(?P<owner>.+)\.residuals\['(?P<number>\d+|maxima) of (?P<digest>[0-9a-f]{8})'\]")
"""The path of a residual, see `diffshard.sharding_search.carried`."""


def check_plan(plan: PlanData, distinct: Iterable[int] | None = None) -> None:
    """Checks that the fields of a plan fit each other; that they have the right types is known.

    Args:
      distinct: indices of operations that differ; all others are equal to one of these but for their place. None are
        all operations.
    """
    axes = plan.mesh_axes
    if not axes or math.prod(axes.values()) >= _MOST_DEVICES:
        raise ValueError(f"`mesh_axes` is {axes!r}, not axes with their numbers of devices")
    for axis, size in axes.items():
        if size > 1 and axis not in plan.hardware.links:
            raise ValueError(f"`hardware` has no link for the axis {axis!r} of `mesh_axes`")
    indices = range(len(plan.operations)) if distinct is None else distinct
    operations = [(f"operations[{i}]", plan.operations[i]) for i in indices]
    _check_predictions(plan)
    _check_positions(plan)
    for field in ("arguments", "outputs", "residuals"):
        for i, tensor in enumerate(getattr(plan, field)):
            check_tensor(tensor, axes, f"{field}[{i}]")
    for name, operation in operations:
        _check_operation(operation, axes, name)
    is_input = [operation.kind == "input" for operation in plan.operations]
    if is_input.count(True) != len(plan.arguments) or not all(is_input[: len(plan.arguments)]):
        raise ValueError(f"`operations` must begin with the {len(plan.arguments)} arguments, and have no other input")
    _check_residuals(plan)
    _check_collectives(plan)
    _check_whole_work(plan)
    _check_memory(plan)
    _check_timeline(plan)
    _check_computing(plan)
    _check_advice(plan)


def _check_predictions(plan: PlanData) -> None:
    """Checks that what is predicted for the whole step follows from its parts."""
    compute_s = math.fsum(operation.compute_s for operation in plan.operations)
    if not math.isclose(plan.compute_s, compute_s, rel_tol=_TOLERANCE, abs_tol=_LEAST_S):
        raise ValueError(f"`compute_s` is {plan.compute_s!r}, where the operations take {compute_s!r} together")
    if not math.isfinite(plan.step_s):
        raise ValueError("`collectives` take more seconds together than a number can be")
    if plan.objective is not None and plan.objective.lower_bound > plan.objective.value:
        raise ValueError(f"`objective.lower_bound` must be at most its value, not {plan.objective.lower_bound!r}")
    check_certificate(plan.certificate)


def _check_positions(plan: PlanData) -> None:
    """Checks that each array is of a parameter, and that those that are static have none."""
    with_arrays = set[str]()
    for tensor in plan.arguments:
        names = [name for name in plan.parameters if tensor.is_of(name)]
        with_arrays.update(names)
        if not names:
            raise ValueError(f"`parameters` are {plan.parameters}, but `arguments` has {tensor.path!r} of none of them")
    for number in plan.static_argnums:
        if number >= len(plan.parameters):
            raise ValueError(f"`static_argnums` has {number}, but there are {len(plan.parameters)} `parameters`")
        if plan.parameters[number] in with_arrays:
            raise ValueError(f"`static_argnums` has {number}, but {plan.parameters[number]} has arrays in `arguments`")


def _check_residuals(plan: PlanData) -> None:
    numbers = [str(i) for i, operation in enumerate(plan.operations) if has_feedback(operation.sent_in)]
    numbers += ["maxima"] * any(operation.format == DELAYED for operation in plan.operations)
    parts = [_RESIDUAL.fullmatch(tensor.path) for tensor in plan.residuals]
    if [part and part["number"] for part in parts] != numbers or len({part["digest"] for part in parts if part}) > 1:
        raise ValueError(
            f"`residuals` must be of the {len(numbers)} operations that send sums with error feedback, with "
            "maxima last where scales are delayed"
        )
    rows = [
        tensor.shape[1]
        for tensor, part in zip(plan.residuals, parts, strict=True)
        if part and part["number"] == "maxima"
    ]
    if plan.delayed_scales and rows != [sum(scale.num_rows for scale in plan.delayed_scales)]:
        raise ValueError(f"`delayed_scales` must have the rows of the maxima in `residuals`, {rows}")
    owners = {part["owner"] for part in parts if part}
    if len(owners) > 1 or not owners <= set(plan.parameters):
        raise ValueError(f"`residuals` must go with one of `parameters`, {plan.parameters}, not {sorted(owners)}")
    if any(tensor.dtype != "float32" for tensor in plan.residuals):
        raise ValueError("`residuals` must be float32")


def check_tensor(tensor: Tensor, axes: Iterable[str], name: str) -> None:
    """Checks that an argument or a result has a type that arrays can have, and specs of the axes of a mesh."""
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
    if (operation.kind == "operation" or operation.reductions) and len(operation.reductions) != count:
        raise ValueError(f"`{name}.reductions` must be of {count} results, not {len(operation.reductions)}")
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
            if index is not None and index >= len(plan.operations):
                raise ValueError(f"`{name}` of a collective is {index}, not one of {len(plan.operations)} operations")


def _check_whole_work(plan: PlanData) -> None:
    """Checks that what is repeated are operations of the plan, less than all computing, and along its own axes."""
    if not 0 <= plan.whole_share <= 1:
        raise ValueError(f"`whole_work` must take from 0 to {plan.compute_s!r} seconds, as all computing does")
    for i, work in enumerate(plan.whole_work):
        if not all(index < len(plan.operations) for index in work.indices):
            raise ValueError(f"`whole_work[{i}].indices` must be of the {len(plan.operations)} operations")
        if not set(work.axes) <= set(plan.mesh_axes):
            raise ValueError(f"`whole_work[{i}].axes` is {work.axes}, not of the mesh, {tuple(plan.mesh_axes)}")


def _check_memory(plan: PlanData) -> None:
    """Checks that the profile of memory names the plan's own operations, in order, and its own peak."""
    indices = [index for index, _ in plan.memory.changes]
    last = len(plan.operations) - 1
    if indices[:1] != [-1] or indices[-1] > last or any(a >= b for a, b in itertools.pairwise(indices)):
        raise ValueError(f"`memory.changes` must ascend from -1 to at most {last}, not be {_shown(indices)}")
    largest = max(num_bytes for _, num_bytes in plan.memory.changes)
    if not math.isclose(largest, plan.peak_bytes, rel_tol=1e-6, abs_tol=1.0):
        raise ValueError(f"`memory.changes` have the peak {largest:,.0f}, where `peak_bytes` is {plan.peak_bytes:,.0f}")
    for tensor in plan.memory.at_peak:
        if tensor.operation > last or tensor.result >= len(plan.operations[tensor.operation].results):
            raise ValueError(f"`memory.at_peak` has {tensor}, which none of the {last + 1} operations makes")


def _check_timeline(plan: PlanData) -> None:
    """Checks that a timeline ends after its bound, and waits for collectives of the plan's own operations and axes."""
    if plan.timeline is None:
        return
    if plan.timeline.lower_bound_s > plan.timeline.seconds:
        raise ValueError(f"`timeline.lower_bound_s` is {plan.timeline.lower_bound_s!r}, more than its seconds")
    for i, wait in enumerate(plan.timeline.waits):
        if wait.kind not in COLLECTIVE_KINDS or not set(wait.axes) <= set(plan.mesh_axes):
            words = f"{wait.kind!r} along {wait.axes}, no collective of this mesh"
            raise ValueError(f"`timeline.waits[{i}]` is of {words}")
        if max(wait.made_by, wait.read_by or 0) >= len(plan.operations):
            raise ValueError(f"`timeline.waits[{i}]` must be between the {len(plan.operations)} operations")


def _check_computing(plan: PlanData) -> None:
    """Checks that the parts of computing are all of it."""
    compute_s = plan.computing.products_s + plan.computing.traffic_s
    if not math.isclose(plan.compute_s, compute_s, rel_tol=_TOLERANCE, abs_tol=_LEAST_S):
        raise ValueError(f"`computing` has {compute_s!r} seconds together, where `compute_s` is {plan.compute_s!r}")


def _check_advice(plan: PlanData) -> None:
    """Checks that advice says something, and saves no more than there is."""
    for i, advice in enumerate(plan.advice):
        if not advice.words:
            raise ValueError(f"`advice[{i}].words` must say what to change, not be empty")
        if advice.seconds > (1 + _TOLERANCE) * plan.step_s or advice.num_bytes > (1 + _TOLERANCE) * plan.peak_bytes:
            raise ValueError(
                f"`advice[{i}]` saves {advice.seconds!r} seconds and {advice.num_bytes!r} bytes, more than the step "
                f"and the peak have, {plan.step_s!r} and {plan.peak_bytes!r}"
            )


def _shown(indices: Sequence[int]) -> str:
    return f"{list(indices[:8])}{' and so on' if len(indices) > 8 else ''}"

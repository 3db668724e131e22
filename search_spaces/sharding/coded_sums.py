"""Partial sums that are sent as codes: where links are slow, half the bytes take half the time.

Numbers can be summed only as numbers. So a device sends to each other one the codes of what that one sums, in an
all-to-all, and the sums are made of decoded numbers in float32 (`communication.collectives`). An all-reduce then
gathers the codes of the sums. Encoding costs memory traffic, so that only the slowest links of a reduction take codes;
the sums over faster links are finished before, when there is less left to encode.
"""

from collections.abc import Sequence
from itertools import groupby
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from search_spaces.communication.base import CollectiveOp, Precision
from search_spaces.communication.collectives import run_encoded
from search_spaces.communication.strategies import ErrorFeedback, stages_of
from search_spaces.sharding.base import Axes, ReshardStep, Rule, ShardingStrategy
from search_spaces.sharding.codes import has_feedback, precision_of
from search_spaces.sharding.graph import Value, Vertex
from search_spaces.sharding.local_blocks import Blocks
from search_spaces.sharding.local_operations import LocalCall, run_local
from search_spaces.sharding.resharding import Paths
from search_spaces.sharding.spec import divides
from search_spaces.sharding.strategies import strategies_of_rule

_SLOW = 0.5
"""Links take codes if a byte takes them more than this share of the seconds that it takes the slowest one."""
_PARTS = "parts"


class CodedSum(NamedTuple):
    """How partial sums are finished.

    Attributes:
      num_exact: of a strategy's reduction steps, those that run as they are, before the codes.
      steps: all collectives that run; their fractions are of the value's own bytes, though codes have fewer.
      num_coded: elements that each device encodes or decodes.
    """

    num_exact: int
    steps: tuple[ReshardStep, ...]
    num_coded: float


def coded_sum(path: Paths, value: Value, steps: Sequence[ReshardStep], format_name: str) -> CodedSum:
    """Returns how the partial sums of a value are finished in a format; `steps` are its reduction.

    Args:
      path: of the mesh; has its rates.
      steps: how the sums are finished exactly, over the fast links first.
    """
    key = "sum", value.shape, value.dtype, tuple(steps), format_name
    if key not in path.messages:
        path.messages[key] = _coded_sum(path, value, steps, precision_of(format_name))
    return path.messages[key]


def _coded_sum(path: Paths, value: Value, steps: Sequence[ReshardStep], precision: Precision) -> CodedSum:
    steps = [step for step in steps if path.axis_sizes[step.axis] > 1]
    slowness = [path.slowness(step.axis) for step in steps]
    num_exact = next((i for i, s in enumerate(slowness) if s > _SLOW * max(slowness)), 0)
    sent, num_coded, done = list(steps[:num_exact]), 0.0, num_exact
    for kind, group in groupby(steps[num_exact:], key=lambda step: step.kind):
        members = list(group)
        axes = sorted(step.axis for step in members)
        collective = _collective(kind, [str(axis) for axis in axes], [path.axis_sizes[axis] for axis in axes])
        num_elements = round(value.num_bytes / value.dtype.itemsize * steps[done].fraction)
        stages = stages_of(collective, (num_elements,), value.dtype, precision)
        fractions = [(stage, stage.num_bytes / value.num_bytes) for stage in stages]
        sent += [ReshardStep(stage.kind, int(stage.axis), f, members[-1].spec) for stage, f in fractions]
        num_coded, done = num_coded + sum(stage.num_coded for stage in stages), done + len(members)
    return CodedSum(num_exact, tuple(sent), num_coded)


def can_be_coded(vertex: Vertex, strategy: ShardingStrategy, name: str, axis_sizes: tuple[int, ...]) -> bool:
    """Returns whether a strategy leaves partial sums in blocks without padding, whose numbers would spoil the scales.

    With error feedback they are finished by collectives of one kind, so that there is one residual.
    """
    kinds = {step.kind for steps in strategy.reductions for step in steps if axis_sizes[step.axis] > 1}
    has_kinds = len(kinds) == 1 if has_feedback(name) else any(strategy.reductions)
    return has_kinds and divides(strategy.unreduced[0], vertex.results[0].shape, axis_sizes)


def finished_steps(
    path: Any, value: Value, strategy: ShardingStrategy, result: int = 0
) -> tuple[tuple[ReshardStep, ...], float]:
    """Returns the collectives that finish a result, and how many elements a device encodes or decodes for them."""
    steps = strategy.reductions[result]
    if not strategy.sent_in or not steps:
        return steps, 0.0
    coded = coded_sum(path, value, steps, strategy.sent_in)
    return coded.steps, coded.num_coded


def finish_sum(
    blocks: Blocks,
    block: Any,
    unreduced: Any,
    steps: Sequence[ReshardStep],
    num_exact: int,
    precision: Precision,
    residual: Any = None,
) -> tuple[Any, Any]:
    """Combines the partial sums of a block, as `Blocks.reduce` does, but the later steps on codes.

    Args:
      num_exact: of these, those that run as they are, before the codes.
      residual: what this device has not sent before, which is added to what is sent as codes, by all steps of one kind;
        float32, with as many elements as that. None for no error feedback.

    Returns:
      The block, and what this device has not sent now: None, or shaped as its part of the coded collective.
    """
    steps = [step for step in steps if blocks.axis_sizes[step.axis] > 1]
    exact, spec = {step.axis for step in steps[:num_exact]}, unreduced
    for kind, group in groupby(steps, key=lambda step: step.kind):
        members = list(group)
        axes = sorted(step.axis for step in members)
        names, sizes = [blocks.axis_names[a] for a in axes], [blocks.axis_sizes[a] for a in axes]
        is_coded = [axis not in exact for axis in axes]
        coded = [
            list(values)
            for values in zip(*[(n, s) for n, s, c in zip(names, sizes, is_coded, strict=True) if c], strict=True)
        ]
        plain = [name for name, c in zip(names, is_coded, strict=True) if not c]
        if kind == "all_reduce":
            block = lax.psum(block, tuple(plain)) if plain else block
            if coded:
                block, residual = _sent(_collective(kind, *coded), block, precision, residual)
        else:
            dim = next(d for d, after in enumerate(members[-1].spec) if after != spec[d])
            rows = jnp.moveaxis(_split(block, dim, sizes), range(dim, dim + len(sizes)), range(len(sizes)))
            for i in reversed([i for i, c in enumerate(is_coded) if not c]):
                rows = lax.psum_scatter(rows, names[i], scatter_dimension=i)
            if coded:
                rows = rows.reshape(prod(coded[1]), *rows.shape[len(coded[1]) :])
                rows, residual = _sent(_collective(kind, *coded), rows, precision, residual)
            block = rows
        spec = members[-1].spec
    return block, residual


def _sent(collective: CollectiveOp, x: Any, precision: Precision, residual: Any) -> tuple[Any, Any]:
    if residual is None:
        return run_encoded(collective, x, precision, None)[0], None
    return ErrorFeedback(precision).run(collective, x, residual.reshape(x.shape), None, None)


def sum_in_parts(
    vertex: Vertex, rule: Rule, operands: Sequence[Any], num_parts: int, precision: Precision, residuals: Any = None
) -> tuple[Any, Any]:
    """Returns the result of an operation on one device, summed as devices would sum it that share its reduction.

    The reduced dimension is cut into parts, whose partial sums are rounded to codes before they are added. Where it
    cannot be cut, there is one part.

    Args:
      vertex: an operation with one result, whose sums can be sent in codes (`codes.sums_in`).
      num_parts: devices that share the reduction; as many as its dimension divides, if these are fewer.
      residuals: of the parts, `[parts, elements]` as `part_residuals` makes them; None for no error feedback.

    Returns:
      The result, and the next residuals.
    """
    count, strategy = _in_parts(vertex, rule, num_parts)
    blocks = Blocks((_PARTS,), (count,))
    stacks = [_stacked(operand, spec, count) for operand, spec in zip(operands, strategy.operands, strict=True)]

    def part(residual: Any, *parts: Any) -> Any:
        (partial,) = run_local(LocalCall(vertex, strategy, blocks), parts)
        steps = strategy.reductions[0]
        block, residual = finish_sum(blocks, partial, strategy.unreduced[0], steps, 0, precision, residual)
        return block, None if residual is None else residual.ravel()

    axes = None if residuals is None else 0, *(0 if is_stack else None for _, is_stack in stacks)
    run = jax.vmap(part, in_axes=axes, axis_name=_PARTS, axis_size=count)
    result, residuals = run(residuals, *(stack for stack, _ in stacks))
    dims = [d for d, axes in enumerate(strategy.results[0]) if axes]
    return jnp.moveaxis(result, 0, dims[0]).reshape(vertex.results[0].shape) if dims else result[0], residuals


def part_residuals(vertex: Vertex, rule: Rule, num_parts: int) -> Any:
    """Returns the residuals of the parts of `sum_in_parts` before the first step, `[parts, elements]`."""
    count = _in_parts(vertex, rule, num_parts)[0]
    return jnp.zeros((count, prod(vertex.results[0].shape)), jnp.float32)


def _in_parts(vertex: Vertex, rule: Rule, num_parts: int) -> tuple[int, ShardingStrategy]:
    """Returns a number of parts, and the strategy that scatters the sums of as many; or reduces them in full."""
    shapes = [x.shape if isinstance(x, Value) else () for x in (*vertex.operands, *vertex.results)]
    for count in range(num_parts, 1, -1):
        strategies = strategies_of_rule(rule, Axes((count,), (0,)))
        for kind in ("reduce_scatter", "all_reduce"):
            for strategy in strategies:
                specs = (*strategy.operands, *strategy.results)
                is_even = all(divides(spec, shape, (count,)) for spec, shape in zip(specs, shapes, strict=True))
                if is_even and any(step.kind == kind for step in strategy.reductions[0]):
                    return count, strategy
    return 1, strategies_of_rule(rule, Axes((1,), (0,)))[0]


def _stacked(operand: Any, spec: Any, count: int) -> tuple[Any, bool]:
    """Returns an operand with its parts along a first dimension, and whether it has parts."""
    for dim, axes in enumerate(spec):
        if axes:
            return jnp.moveaxis(_split(operand, dim, (count,)), dim, 0), True
    return operand, False


def _split(array: Any, dim: int, sizes: Sequence[int]) -> Any:
    shape = jnp.shape(array)
    return jnp.reshape(array, (*shape[:dim], *sizes, shape[dim] // prod(sizes), *shape[dim + 1 :]))


def _collective(kind: Any, names: Sequence[str], sizes: Sequence[int]) -> CollectiveOp:
    return CollectiveOp(kind, tuple(names), tuple(sizes), (0,) if kind == "reduce_scatter" else ())

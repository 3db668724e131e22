"""Operations on one device's blocks: what each equation becomes when its arrays are split as a strategy says.

Most operations are the same on blocks as on whole arrays. Some have shapes among their parameters, which become the
shapes of blocks (`PARAMETERS`); a few need to know where the block lies (`PLACED_OPERATIONS`): an iota starts further
on, a gather from a split table looks up the rows that it has. Every other operation that a strategy splits is run
whole: `replicated_operations.py` tells which.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from search_spaces.replay import bind
from search_spaces.sharding.base import ShardingStrategy
from search_spaces.sharding.custom_calls.kernel import Parts
from search_spaces.sharding.custom_calls.operations import custom_call_of
from search_spaces.sharding.graph import Value, Vertex
from search_spaces.sharding.local_blocks import Blocks, bits_of_block
from search_spaces.sharding.spec import axes_in, parts_of

# fmt: off
# What combines their partial results, where a dimension that they reduce is split.
REDUCTIONS: Mapping[str, str] = {
    "dot_general": "sum", "conv_general_dilated": "sum", "ragged_dot_general": "sum", "reduce_sum": "sum",
    "gather": "sum", "scatter-add": "sum", "reduce_max": "max", "reduce_min": "min", "reduce_or": "max",
    "reduce_and": "min",
}
# fmt: on


class LocalCall(NamedTuple):
    """An operation on one device.

    Attributes:
      run: how many elements of a split dimension belong together, for blocks that are not contiguous.
    """

    vertex: Vertex
    strategy: ShardingStrategy
    blocks: Blocks
    run: int = 1

    @property
    def equation(self) -> core.JaxprEqn:
        """The operation's equation."""
        assert self.vertex.equation is not None
        return self.vertex.equation

    @property
    def result_shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the results' blocks before their reduction."""
        pairs = zip(self.vertex.results, self.strategy.unreduced, strict=True)
        return [self.blocks.shape(value.shape, spec) for value, spec in pairs]

    @property
    def parts(self) -> Parts:
        """How the operation's arrays are split."""
        blocks = self.blocks
        return Parts(self.strategy.operands, self.strategy.unreduced, blocks.axis_names, blocks.axis_sizes)

    def operand_shape(self, position: int) -> tuple[int, ...]:
        """Returns the shape of a whole operand."""
        operand = self.vertex.operands[position]
        return tuple(operand.shape) if isinstance(operand, Value) else np.shape(operand.val)

    def bind(self, operands: Sequence[Any], **parameters: Any) -> list[Any]:
        """Returns the results of the equation's primitive, with some of its parameters changed."""
        return list(bind(self.equation, operands, **{**untyped_parameters(self.equation), **parameters}))


def untyped_parameters(equation: core.JaxprEqn) -> dict[str, Any]:
    """Returns the parameters that give a result's type a sharding, as None: blocks have none.

    JAX writes one where a function is traced on a mesh, as by rules for logical axes.
    """
    return {name: None for name in ("sharding", "out_sharding") if equation.params.get(name) is not None}


def combiner(vertex: Vertex) -> str:
    """Returns the reducer that combines the partial results of an operation: a key of `local_blocks.REDUCERS`."""
    custom_call = custom_call_of(vertex)
    if custom_call is not None and vertex.equation is not None:
        return custom_call.combine(vertex.equation)
    return REDUCTIONS.get(vertex.primitive, "sum")


def run_local(call: LocalCall, operands: Sequence[Any]) -> list[Any]:
    """Returns the results' blocks before their reduction; the operation must not be one that `is_replicated`."""
    name, custom_call = call.vertex.primitive, custom_call_of(call.vertex)
    if custom_call is not None:
        return list(custom_call.run(call.equation, operands, call.parts))
    if name in PLACED_OPERATIONS:
        return PLACED_OPERATIONS[name](call, operands)
    if name in PARAMETERS:
        return call.bind(operands, **PARAMETERS[name](call))
    return call.bind(operands)


def unpadded(call: LocalCall, blocks: Sequence[Any], dims: Sequence[Sequence[int]] | None = None) -> list[Any]:
    """Returns blocks in which what lies beyond the whole arrays is 0, along some dimensions of each or along all."""
    return [
        call.blocks.mask(
            block, call.operand_shape(i), call.strategy.operands[i], range(block.ndim) if d is None else d, 0
        )
        for i, (block, d) in enumerate(zip(blocks, dims or (None,) * len(blocks), strict=True))
    ]


# Operations whose parameters hold shapes.


def _slice_parameters(call: LocalCall) -> dict[str, Any]:
    params, (spec, shape) = call.equation.params, (call.strategy.operands[0], call.result_shapes[0])
    start, limit = list(params["start_indices"]), list(params["limit_indices"])
    for d, axes in enumerate(spec):
        if axes:
            start[d], limit[d] = 0, shape[d]
    return {"start_indices": tuple(start), "limit_indices": tuple(limit)}


def _group_counts(call: LocalCall) -> dict[str, Any]:
    """Returns how many groups of a convolution are on one device; see `replicated_operations`."""
    params, spec = call.equation.params, call.strategy.operands[0]
    batch, features, *_ = params["dimension_numbers"].lhs_spec
    batch_parts, feature_parts = parts_of((spec[batch], spec[features]), call.blocks.axis_sizes)
    counts = params["batch_group_count"], params["feature_group_count"]
    return {
        "batch_group_count": counts[0] // batch_parts if counts[0] > 1 else 1,
        "feature_group_count": counts[1] // feature_parts if counts[1] > 1 else 1,
    }


PARAMETERS: dict[str, Callable[[LocalCall], dict[str, Any]]] = {
    "broadcast_in_dim": lambda call: {"shape": call.result_shapes[0]},
    "conv_general_dilated": _group_counts,
    "slice": _slice_parameters,
    # A split into one piece hands its array through, so that its rule may split the dimension along which it cuts.
    "split": lambda call: {"sizes": tuple(shape[call.equation.params["axis"]] for shape in call.result_shapes)},
    "dynamic_slice": lambda call: {"slice_sizes": call.result_shapes[0]},
}


# Operations that depend on where a block lies.


def _iota(call: LocalCall, operands: Sequence[Any]) -> list[Any]:
    dim = call.equation.params["dimension"]
    (shape,), axes = call.result_shapes, call.strategy.unreduced[0][dim]
    (numbers,) = call.bind(operands, shape=shape)
    return [call.blocks.position(axes, shape[dim], numbers, call.run) if axes else numbers]


def _reshape(call: LocalCall, operands: Sequence[Any]) -> list[Any]:
    """Reshapes a block, and keeps a device's part of what the operand has whole: sizes without common parts."""
    (value,), (shape,), spec = call.vertex.results, call.result_shapes, call.strategy.unreduced[0]
    before = axes_in(call.strategy.operands[0])
    sizes = call.blocks.shape(value.shape, tuple(tuple(a for a in axes if a in before) for axes in spec))
    (array,) = call.bind(operands, new_sizes=sizes)
    for dim, axes in enumerate(spec):
        if new_axes := [a for a in axes if a not in before]:
            (parts,) = parts_of((tuple(new_axes),), call.blocks.axis_sizes)
            padding = [(0, shape[dim] * parts - sizes[dim] if d == dim else 0) for d in range(array.ndim)]
            start = call.blocks.index(new_axes) * shape[dim]
            array = lax.dynamic_slice_in_dim(jnp.pad(array, padding), start, shape[dim], dim)
    return [array]


def _contraction(call: LocalCall, operands: Sequence[Any]) -> list[Any]:
    """Runs a product whose contracted dimensions may be padded: the padding counts 0 on both sides."""
    contracted, _ = call.equation.params["dimension_numbers"]
    return call.bind(unpadded(call, operands, contracted))


def ragged_contraction(numbers: lax.RaggedDotDimensionNumbers) -> bool:
    """Returns whether a ragged product contracts the rows of each group, so that its first dimension has the groups."""
    return set(numbers.lhs_ragged_dimensions) <= set(numbers.dot_dimension_numbers[0][0])


def _ragged_product(call: LocalCall, operands: Sequence[Any]) -> list[Any]:
    """Runs a product of groups of rows.

    A device that makes the matrices of some groups only, such as the weight gradients of its experts, rolls the rows
    until its own groups come first and gives the sizes of these alone, because rows beyond all groups count nothing.
    """
    numbers, spec = call.equation.params["ragged_dot_dimension_numbers"], call.strategy.unreduced[0]
    if not (ragged_contraction(numbers) and spec[0]):
        return call.bind(operands)
    (lhs, rhs, sizes), num_groups = operands, call.result_shapes[0][0]
    start = call.blocks.index(spec[0]) * num_groups
    own_sizes = lax.dynamic_slice_in_dim(sizes, start, num_groups)
    rows_before = jnp.sum(jnp.where(jnp.arange(sizes.shape[0]) < start, sizes, 0))
    (lhs_contracting, rhs_contracting), _ = numbers.dot_dimension_numbers
    (ragged,) = numbers.lhs_ragged_dimensions
    rhs_ragged = rhs_contracting[tuple(lhs_contracting).index(ragged)]
    return call.bind([jnp.roll(lhs, -rows_before, ragged), jnp.roll(rhs, -rows_before, rhs_ragged), own_sizes])


def _reduction(call: LocalCall, operands: Sequence[Any]) -> list[Any]:
    """Runs a reduction over dimensions that may be padded: the padding counts as what changes nothing."""
    neutral = _NEUTRAL[call.vertex.primitive](operands[0].dtype)
    axes = call.equation.params["axes"]
    return call.bind([call.blocks.mask(operands[0], call.operand_shape(0), call.strategy.operands[0], axes, neutral)])


def _least(dtype: Any) -> Any:
    if dtype == jnp.bool:
        return False
    return -jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


def _greatest(dtype: Any) -> Any:
    if dtype == jnp.bool:
        return True
    return jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).max


_NEUTRAL: dict[str, Callable[[Any], Any]] = {
    "reduce_sum": lambda dtype: 0,
    "reduce_max": _least,
    "reduce_min": _greatest,
    "reduce_or": lambda dtype: False,
    "reduce_and": lambda dtype: True,
}


def _gather(call: LocalCall, operands: Sequence[Any]) -> list[Any]:
    """Looks rows up. Of a table whose rows are split, a device gives those that it has and zeros for all others."""
    params, spec = call.equation.params, call.strategy.operands[0]
    numbers, (table, indices) = params["dimension_numbers"], operands
    windows = zip(params["slice_sizes"], call.operand_shape(0), table.shape, strict=True)
    sizes = tuple(of_block if size == whole else size for size, whole, of_block in windows)  # whole ones stay whole
    looked_up = [(k, d) for k, d in enumerate(numbers.start_index_map) if spec[d] and params["slice_sizes"][d] == 1]
    if not any(call.operand_shape(0)[d] > 1 for _, d in looked_up):
        return call.bind(operands, slice_sizes=sizes)
    has_row, in_table, local_indices = _rows_here(call, indices, table.shape, looked_up, params["mode"])
    (rows,) = call.bind(
        (table, local_indices), slice_sizes=sizes, mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS, fill_value=None
    )
    batch_dims = [d for d in range(rows.ndim) if d not in numbers.offset_dims]
    rows = jnp.where(lax.broadcast_in_dim(has_row, rows.shape, batch_dims), rows, jnp.zeros((), rows.dtype))
    if params["mode"] == lax.GatherScatterMode.FILL_OR_DROP:  # one of the devices adds what is for missing rows
        axes = [axis for _, d in looked_up for axis in spec[d]]
        missing = ~in_table & (call.blocks.index(axes) == 0)
        fill = jnp.asarray(_fill_value(params["fill_value"], rows.dtype), rows.dtype)
        rows = jnp.where(lax.broadcast_in_dim(missing, rows.shape, batch_dims), fill, rows)
    return [rows]


def _scatter(call: LocalCall, operands: Sequence[Any]) -> list[Any]:
    """Updates of rows. Where the rows are split, a device drops the updates of rows that it does not have.

    Where the updates are split, the results of several devices are summed, so that only the first counts the operand.
    """
    params, spec = call.equation.params, call.strategy.operands[0]
    numbers, (table, indices, updates) = params["dimension_numbers"], operands
    if summed_axes := [step.axis for step in call.strategy.reductions[0]]:
        table = jnp.where(call.blocks.index(sorted(summed_axes)) == 0, table, jnp.zeros((), table.dtype))
    rows = [
        (k, d)
        for k, d in enumerate(numbers.scatter_dims_to_operand_dims)
        if spec[d] and d in numbers.inserted_window_dims
    ]
    if not rows:
        return call.bind((table, indices, updates))
    has_row, _, local_indices = _rows_here(call, indices, table.shape, rows, params["mode"])
    for k, d in rows:
        local_indices = local_indices.at[..., k].set(jnp.where(has_row, local_indices[..., k], table.shape[d]))
    return call.bind((table, local_indices, updates), mode=lax.GatherScatterMode.FILL_OR_DROP)


def _rows_here(
    call: LocalCall, indices: Any, block_shape: Sequence[int], looked_up: Sequence[tuple[int, int]], mode: Any
) -> tuple[Any, Any, Any]:
    """Returns which indices are of rows of this block, which of the whole table, and gives those within the block."""
    has_row = in_table = jnp.ones(indices.shape[:-1], jnp.bool)
    for k, d in looked_up:
        index, size = indices[..., k], call.operand_shape(0)[d]
        if mode == lax.GatherScatterMode.CLIP:
            index = jnp.clip(index, 0, size - 1)
        local, is_here = call.blocks.local_position(call.strategy.operands[0][d], block_shape[d], index, call.run)
        in_table &= (index >= 0) & (index < size)
        has_row &= is_here
        indices = indices.at[..., k].set(jnp.clip(local, 0, block_shape[d] - 1))
    return has_row & in_table, in_table, indices


def _fill_value(given: Any, dtype: Any) -> Any:
    """Returns the value of `lax.gather` for indices that are out of bounds."""
    if given is not None:
        return given
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.nan
    return jnp.iinfo(dtype).min if jnp.issubdtype(dtype, jnp.signedinteger) else _greatest(dtype)


def _dynamic_update_slice(call: LocalCall, operands: Sequence[Any]) -> list[Any]:
    """Updates one row of a dimension that is split, on the device that has the row."""
    operand, update, *starts = operands
    spec, has_row = call.strategy.operands[0], jnp.bool(True)
    for d, axes in enumerate(spec):
        if axes and update.shape[d] != operand.shape[d]:
            start = jnp.clip(starts[d], 0, call.operand_shape(0)[d] - 1)
            local, is_here = call.blocks.local_position(axes, operand.shape[d], start, call.run)
            has_row &= is_here
            starts[d] = jnp.clip(local, 0, operand.shape[d] - 1)
    (result,) = call.bind((operand, update, *starts))
    return [jnp.where(has_row, result, operand)]


def _random_bits(call: LocalCall, operands: Sequence[Any]) -> list[Any]:
    (value,), (shape,), spec = call.vertex.results, call.result_shapes, call.strategy.unreduced[0]
    if not any(spec):
        return call.bind(operands)
    positions = [
        call.blocks.position(axes, n, jnp.arange(n, dtype=jnp.uint32), call.run)
        for axes, n in zip(spec, shape, strict=True)
    ]
    return [bits_of_block(operands[0], value.shape, shape, positions, call.equation.params["bit_width"])]


def _users_shard_map(call: LocalCall, operands: Sequence[Any]) -> list[Any]:
    """Runs the body of a user's own `shard_map`, which is written for blocks and names the mesh's axes."""
    if call.equation.params.get("check_vma"):
        raise ValueError(
            f'`executor` "program" cannot run a `jax.shard_map` with `check_vma=True` ({call.vertex.source}). '
            'Give it `check_vma=False`, or take `executor="constraints"`.'
        )
    return list(core.jaxpr_as_fun(core.ClosedJaxpr(call.equation.params["jaxpr"], ()))(*operands))


def _on_first_device(call: LocalCall, operands: Sequence[Any]) -> list[Any]:
    """Runs a callback that has no results, such as `jax.debug.print`, on the first device of the mesh only."""
    is_first = call.blocks.index(range(len(call.blocks.axis_sizes))) == 0
    lax.cond(is_first, lambda *arrays: (bind(call.equation, arrays), None)[1], lambda *arrays: None, *operands)
    return []


def _refused_callback(call: LocalCall, operands: Sequence[Any]) -> list[Any]:
    """Raises `ValueError` for a callback with effects and results, which every device would call."""
    del operands
    raise ValueError(
        f'`executor` "program" cannot run a `jax.experimental.io_callback` ({call.vertex.source}), which every device '
        'would call. Take `executor="constraints"`.'
    )


PLACED_OPERATIONS: dict[str, Callable[[LocalCall, Sequence[Any]], list[Any]]] = {
    "iota": _iota,
    "random_bits": _random_bits,
    "reshape": _reshape,
    "dot_general": _contraction,
    "ragged_dot_general": _ragged_product,
    **dict.fromkeys(_NEUTRAL, _reduction),
    "gather": _gather,
    "scatter-add": _scatter,
    "scatter": _scatter,
    "scatter-mul": _scatter,
    "scatter-min": _scatter,
    "scatter-max": _scatter,
    "dynamic_update_slice": _dynamic_update_slice,
    "sharding_constraint": lambda call, operands: list(operands),
    "shard_map": _users_shard_map,
    "io_callback": _refused_callback,
    "debug_callback": _on_first_device,
    "debug_print": _on_first_device,
}

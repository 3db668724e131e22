"""Which operations are replicated, computed whole on every device, although a strategy splits them.

They are those that have no form on blocks. An operation has a form on blocks if it is the same there as on whole arrays
(it is elementwise, or looks only along dimensions that a rule never splits), or if `local_operations.py` says what
becomes of it. Of all others the operands are gathered and the results sliced, and a plan names them.
"""

from collections.abc import Callable, Sequence
from math import prod

import jax.numpy as jnp

from search_spaces.sharding.base import ShardingStrategy
from search_spaces.sharding.custom_calls.operations import custom_call_of, refusal
from search_spaces.sharding.graph import Graph, Value, Vertex
from search_spaces.sharding.local_operations import PARAMETERS, PLACED_OPERATIONS, REDUCTIONS, ragged_contraction
from search_spaces.sharding.rules import RIGHT_SIDES
from search_spaces.sharding.spec import axes_in, parts_of

# fmt: off
_ELEMENTWISE = frozenset(
    ("abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e",
     "bessel_i1e", "bitcast_convert_type", "cbrt", "ceil", "clamp", "clz", "complex", "conj",
     "convert_element_type", "copy", "copy_p", "cos", "cosh", "device_put", "digamma", "div", "eq", "eq_to",
     "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "igamma", "igamma_grad_a", "igammac",
     "imag", "integer_pow", "is_finite", "le", "le_to", "lgamma", "log", "log1p", "log2", "logistic", "lt", "lt_to",
     "max", "min", "mul", "name", "ne", "neg", "nextafter", "not", "one_minus_square", "optimization_barrier", "or",
     "polygamma", "population_count", "pow", "random_gamma_grad", "real", "reduce_precision",
     "regularized_incomplete_beta", "rem", "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic",
     "shift_right_logical", "sign",
     "sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "threefry2x32", "xor", "zeta",
     "random_unwrap", "random_wrap", "random_fold_in")
)
# Same on blocks, because a rule never splits the dimensions that they look along.
_ALONG_WHOLE_DIMENSIONS = frozenset(
    ("approx_top_k", "argmax", "argmin", "concatenate", "cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum",
     "expand_dims", "fft",
     "reduce", "reduce_prod", "reduce_xor", "rev", "sort", "squeeze", "stack", "top_k", "transpose", "unstack",
     "cholesky", "eig", "eigh", "geqp3", "geqrf", "hessenberg", "householder_product", "lu", "lu_pivots_to_permutation",
     "qr", "schur", "svd", "symmetric_product", "tridiagonal")
)
# fmt: on


_SPLIT_ANYHOW = (
    _ELEMENTWISE | _ALONG_WHOLE_DIMENSIONS | PARAMETERS.keys() | PLACED_OPERATIONS.keys() | REDUCTIONS.keys()
)
"""The operations that have a form on blocks however they are split."""


def replicated_operations(
    graph: Graph, strategies: Sequence[ShardingStrategy], axis_sizes: tuple[int, ...]
) -> list[Vertex]:
    """Returns the operations that strategies split but that have no form on blocks."""
    return [v for v in graph.operations() if is_replicated(v, strategies[v.index], axis_sizes)]


def impossible_operations(graph: Graph) -> list[Vertex]:
    """Returns the operations that cannot run on blocks at all.

    These are users' own mappings that track over which axes values vary, and callbacks with effects and results, which
    every device would call.
    """
    return [v for v in graph.operations() if v.params.get("check_vma") or v.primitive == "io_callback"]


def is_replicated(vertex: Vertex, strategy: ShardingStrategy, axis_sizes: tuple[int, ...]) -> bool:
    """Returns whether an operation has no form on blocks with a strategy, and so runs whole on every device."""
    specs = (*strategy.operands, *strategy.unreduced)
    if not any(axes for spec in specs for axes in spec):
        return False
    name = vertex.primitive
    if custom_call_of(vertex) is not None:
        return refusal(vertex, strategy, axis_sizes) is not None
    if any(strategy.reductions) and name not in REDUCTIONS:
        return True
    if name in _CONDITIONS:
        return not _CONDITIONS[name](vertex, strategy, axis_sizes)
    return name not in _SPLIT_ANYHOW


# When an operation has a form on blocks.

_Condition = Callable[[Vertex, ShardingStrategy, tuple[int, ...]], bool]


def _windows_are_whole(vertex: Vertex, strategy: ShardingStrategy, axis_sizes: tuple[int, ...]) -> bool:
    """Returns whether no split dimension has a window or padding."""
    del axis_sizes
    params, spec = vertex.params, strategy.operands[0]
    windows = params.get("window_dimensions", (1,) * len(spec))
    padding = params.get("padding_config", params.get("padding", ((0, 0),) * len(spec)))
    return all(not axes or (w == 1 and not any(p)) for axes, w, p in zip(spec, windows, padding, strict=True))


def _groups_are_whole(vertex: Vertex, strategy: ShardingStrategy, axis_sizes: tuple[int, ...]) -> bool:
    """Returns whether each group of a convolution is on one device, or contracts the same part on each of some devices.

    The groups are the major part of the features of both operands (`feature_group_count`), or of the batch of the first
    and the features that the second makes (`batch_group_count`); there a block has some of the groups.
    """
    if not _is_even(vertex, strategy, axis_sizes):
        return False
    params, (image, kernel) = vertex.params, strategy.operands
    lhs, rhs, _ = params["dimension_numbers"]
    for grouped, count in ((lhs[1], params["feature_group_count"]), (lhs[0], params["batch_group_count"])):
        if count == 1:
            continue
        (parts,) = parts_of((image[grouped],), axis_sizes)
        if image[grouped] != kernel[rhs[0]] or count % parts:
            return False
    return params["feature_group_count"] == 1 or not kernel[rhs[1]]


def _groups_start_alike(vertex: Vertex, strategy: ShardingStrategy, axis_sizes: tuple[int, ...]) -> bool:
    """Returns whether a ragged product is even, and makes all groups or has one vector of their sizes for all rows."""
    numbers, sizes = vertex.params["ragged_dot_dimension_numbers"], strategy.operands[2]
    splits_groups = ragged_contraction(numbers) and any(strategy.unreduced[0][:1])
    return _is_even(vertex, strategy, axis_sizes) and (not splits_groups or len(sizes) == 1)


def _is_even(vertex: Vertex, strategy: ShardingStrategy, axis_sizes: tuple[int, ...]) -> bool:
    """Returns whether no block is padded."""
    arrays = (*vertex.operands, *vertex.results)
    return all(
        size % parts == 0
        for array, spec in zip(arrays, (*strategy.operands, *strategy.unreduced), strict=True)
        if isinstance(array, Value)
        for size, parts in zip(array.shape, parts_of(spec, axis_sizes), strict=True)
    )


def _gathers_rows(vertex: Vertex, strategy: ShardingStrategy, axis_sizes: tuple[int, ...]) -> bool:
    """Returns whether a table's split dimensions are looked up by row, taken whole, or go along with the indices."""
    del axis_sizes
    numbers, sizes = vertex.params["dimension_numbers"], vertex.params["slice_sizes"]
    shape, is_boolean = vertex.operands[0].shape, vertex.results[0].dtype == jnp.bool  # pyright: ignore[reportAttributeAccessIssue]
    if strategy.operands[1] and strategy.operands[1][-1]:
        return False
    for d, axes in enumerate(strategy.operands[0]):
        is_row = sizes[d] == 1 and d in numbers.start_index_map and d in numbers.collapsed_slice_dims
        is_taken_whole = sizes[d] == shape[d] and d not in numbers.start_index_map
        if axes and not (is_taken_whole or d in numbers.operand_batching_dims or (is_row and not is_boolean)):
            return False
    return True


def _scatters_rows(vertex: Vertex, strategy: ShardingStrategy, axis_sizes: tuple[int, ...]) -> bool:
    """Returns whether split dimensions are updated by row, as a whole, or go along with the indices."""
    del axis_sizes
    numbers = vertex.params["dimension_numbers"]
    if strategy.operands[1] and strategy.operands[1][-1]:
        return False
    for d, axes in enumerate(strategy.operands[0]):
        is_indexed = d in numbers.scatter_dims_to_operand_dims
        is_row = is_indexed and d in numbers.inserted_window_dims
        if axes and not (is_row or not is_indexed or d in numbers.operand_batching_dims):
            return False
    return vertex.primitive == "scatter-add" or not any(strategy.reductions)


def _counts_its_bits(vertex: Vertex, strategy: ShardingStrategy, axis_sizes: tuple[int, ...]) -> bool:
    """Returns whether random bits are those of threefry keys, and each has a counter below 2^32 of its own."""
    del strategy, axis_sizes
    assert vertex.equation is not None
    (key,), shape = vertex.operands, vertex.params["shape"]
    is_threefry = isinstance(key, Value) and str(key.dtype) == "key<fry>"
    return is_threefry and vertex.equation.ctx.threefry_partitionable and prod(shape) < 2**32


_CONDITIONS: dict[str, _Condition] = {
    **dict.fromkeys(
        ("pad", "reduce_window_max", "reduce_window_min", "reduce_window_sum", "select_and_scatter_add",
         "select_and_gather_add"),
        _windows_are_whole,
    ),
    "conv_general_dilated": _groups_are_whole,
    "ragged_dot_general": _groups_start_alike,
    "gather": _gathers_rows,
    "random_bits": _counts_its_bits,
    **dict.fromkeys(RIGHT_SIDES, _is_even),
    **dict.fromkeys(("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max"), _scatters_rows),
}  # fmt: skip


def is_partitioned_wrongly(vertex: Vertex, strategy: ShardingStrategy) -> bool:
    """Returns whether XLA's partitioner computes an operation wrongly with a strategy that it is told by constraints.

    Such a product contracts over several mesh axes. Some of them split a batch dimension of the result, which others
    split already, and some split nothing of the result.
    """
    if vertex.primitive != "dot_general":
        return False
    (contracted, _), (batch, _) = vertex.params["dimension_numbers"]
    (operand, *_), (before,), (after,) = strategy.operands, strategy.unreduced, strategy.results
    summed = axes_in(tuple(operand[d] for d in contracted))
    is_scattered = any(before[d] and summed & set(after[d]) for d in range(len(batch)))  # they come first in a result
    return is_scattered and not summed <= axes_in(after)


def wrongly_partitioned(graph: Graph, strategies: Sequence[ShardingStrategy]) -> list[Vertex]:
    """Returns the operations that XLA's partitioner computes wrongly with these strategies, one for each vertex."""
    return [v for v in graph.operations() if is_partitioned_wrongly(v, strategies[v.index])]

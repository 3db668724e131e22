"""Equations whose rule Shardy cannot tell: what they lower to is opaque, a loop, or priced wrongly as its parts."""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from search_spaces.sharding.base import Rule
from search_spaces.sharding.factors import Factors, Mark, rule_from_factors
from search_spaces.sharding.opaque.operations import OPAQUE, RIGHT_SIDES

# fmt: off
_HIGHER_ORDER = frozenset(
    ("pjit", "jit", "closed_call", "core_call", "eval_jaxpr", "custom_jvp_call", "custom_vjp_call",
     "custom_vjp_call_jaxpr", "checkpoint", "remat", "remat2", "scan", "while", "cond", "shard_map", "xla_pmap",
     "run_state", "custom_linear_solve", "custom_root", "custom_lin")
)
# Results equal in shape to operands that are handed through or computed entry by entry, though by a loop or a barrier.
_ELEMENTWISE = frozenset(
    ("igamma", "igammac", "igamma_grad_a", "random_gamma_grad", "regularized_incomplete_beta",
     "copy", "copy_p", "device_put", "name", "optimization_barrier", "sharding_constraint")
)
# Sharded along their axis these would be a window as wide as the array.
_CUMULATIVE = frozenset({"cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"})
# Batches of matrices: custom calls on CPU and GPU, partitionable along the batch, and some along right-hand sides.
_MATRICES = frozenset(
    ("cholesky", "cholesky_update", "triangular_solve", "lu", "qr", "geqrf", "geqp3", "householder_product", "ormqr",
     "svd", "eig", "eigh", "schur", "hessenberg", "symmetric_product", "tridiagonal")
)
_VECTORS = frozenset({"lu_pivots_to_permutation", "tridiagonal_solve"})
_SUMS = frozenset(
    ("dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated", "reduce_sum", "reduce_window_sum",
     "gather", "scatter-add", "scatter_add", "select_and_scatter_add", "select_and_gather_add")
)
# fmt: on


def shape_of(aval: Any) -> tuple[int, ...]:
    """Returns the shape of an abstract value; tokens and other values without one count as scalars."""
    return tuple(getattr(aval, "shape", ()))


def is_higher_order(equation: JaxprEqn) -> bool:
    """Returns whether an equation is a loop, call, conditional or custom derivative, whose insides the graph has."""
    return equation.primitive.name in _HIGHER_ORDER


def reduction_adds(equation: JaxprEqn) -> bool:
    """Returns whether partial results of an equation are to be added, so that they may be reduce-scattered.

    A gather from a sharded dimension counts: each device contributes the rows it holds and zeros elsewhere.
    """
    return equation.primitive.name in _SUMS


def exceptional_rule(equation: JaxprEqn) -> Rule | None:
    """Returns the rule of an equation for which Shardy has none or a wrong one; None for all others."""
    name = equation.primitive.name
    if name in OPAQUE:
        return OPAQUE[name].rule(equation)
    operands = [shape_of(v.aval) for v in equation.invars]
    results = [shape_of(v.aval) for v in equation.outvars]
    if name in _ELEMENTWISE:
        return _elementwise(operands, results)
    if name in _CUMULATIVE:
        rule = _elementwise(operands, results)
        axis = equation.params["axis"]
        return Rule(rule.operands, rule.results, rule.sizes, need_replication=frozenset(rule.operands[0][axis]))
    if name == "dynamic_update_slice":
        return _dynamic_update_slice(operands)
    if name == "ragged_dot_general":
        return _ragged_dot(operands, results, equation.params["ragged_dot_dimension_numbers"])
    if name in _MATRICES or name in _VECTORS:
        num_batch_dims = len(operands[0]) - (2 if name in _MATRICES else 1)
        return _batch_rule(operands, results, num_batch_dims, _right_sides(equation))
    return None


def _elementwise(operands: Sequence[tuple[int, ...]], results: Sequence[tuple[int, ...]]) -> Rule:
    """Returns a rule in which operand i has the factors of result i, or of the only result; scalars have none."""
    factors = Factors()
    result_dims = [[[factors.new(size)] for size in shape] for shape in results]
    operand_dims = []
    for index, shape in enumerate(operands):
        partner = index if len(results) == len(operands) else 0
        same = shape == results[partner]
        operand_dims.append(result_dims[partner] if same else [[factors.new(size)] for size in shape])
    return rule_from_factors(factors, operand_dims, result_dims)


def _dynamic_update_slice(operands: Sequence[tuple[int, ...]]) -> Rule:
    """Returns a rule that shards updated dimensions only where the update has size one (a row of a cache).

    Shardy allows more; XLA then gathers the operand.
    """
    factors = Factors()
    operand, update = operands[:2]
    marks = [
        Mark.NONE if part in (1, size) else Mark.NEED_REPLICATION for part, size in zip(update, operand, strict=True)
    ]
    dims = [[factors.new(size, mark)] for size, mark in zip(operand, marks, strict=True)]
    part_dims = [
        dim if part == size else [factors.new(part, Mark.NEED_REPLICATION)]
        for dim, part, size in zip(dims, update, operand, strict=True)
    ]
    scalars: list[list[list[int]]] = [[] for _ in operands[2:]]
    return rule_from_factors(factors, [dims, part_dims, *scalars], [dims])


def _ragged_dot(operands: Sequence[tuple[int, ...]], results: Sequence[tuple[int, ...]], numbers: Any) -> Rule:
    """Returns the rule of a product of each group's rows with a matrix of its own.

    The ragged dimension and the groups to choose from stay whole: on GPU XLA gathers them, and on TPU the operation is
    opaque. The result of a ragged contraction has one matrix for each group, which may be split. Sizes of groups are
    one vector for all, or one for each index of the dimensions before the ragged one, with which they are split.
    """
    factors = Factors()
    (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch) = numbers.dot_dimension_numbers
    lhs = [[factors.new(size)] for size in operands[0]]
    rhs = [[factors.new(size)] for size in operands[1]]
    for lhs_dim, rhs_dim in zip((*lhs_contracting, *lhs_batch), (*rhs_contracting, *rhs_batch), strict=True):
        rhs[rhs_dim] = lhs[lhs_dim]
    factors.mark([f for dim in lhs_contracting for f in lhs[dim]], Mark.REDUCTION)
    whole_factors = [lhs[dim] for dim in numbers.lhs_ragged_dimensions] + [
        rhs[dim] for dim in numbers.rhs_group_dimensions
    ]
    factors.mark([f for dim in whole_factors for f in dim], Mark.NEED_REPLICATION)
    free = [dim for i, dim in enumerate(lhs) if i not in (*lhs_contracting, *lhs_batch)]
    rhs_taken = (*rhs_contracting, *rhs_batch, *numbers.rhs_group_dimensions)
    free += [dim for i, dim in enumerate(rhs) if i not in rhs_taken]
    result = [lhs[dim] for dim in lhs_batch] + free
    groups = [[factors.new(size)] for size in results[0][: len(results[0]) - len(result)]]
    (ragged,), contracting, batch = numbers.lhs_ragged_dimensions, list(lhs_contracting), list(lhs_batch)
    rows = [dim for dim in range(len(lhs)) if dim not in (*contracting, *batch)]
    of_kind = next(dims for dims in (batch, contracting, rows) if ragged in dims)
    before = [*([] if of_kind is batch else batch), *of_kind[: of_kind.index(ragged)]]
    sizes = [lhs[dim] for dim in before[: len(operands[2]) - 1]]
    sizes.append([factors.new(operands[2][-1], Mark.NEED_REPLICATION)])
    return rule_from_factors(factors, [lhs, rhs, sizes], [groups + result], reduction_is_sum=True)


def _right_sides(equation: JaxprEqn) -> tuple[int, int] | None:
    """Returns the operand that has independent right-hand sides, and the dimension that counts them."""
    right_sides = RIGHT_SIDES.get(equation.primitive.name)
    if right_sides is None:
        return None
    operand, dim = right_sides(equation.params)
    return operand, len(shape_of(equation.invars[operand].aval)) + dim


def _batch_rule(
    operands: Sequence[tuple[int, ...]],
    results: Sequence[tuple[int, ...]],
    num_batch_dims: int,
    right_sides: tuple[int, int] | None,
) -> Rule:
    """Returns a rule in which all arrays share the leading dimensions, and all others need replication.

    Right-hand sides, a dimension of one operand and of the only result, may be split as well.
    """
    factors = Factors()
    batch = [[factors.new(size)] for size in operands[0][:num_batch_dims]]

    def dims(shape: tuple[int, ...]) -> list[list[int]]:
        leading = num_batch_dims if shape[:num_batch_dims] == operands[0][:num_batch_dims] else 0
        rest = [[factors.new(size, Mark.NEED_REPLICATION)] for size in shape[leading:]]
        return [*batch[:leading], *rest]

    operand_dims, result_dims = [dims(shape) for shape in operands], [dims(shape) for shape in results]
    if right_sides is not None:
        operand, dim = right_sides
        operand_dims[operand][dim] = result_dims[0][dim] = [factors.new(operands[operand][dim])]
    return rule_from_factors(factors, operand_dims, result_dims)

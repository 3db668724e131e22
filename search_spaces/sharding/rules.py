"""From dimensions that belong together to a `Rule`, and the rules of operations that Shardy lacks or has wrong.

Dimensions of several arrays that must be sharded alike share a factor. The factors are the elements of a union-find
whose elements can also be split into a major and a minor part, as reshapes need.

Rules are written here by hand where an operation lowers to a loop or a custom call, or is priced wrongly as its parts.
"""

import dataclasses
import enum
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from search_spaces.sharding.base import Rule


class Mark(enum.IntFlag):
    """A consequence of sharding a factor; marks of merged factors add up, parts of a split factor inherit them."""

    NONE = 0
    REDUCTION = enum.auto()
    NEED_REPLICATION = enum.auto()
    PERMUTATION = enum.auto()
    BLOCKED_PROPAGATION = enum.auto()


class Factors:
    """Sets of factors that must be sharded alike.

    A dimension is a sequence of factors, major to minor. Equating two dimensions that are written with different
    factors ([64] with [4, 16]) splits the larger factor wherever it occurs. Where no common refinement exists ([6, 4]
    with [4, 6]) the factors left over are marked `NEED_REPLICATION`.
    """

    def __init__(self) -> None:
        self._parent: list[int] = []
        self._parts: list[tuple[int, int] | None] = []
        self._size: list[int] = []
        self._mark: list[Mark] = []

    def new(self, size: int, mark: Mark = Mark.NONE) -> int:
        """Returns a factor that is equal to no other yet."""
        self._parent.append(len(self._parent))
        self._parts.append(None)
        self._size.append(size)
        self._mark.append(mark)
        return len(self._parent) - 1

    def size(self, leaf: int) -> int:
        """Returns the size of a factor given by `leaves`."""
        return self._size[leaf]

    def mark_of(self, leaf: int) -> Mark:
        """Returns the marks of a factor given by `leaves`."""
        return self._mark[leaf]

    def leaves(self, factors: Iterable[int]) -> list[int]:
        """Returns the unsplit representatives of a sequence of factors, major to minor."""
        unsplit: list[int] = []
        for factor in factors:
            root = self._find(factor)
            parts = self._parts[root]
            if parts is None:
                unsplit.append(root)
            else:
                unsplit.extend(self.leaves(parts))
        return unsplit

    def mark(self, factors: Iterable[int], mark: Mark) -> None:
        """Adds marks to all factors of a sequence."""
        for leaf in self.leaves(factors):
            self._mark[leaf] |= mark

    def equate(self, one: Sequence[int], other: Sequence[int]) -> None:
        """Makes two sequences of factors describe the same dimension.

        Single factors of different sizes are equated too: an operation that slices, pads or concatenates has one factor
        for dimensions of several sizes. The larger size is kept.
        """
        a, b = self.leaves(one), self.leaves(other)
        if len(a) == len(b) == 1:
            self._union(a[0], b[0])
            return
        a = [leaf for leaf in a if self._size[leaf] != 1]
        b = [leaf for leaf in b if self._size[leaf] != 1]
        if math.prod(self._size[leaf] for leaf in a) != math.prod(self._size[leaf] for leaf in b):
            self.mark([*a, *b], Mark.NEED_REPLICATION)
            return
        while a and b:
            x, y = self._pop_minor(a), self._pop_minor(b)
            size_x, size_y = self._size[x], self._size[y]
            if size_x == size_y:
                self._union(x, y)
            elif size_x % size_y == 0:
                major, minor = self._split_leaf(x, size_y)
                self._union(minor, y)
                a.append(major)
            elif size_y % size_x == 0:
                major, minor = self._split_leaf(y, size_x)
                self._union(x, minor)
                b.append(major)
            else:
                self.mark([*a, *b, x, y], Mark.NEED_REPLICATION)
                return

    def _find(self, factor: int) -> int:
        while self._parent[factor] != factor:
            self._parent[factor] = self._parent[self._parent[factor]]
            factor = self._parent[factor]
        return factor

    def _pop_minor(self, factors: list[int]) -> int:
        # Equating an earlier part may have split this factor in the meantime.
        *rest, minor = self.leaves([factors.pop()])
        factors.extend(rest)
        return minor

    def _union(self, x: int, y: int) -> None:
        if x == y:
            return
        self._parent[y] = x
        self._size[x] = max(self._size[x], self._size[y])
        self._mark[x] |= self._mark[y]

    def _split_leaf(self, leaf: int, minor_size: int) -> tuple[int, int]:
        major = self.new(self._size[leaf] // minor_size, self._mark[leaf])
        minor = self.new(minor_size, self._mark[leaf])
        self._parts[leaf] = (major, minor)
        return major, minor


def rule_from_factors(
    factors: Factors,
    operands: Sequence[Sequence[Sequence[int]]],
    results: Sequence[Sequence[Sequence[int]]],
    *,
    reduction_is_sum: bool = False,
) -> Rule:
    """Numbers the factors that operands and results mention, in order of appearance, and collects their marks.

    A factor that occurs twice in one array cannot be sharded, nor can one that operands have and no result, unless it
    is reduced: a reshape whose sizes have no common parts has such factors, and their data goes to other devices.
    """
    leaves = [[factors.leaves(dimension) for dimension in array] for array in [*operands, *results]]
    remaining = {leaf for array in leaves[len(operands) :] for dim in array for leaf in dim}
    for array in leaves[: len(operands)]:
        missing = [leaf for dim in array for leaf in dim if leaf not in remaining]
        factors.mark([leaf for leaf in missing if Mark.REDUCTION not in factors.mark_of(leaf)], Mark.NEED_REPLICATION)
    for array in leaves:
        twice = [leaf for leaf, count in Counter(leaf for dim in array for leaf in dim).items() if count > 1]
        factors.mark(twice, Mark.NEED_REPLICATION)
    index: dict[int, int] = {}
    for array in leaves:
        for dimension in array:
            for leaf in dimension:
                index.setdefault(leaf, len(index))
    arrays = [tuple(tuple(index[leaf] for leaf in dim) for dim in array) for array in leaves]

    def factors_marked(mark: Mark) -> frozenset[int]:
        return frozenset(number for leaf, number in index.items() if mark in factors.mark_of(leaf))

    need_replication = factors_marked(Mark.NEED_REPLICATION)
    return Rule(
        operands=tuple(arrays[: len(operands)]),
        results=tuple(arrays[len(operands) :]),
        sizes=tuple(factors.size(leaf) for leaf in index),
        reduction=factors_marked(Mark.REDUCTION) - need_replication,
        need_replication=need_replication,
        permutation=factors_marked(Mark.PERMUTATION) - need_replication,
        blocked_propagation=factors_marked(Mark.BLOCKED_PROPAGATION),
        reduction_is_sum=reduction_is_sum,
    )


def with_window_halos(equation: JaxprEqn, rule: Rule) -> Rule:
    """Returns the rule of a convolution with its window's dimensions marked as moving data between neighbours.

    Shardy calls the window of a kernel's gradient a plain reduction, but neighbours' borders enter it (measured: XLA
    exchanges them by permutes). Dimensions without overlap stay as they are.
    """
    if equation.primitive.name != "conv_general_dilated":
        return rule
    p = equation.params
    numbers = p["dimension_numbers"]
    permutation = set(rule.permutation)
    for d, (i, k, o) in enumerate(zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True)):
        window, image = (math.prod(rule.sizes[f] for f in dims) for dims in (rule.operands[1][k], rule.operands[0][i]))
        is_dense = p["window_strides"][d] == p["lhs_dilation"][d] == p["rhs_dilation"][d] == 1 and not any(
            p["padding"][d]
        )
        if not (is_dense and window in (1, image)):
            permutation.update(
                f for dims in (rule.operands[0][i], rule.operands[1][k], rule.results[0][o]) for f in dims
            )
    return dataclasses.replace(rule, permutation=frozenset(permutation), reduction=rule.reduction - permutation)


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


RIGHT_SIDES: Mapping[str, Callable[[Mapping[str, Any]], tuple[int, int]]] = {
    "triangular_solve": lambda params: (1, -1 if params["left_side"] else -2),
    "tridiagonal_solve": lambda params: (3, -1),
    "ormqr": lambda params: (2, -1 if params["left"] else -2),
}
"""For each primitive that solves linear equations, which operand has right-hand sides, along which dimension.

Each is computed by itself, and the only result has them likewise. The matrix is whole on every device, and the
right-hand sides may be divided: XLA's partitioner gathers them, so that every executor runs each device's own part.
"""


def shapes_of(variables: Sequence[Any]) -> list[tuple[int, ...]]:
    """Returns the shapes of variables; tokens and others without one count as scalars."""
    return [tuple(getattr(v.aval, "shape", ())) for v in variables]


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
    operands, results = shapes_of(equation.invars), shapes_of(equation.outvars)
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
        right_sides = RIGHT_SIDES[name](equation.params) if name in RIGHT_SIDES else None
        return _batch_rule(operands, results, num_batch_dims, right_sides)
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
    a custom call. The result of a ragged contraction has one matrix for each group, which may be split. Sizes of
    groups are one vector for all, or one for each index of the dimensions before the ragged one, with which they are
    split.
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

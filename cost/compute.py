"""The work of one jaxpr equation, and its seconds by roofline.

A device does arithmetic and moves memory at the same time, so work takes as long as the slower of the two.

Source of the operations of dense linear algebra: Golub and Van Loan, "Matrix Computations" (4th edition, 2013).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from jax.extend import core
from numpy.typing import ArrayLike

from cost.base import AttentionWork, CostModel, Hardware, Work
from cost.pallas import pallas_flops


def _shape(variable: Any) -> tuple[int, ...]:
    return tuple(variable.aval.shape)


def _factorisation(cubic: float) -> Callable[[core.JaxprEqn], float]:
    """Counts dense linear algebra on `[..., m, n]`: `cubic` times m·n·min(m, n), by Golub and Van Loan."""

    def flops(equation: core.JaxprEqn) -> float:
        *batch, m, n = _shape(equation.invars[0])
        return cubic * math.prod(batch) * m * n * min(m, n)

    return flops


def _triangular_solve(equation: core.JaxprEqn) -> float:
    a, b = map(_shape, equation.invars[:2])
    return float(math.prod(b) * a[-1])


def _symmetric_product(equation: core.JaxprEqn) -> float:
    """Counts one triangle of the product of a matrix and its transpose."""
    *batch, n, k = _shape(equation.invars[0])
    return float(math.prod(batch) * n * n * k)


def _reflections(equation: core.JaxprEqn) -> float:
    """Counts the Householder reflections of a factorisation `[..., m, k]`, applied to a matrix."""
    a, _, c = map(_shape, equation.invars[:3])
    return 4.0 * math.prod(c) * a[-1]


def _tridiagonal_solve(equation: core.JaxprEqn) -> float:
    """Counts Thomas's algorithm: 3 operations for each row, 5 for each entry of the right-hand sides."""
    return 3.0 * math.prod(_shape(equation.invars[1])) + 5.0 * math.prod(_shape(equation.invars[3]))


FLOPS_OF_LINEAR_ALGEBRA: Mapping[str, Callable[[core.JaxprEqn], float]] = {
    "cholesky": _factorisation(1 / 3),
    "lu": _factorisation(2 / 3),
    "geqrf": _factorisation(4 / 3),
    "householder_product": _factorisation(4 / 3),
    "qr": _factorisation(8 / 3),
    "geqp3": _factorisation(4 / 3),
    "tridiagonal": _factorisation(4 / 3),
    "hessenberg": _factorisation(10 / 3),
    "eigh": _factorisation(9.0),
    "eig": _factorisation(25.0),
    "schur": _factorisation(25.0),
    "svd": _factorisation(14.0),
    "triangular_solve": _triangular_solve,
    "symmetric_product": _symmetric_product,
    "ormqr": _reflections,
    "tridiagonal_solve": _tridiagonal_solve,
}
"""By the names of primitives."""


CONTRACTIONS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})
"""Products of matrices and convolutions: the operations that a step spends its arithmetic on."""
# Operations on one element of the result, where it isn't one: near what was measured on XLA's CPU backend as time in
# cache relative to an addition (python -m experiments.calibration: div 1.6, sqrt 2.1, logistic 6.3, exp 7.6, erf 3.9,
# log 21, tanh 29, sin 86, pow 121, lgamma 184), lower where GPUs have special function units for it, which run at a
# sixteenth to a quarter of the rate: CUDA C++ Programming Guide, "Arithmetic Instructions".
_PER_ELEMENT = {
    **dict.fromkeys(("div", "sqrt", "rsqrt", "rem", "cbrt"), 2.0),
    **dict.fromkeys(("exp", "exp2", "logistic", "erf", "erfc"), 8.0),
    **dict.fromkeys(("log", "log1p", "expm1", "tanh", "erf_inv"), 16.0),
    **dict.fromkeys(("sin", "cos", "tan", "pow", "asin", "acos", "atan", "atan2", "sinh", "cosh"), 40.0),
    **dict.fromkeys(("asinh", "acosh", "atanh"), 40.0),
    **dict.fromkeys(("lgamma", "digamma", "bessel_i0e", "bessel_i1e"), 100.0),
    # Threefry-2x32: 20 rounds of add, rotate, exclusive-or make two words of 32 bits.
    # Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (2011), section 4.2.
    **dict.fromkeys(("threefry2x32", "random_bits", "rng_bit_generator"), 55.0),
    "integer_pow": 2.0,
}

# Only move data, or are done by the compiler.
_MOVES = frozenset(
    (
        "broadcast_in_dim",
        "bitcast_convert_type",
        "concatenate",
        "convert_element_type",
        "copy",
        "copy_p",
        "device_put",
        "dynamic_slice",
        "dynamic_update_slice",
        "expand_dims",
        "gather",
        "iota",
        "name",
        "optimization_barrier",
        "pad",
        "random_wrap",
        "random_unwrap",
        "random_seed",
        "reduce_precision",
        "reshape",
        "rev",
        "scatter",
        "select_n",
        "sharding_constraint",
        "slice",
        "split",
        "squeeze",
        "stop_gradient",
        "transpose",
        "create_token",
        "pvary",
        "mesh_cast",
        "reshard",
        "get",  # of a block in memory, inside of a Pallas call
        "swap",
        "addupdate",
        "masked_load",
        "masked_swap",
        "broadcast_to",
        "program_id",
        "num_programs",
        "multiple_of",
    )
)
_REDUCTIONS = ("reduce_", "argmax", "argmin", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")


def roofline_s(flops: ArrayLike, num_bytes: ArrayLike, dtype: str, hardware: Hardware) -> np.ndarray:
    """Computes the seconds of work that overlaps arithmetic and memory traffic: the slower of both.

    Work and bytes broadcast against each other. Rates are those that large products reach; small or narrow ones reach
    less, which is not modelled.

    Source: Williams, Waterman, Patterson, "Roofline" (2009).
    """
    arithmetic_s = np.asarray(flops, np.float64) / hardware.reached_flops_per_s(dtype)
    traffic_s = np.asarray(num_bytes, np.float64) / hardware.reached_memory_bytes_per_s
    return np.maximum(arithmetic_s, traffic_s)


def work_s(work: Work | AttentionWork, hardware: Hardware) -> float:
    """Computes the seconds of one kernel, its launch included: fused attention as measured, all else by roofline.

    Attention is priced by a law for 16-bit numbers (`cost.measured_rates`), where the hardware has one.
    """
    rate = hardware.measured.attention
    if isinstance(work, AttentionWork) and rate is not None and work.dtype in ("bfloat16", "float16"):
        seconds = rate.seconds(work.flops, work.num_bytes, work.queries, work.is_forward)
        return hardware.kernel_launch_s + float(seconds)
    return hardware.kernel_launch_s + float(roofline_s(work.flops, work.num_bytes, work.dtype, hardware))


def product_s(equation: core.JaxprEqn, shapes: Sequence[Sequence[int]], hardware: Hardware) -> float | None:
    """Computes the seconds of a product of matrices of these shapes by what was measured of products in its dtype.

    Args:
      equation: of the product on whole arrays.
      shapes: of the two operands on one device.
      hardware: with `Hardware.measured`.

    Returns:
      Seconds, or None where the equation is no product of matrices, or nothing was measured in its dtype.
    """
    rate = hardware.measured.products.get(equation_dtype(equation))
    if equation.primitive.name != "dot_general" or rate is None:
        return None
    (lhs_contracting, _), (lhs_batch, rhs_batch) = equation.params["dimension_numbers"]
    lhs, rhs = shapes
    batch = math.prod(lhs[d] for d in lhs_batch)
    depth = math.prod(lhs[d] for d in lhs_contracting)
    rows = math.prod(lhs) / max(1, batch * depth)
    columns = math.prod(rhs) / max(1, math.prod(rhs[d] for d in rhs_batch) * depth)
    itemsize = _aval(equation.outvars[0]).dtype.itemsize
    num_bytes = itemsize * batch * (rows * depth + depth * columns + rows * columns)
    return rate.launch_s + float(rate.seconds(batch, rows, columns, depth, num_bytes))


def equation_work(equation: core.JaxprEqn) -> Work:
    """Counts the operations and bytes of one equation; regions count what is inside them."""
    arrays = [_aval(v) for v in (*equation.invars, *equation.outvars) if hasattr(v.aval, "shape")]
    num_bytes = sum(_size(aval) * getattr(aval.dtype, "itemsize", 4) for aval in arrays)
    return Work(equation_flops(equation), float(num_bytes), equation_dtype(equation))


def equation_dtype(equation: core.JaxprEqn) -> str:
    """Returns the dtype in which an equation computes: of contractions that of the operands, else of the first result.

    A product of two bfloat16 arrays that accumulates in float32 runs at the rate of bfloat16.
    """
    if equation.primitive.name in CONTRACTIONS:
        dtypes = [_aval(v).dtype for v in equation.invars[:2]]
        return str(max(dtypes, key=lambda dtype: dtype.itemsize))
    for var in equation.outvars:
        if hasattr(var.aval, "dtype"):
            return str(_aval(var).dtype)
    return "float32"


def equation_flops(equation: core.JaxprEqn) -> float:
    """Counts the arithmetic operations of one equation on whole arrays; a multiply-add counts as two.

    Elementwise functions count by what they take relative to an addition. Data movement counts nothing. A scan counts
    its body times its length, a while loop its body once (its trip count is unknown), a branch its most expensive side.
    """
    name = equation.primitive.name
    if name in _MOVES:
        return 0.0
    if name in _SPECIAL:
        return float(_SPECIAL[name](equation))
    bodies = inner_jaxprs(equation)
    if bodies and not name.startswith(("scatter", "reduce", "sort", "custom_lin")):
        return sum(jaxpr_flops(body) for body in bodies)
    if not equation.outvars:
        return 0.0
    if name.startswith(_REDUCTIONS):
        return float(sum(_size(v.aval) for v in equation.invars))
    if name.startswith("scatter"):
        return float(_size(_aval(equation.invars[-1])))
    return float(max(_size(v.aval) for v in equation.outvars)) * _PER_ELEMENT.get(name, 1.0)


def jaxpr_flops(jaxpr: core.Jaxpr | core.ClosedJaxpr) -> float:
    """Counts the arithmetic operations of all equations of a jaxpr."""
    equations = jaxpr.jaxpr.eqns if isinstance(jaxpr, core.ClosedJaxpr) else jaxpr.eqns
    return sum(equation_flops(equation) for equation in equations)


def _aval(var: Any) -> Any:
    return var.aval  # an abstract array; JAX types it as something with neither shape nor dtype


def _size(aval: Any) -> int:
    return math.prod(getattr(aval, "shape", ()))


def inner_jaxprs(equation: core.JaxprEqn) -> list[core.Jaxpr | core.ClosedJaxpr]:
    """Returns the jaxprs among the parameters of an equation."""
    return [jaxpr for value in equation.params.values() for jaxpr in _jaxprs(value)]


def _jaxprs(value: Any) -> list[core.Jaxpr | core.ClosedJaxpr]:
    if isinstance(value, (core.Jaxpr, core.ClosedJaxpr)):
        return [value]
    return [j for v in value for j in _jaxprs(v)] if isinstance(value, (tuple, list)) else []


def _dot(equation: core.JaxprEqn) -> float:
    (lhs_contracting, _), _ = equation.params["dimension_numbers"]
    lhs = _aval(equation.invars[0]).shape
    return 2.0 * _size(_aval(equation.outvars[0])) * math.prod(lhs[d] for d in lhs_contracting)


def _ragged_dot(equation: core.JaxprEqn) -> float:
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (lhs_contracting, _), _ = numbers.dot_dimension_numbers
    lhs, _, groups = (_aval(v) for v in equation.invars[:3])
    size = _size(_aval(equation.outvars[0]))
    # Each row meets one group only. If rows are what is summed, the result has a slice for each group and each slice
    # sums its own rows only.
    if any(d in lhs_contracting for d in numbers.lhs_ragged_dimensions):
        size //= max(1, groups.shape[-1])
    return 2.0 * size * math.prod(lhs.shape[d] for d in lhs_contracting)


def _convolution(equation: core.JaxprEqn) -> float:
    """Counts pairs of an output position and a kernel tap that meet an element, not padding or a dilation's hole."""
    p = equation.params
    numbers = p["dimension_numbers"]
    lhs, rhs, out = (_aval(v).shape for v in (*equation.invars[:2], equation.outvars[0]))
    pairs = 1.0
    for d, (i, k, o) in enumerate(zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True)):
        position = np.arange(out[o])[:, None] * p["window_strides"][d] - p["padding"][d][0]
        position = position + np.arange(rhs[k])[None] * p["rhs_dilation"][d]
        dilation = p["lhs_dilation"][d]
        inside = (position >= 0) & (position <= (lhs[i] - 1) * dilation) & (position % dilation == 0)
        pairs *= np.count_nonzero(inside)
    out_batch, out_features = out[numbers.out_spec[0]], out[numbers.out_spec[1]]
    return 2.0 * out_batch * out_features * rhs[numbers.rhs_spec[1]] * pairs


def _window(equation: core.JaxprEqn) -> float:
    window = math.prod(equation.params["window_dimensions"])
    if equation.primitive.name.startswith("select_and_scatter"):
        return float(_size(_aval(equation.invars[0])) * window)
    return float(_size(_aval(equation.outvars[0])) * window)


def _sort(equation: core.JaxprEqn) -> float:
    shape = _aval(equation.invars[0]).shape
    length = shape[equation.params["dimension"]] if shape else 1
    return math.prod(shape) * max(1.0, math.log2(max(length, 1)))


def _top_k(equation: core.JaxprEqn) -> float:
    return _size(_aval(equation.invars[0])) * max(1.0, math.log2(equation.params["k"] + 1))


def _fft(equation: core.JaxprEqn) -> float:
    lengths = equation.params["fft_lengths"]
    before, after = _aval(equation.invars[0]), _aval(equation.outvars[0])
    real = 0.5 if before.dtype != after.dtype else 1.0  # one side is real: half the work
    return 5.0 * real * max(_size(before), _size(after)) * math.log2(max(math.prod(lengths), 2))


def _scan(equation: core.JaxprEqn) -> float:
    return equation.params["length"] * jaxpr_flops(equation.params["jaxpr"])


def _while(equation: core.JaxprEqn) -> float:
    return jaxpr_flops(equation.params["body_jaxpr"]) + jaxpr_flops(equation.params["cond_jaxpr"])


def _branch(equation: core.JaxprEqn) -> float:
    return max(jaxpr_flops(branch) for branch in equation.params["branches"])


def _call_of_rule(equation: core.JaxprEqn) -> float:
    """Counts the function that runs; its custom derivative rule does not run."""
    body = equation.params.get("call_jaxpr", equation.params.get("fun_jaxpr"))
    return jaxpr_flops(body) if body is not None else 0.0


def _shard_map(equation: core.JaxprEqn) -> float:
    """Counts one device's body times the devices of the manual axes, which JAX versions name differently."""
    mesh = equation.params["mesh"]
    manual = equation.params.get("newly_manual_axes", equation.params.get("manual_axes", mesh.axis_names))
    return jaxpr_flops(equation.params["jaxpr"]) * math.prod(mesh.shape[axis] for axis in manual)


def _kernel(equation: core.JaxprEqn) -> float:
    """Asks a kernel of `diffshard.kernel`, which knows its own price."""
    return equation.params["kernel"].work([v.aval for v in equation.invars]).flops


_SPECIAL: dict[str, Callable[[core.JaxprEqn], float]] = {
    "dot_general": _dot,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _convolution,
    "reduce_window": _window,
    "reduce_window_sum": _window,
    "reduce_window_max": _window,
    "reduce_window_min": _window,
    "select_and_scatter_add": _window,
    "select_and_gather_add": _window,
    "sort": _sort,
    "top_k": _top_k,
    "approx_top_k": _top_k,
    "fft": _fft,
    **FLOPS_OF_LINEAR_ALGEBRA,
    "scan": _scan,
    "while": _while,
    "cond": _branch,
    "custom_jvp_call": _call_of_rule,
    "custom_vjp_call": _call_of_rule,
    "shard_map": _shard_map,
    "pallas_call": lambda equation: pallas_flops(equation, equation_flops),
    "kernel": _kernel,
}


def _in_dtypes(dtypes: tuple[str, ...], flops_per_byte: float) -> tuple[CostModel, ...]:
    """Makes a model of work in each dtype; its size is in bytes."""
    return tuple(partial(_of_intensity, dtype=dtype, flops_per_byte=flops_per_byte) for dtype in dtypes)


def _of_intensity(size: ArrayLike, hardware: Hardware, *, dtype: str, flops_per_byte: float) -> np.ndarray:
    return roofline_s(flops_per_byte * np.asarray(size), size, dtype, hardware)


EXAMPLE = partial(_in_dtypes, ("float32", "bfloat16"), flops_per_byte=10.0)

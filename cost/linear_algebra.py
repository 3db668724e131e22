"""Floating-point operations of JAX's dense linear algebra (`jax.lax.linalg`).

Source: Golub and Van Loan, "Matrix Computations" (4th edition, 2013).
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from jax.extend import core


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

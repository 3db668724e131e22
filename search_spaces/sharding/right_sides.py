"""Solutions of linear equations for several right-hand sides, each of which is computed by itself.

The matrix of such an operation is whole on every device, and the right-hand sides may be divided among devices. XLA's
partitioner gathers them, so that every executor runs the operation on each device's own part.
"""

from collections.abc import Callable, Mapping
from typing import Any

RIGHT_SIDES: Mapping[str, Callable[[Mapping[str, Any]], tuple[int, int]]] = {
    "triangular_solve": lambda params: (1, -1 if params["left_side"] else -2),
    "tridiagonal_solve": lambda params: (3, -1),
    "ormqr": lambda params: (2, -1 if params["left"] else -2),
}
"""For each primitive, which operand has right-hand sides, along which dimension; the only result has them likewise."""

"""What an opaque operation does, as far as a trace of it tells: arithmetic, memory traffic, the type it computes in."""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend import core

from cost.base import Work
from cost.compute import inner_jaxprs, jaxpr_flops
from search_spaces.partition_specs import IndexedSpec


def arrays_bytes(arrays: Sequence[Any]) -> float:
    """Returns the bytes of arrays with a shape and a dtype."""
    return float(sum(prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in arrays if hasattr(x, "shape")))


def dtype_of_work(operands: Sequence[Any]) -> str:
    """Returns the type that a kernel computes in: that of its largest operand of floating type, or the first one's."""
    numbers = [x for x in operands if jnp.issubdtype(x.dtype, jnp.inexact)] or list(operands)[:1]
    return str(max(numbers, key=lambda x: prod(x.shape)).dtype) if numbers else "float32"


def traced_work(jaxpr: core.ClosedJaxpr) -> Work:
    """Returns what a function does that runs as one kernel.

    It reads its operands and writes its results. Where it holds calls that estimate their own traffic, as Pallas calls
    may, what these say counts if it is more.
    """
    variables = (*jaxpr.jaxpr.invars, *jaxpr.jaxpr.outvars)
    own_bytes = arrays_bytes([v.aval for v in variables])
    estimated_bytes = sum(estimates(jaxpr.jaxpr))
    operands = [v.aval for v in jaxpr.jaxpr.invars]
    return Work(jaxpr_flops(jaxpr), max(own_bytes, estimated_bytes), dtype_of_work(operands))


def estimates(jaxpr: core.Jaxpr) -> Iterator[float]:
    """Yields the bytes that calls in a jaxpr say they move, those inside other calls included."""
    for equation in jaxpr.eqns:
        estimate = equation.params.get("cost_estimate")
        if estimate is not None:
            yield float(estimate.bytes_accessed)
        elif equation.primitive.name != "pallas_call":
            for inner in inner_jaxprs(equation):
                yield from estimates(inner.jaxpr if isinstance(inner, core.ClosedJaxpr) else inner)


class Parts(NamedTuple):
    """How the arrays of an opaque operation are split over a mesh."""

    operands: tuple[IndexedSpec, ...]
    results: tuple[IndexedSpec, ...]
    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]

    @property
    def is_split(self) -> bool:
        """Whether any array is split."""
        return any(axes for spec in (*self.operands, *self.results) for axes in spec)


PALLAS_TARGETS = ("__gpu$xla.gpu.triton", "mosaic_gpu_v2")
"""Pallas calls, by Triton and by Mosaic."""
CUDNN_TARGETS = tuple(
    f"__cudnn$fmha{bias}Softmax{dropout}{backward}"
    for bias in ("", "ScaleBias")
    for dropout in ("", "Dropout")
    for backward in ("", "Backward")
)
"""cuDNN's attention."""
CUSTOM_CALL_TARGETS = (*PALLAS_TARGETS, *CUDNN_TARGETS)
"""All of them."""

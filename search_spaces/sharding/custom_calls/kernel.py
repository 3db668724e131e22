"""`diffshard.kernel`: a function as one operation with a sharding rule, a price and a backward of its own.

A kernel is a JAX primitive with the function as its parameter. Bound to whole arrays it stands for the whole work,
bound to one device's parts for that device's, so the same equation is traced, planned and run; without a plan it lowers
to what the function lowers to. Its backward is another kernel.

How arrays of any custom call are split, and what a trace tells of its work, stands here as well.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite, prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import ShapedArray, Tracer
from jax.extend import core
from jax.interpreters import batching, mlir

from cost.base import Work
from cost.compute import inner_jaxprs, jaxpr_flops
from cost.real_numbers import real_number
from search_spaces.partition_specs import IndexedSpec
from search_spaces.sharding.custom_calls.notation import NamedRule


class Parts(NamedTuple):
    """How the arrays of a custom call are split over a mesh."""

    operands: tuple[IndexedSpec, ...]
    results: tuple[IndexedSpec, ...]
    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]

    @property
    def is_split(self) -> bool:
        """Whether any array is split."""
        return any(axes for spec in (*self.operands, *self.results) for axes in spec)


def arrays_bytes(arrays: Sequence[Any]) -> float:
    """Returns the bytes of arrays with a shape and a dtype."""
    return float(sum(prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in arrays if hasattr(x, "shape")))


def dtype_of_work(operands: Sequence[Any]) -> str:
    """Returns the type that a kernel computes in: that of its largest operand of floating type, or the first one's."""
    numbers = [x for x in operands if jnp.issubdtype(x.dtype, jnp.inexact)] or list(operands)[:1]
    return str(max(numbers, key=lambda x: prod(x.shape)).dtype) if numbers else "float32"


def traced_work(jaxpr: core.ClosedJaxpr) -> Work:
    """Returns the work of a function that runs as one kernel.

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


Price = float | Callable[..., float]
"""A number for whole arrays, or a function of the operands of one device, as `jax.ShapeDtypeStruct`s."""


def checked_price(price: Any, subject: str, kinds: str = "a number") -> float:
    """Returns a price as a float."""
    number = real_number(price)
    if number is None:
        raise TypeError(f"{subject} must be {kinds}, not {price!r}.")
    if not isfinite(number) or number < 0:
        raise ValueError(f"{subject} must be finite and not negative, not {number!r}.")
    return number


kernel_p = core.Primitive("kernel")
kernel_p.multiple_results = True
_TYPE_OPTIONS = (
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_enable_custom_prng",
    "jax_threefry_partitionable",
)
"""JAX's options by which the same function gives other types or another jaxpr, or is refused."""


class TracedKernel(NamedTuple):
    """A kernel's function traced for operands of some shapes: its jaxpr, and whether it returns a single array."""

    jaxpr: core.ClosedJaxpr
    returns_one: bool


@dataclass(frozen=True)
class Kernel:
    """A function of arrays that no compiler sees into, with all that a plan must know of it.

    Attributes:
      fn: the function; it is traced for whole arrays and for one device's parts.
      rule: how the dimensions of its operands and results relate.
      flops: arithmetic operations, or None for those that a trace of `fn` counts.
      num_bytes: memory traffic, or None for what a trace of `fn` says.

    Traces, and the kernels that JAX's transformations make of it, are kept for as long as the kernel is. What its
    function holds, such as arrays of a closure, is freed with it.
    """

    fn: Callable[..., Any]
    rule: NamedRule
    flops: Price | None
    num_bytes: Price | None
    name: str
    _traces: dict[Hashable, TracedKernel] = field(default_factory=dict, init=False, repr=False, compare=False)
    _derived: "dict[Hashable, Kernel]" = field(default_factory=dict, init=False, repr=False, compare=False)

    def bind(self, operands: Sequence[Any]) -> list[Any]:
        """Returns the results for some operands, as an equation of the primitive where they are traced."""
        with jax.named_scope(self.name):
            return kernel_p.bind(*operands, kernel=self)

    def run(self, operands: Sequence[Any]) -> list[Any]:
        """Returns the results of the function itself."""
        results = self.fn(*operands)
        return list(results) if isinstance(results, tuple | list) else [results]

    def trace(self, operands: Sequence[Any]) -> TracedKernel:
        """Traces the function for operands with a shape and a dtype.

        Raises:
          TypeError: the function returns something else than an array or a tuple of arrays.
          ValueError: the function reads an array that is traced outside.
        """
        types = tuple((tuple(x.shape), jnp.dtype(x.dtype)) for x in operands)
        key = types, tuple(getattr(jax.config, option, None) for option in _TYPE_OPTIONS)
        if key not in self._traces:
            self._traces[key] = _trace(self, types)
        return self._traces[key]

    def derived(self, key: Hashable, make: "Callable[[], Kernel]") -> "Kernel":
        """Returns a kernel that is made of this one, made once for each key, so that its traces are kept too."""
        if key not in self._derived:
            self._derived[key] = make()
        return self._derived[key]

    def results(self, operands: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        """Returns the shapes and dtypes of the results; raises as `trace`."""
        return [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in self.trace(operands).jaxpr.out_avals]

    def check(self, operands: Sequence[Any]) -> None:
        """Holds the rule against the shapes of some operands and of what the function makes of them."""
        shapes = [tuple(x.shape) for x in operands]
        try:
            self.rule.sizes(shapes)
            self.rule.sizes(shapes, [x.shape for x in self.results(operands)])
        except ValueError as error:
            raise ValueError(f"Kernel {self.name!r}: {error}") from None

    def work(self, operands: Sequence[Any], share: float = 1.0) -> Work:
        """Returns the work of one device.

        Args:
          operands: its parts, with a shape and a dtype.
          share: the part of the whole work that is its own, for prices that are numbers.

        Raises:
          TypeError: a price function returns no number.
          ValueError: a price is negative or not finite.
        """
        structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
        counted = traced_work(self.trace(structs).jaxpr)
        flops = self._price("flops", self.flops, counted.flops, structs, share)
        num_bytes = self._price("bytes", self.num_bytes, counted.num_bytes, structs, share)
        return Work(flops, num_bytes, dtype_of_work(structs))

    def _price(
        self, argument: str, price: Price | None, counted: float, operands: Sequence[Any], share: float
    ) -> float:
        if price is None:
            return float(counted)
        number = price(*operands) if callable(price) else price * share
        return checked_price(number, f"`{argument}` of kernel {self.name!r}")


def _trace(kernel: Kernel, types: Sequence[tuple[Any, Any]]) -> TracedKernel:
    jaxpr, result = jax.make_jaxpr(kernel.fn, return_shape=True)(*(jax.ShapeDtypeStruct(*t) for t in types))
    if any(isinstance(constant, Tracer) for constant in jaxpr.consts):
        raise ValueError(
            f"Kernel {kernel.name!r} reads an array that is traced outside of it. Pass the array as an operand, with "
            "its dimensions in `rule`."
        )
    returns_one = not isinstance(result, tuple | list)
    if not all(hasattr(x, "shape") for x in ([result] if returns_one else result)):
        raise TypeError(f"Kernel {kernel.name!r} must return an array or a tuple of arrays, not {result!r}.")
    return TracedKernel(jaxpr, returns_one)


# The primitive.


@kernel_p.def_impl
def _run(*operands: Any, kernel: Kernel) -> list[Any]:
    return kernel.run(operands)


@kernel_p.def_abstract_eval
def _types(*operands: Any, kernel: Kernel) -> list[Any]:
    kernel.check(operands)
    return [ShapedArray(x.shape, x.dtype) for x in kernel.results(operands)]


def _batched(operands: Sequence[Any], dims: Sequence[int | None], *, kernel: Kernel) -> tuple[list[Any], list[int]]:
    is_mapped = tuple(d is not None for d in dims)
    operands = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(operands, dims, strict=True)]
    size = next(x.shape[0] for x, mapped in zip(operands, is_mapped, strict=True) if mapped)
    batched = kernel.derived(("batch", is_mapped, size), lambda: _batched_kernel(kernel, is_mapped, size))
    results = batched.bind(operands)
    return results, [0] * len(results)


def _batched_kernel(kernel: Kernel, is_mapped: tuple[bool, ...], size: int) -> Kernel:
    prices = [
        _BatchedPrice(price, is_mapped, f"`{argument}` of kernel {kernel.name!r}")
        if callable(price)
        else None
        if price is None
        else price * size
        for argument, price in (("flops", kernel.flops), ("bytes", kernel.num_bytes))
    ]
    return replace(
        kernel,
        fn=_BatchedFunction(kernel.fn, is_mapped),
        rule=kernel.rule.with_batch(is_mapped),
        flops=prices[0],
        num_bytes=prices[1],
    )


@dataclass(frozen=True)
class _BatchedFunction:
    fn: Callable[..., Any]
    is_mapped: tuple[bool, ...]

    def __call__(self, *operands: Any) -> Any:
        return jax.vmap(self.fn, in_axes=tuple(0 if mapped else None for mapped in self.is_mapped))(*operands)


@dataclass(frozen=True)
class _BatchedPrice:
    price: Callable[..., float]
    is_mapped: tuple[bool, ...]
    subject: str

    def __call__(self, *operands: jax.ShapeDtypeStruct) -> float:
        pairs = list(zip(operands, self.is_mapped, strict=True))
        size = next(x.shape[0] for x, mapped in pairs if mapped)
        one = self.price(*(jax.ShapeDtypeStruct(x.shape[mapped:], x.dtype) for x, mapped in pairs))
        return size * checked_price(one, self.subject)


mlir.register_lowering(kernel_p, mlir.lower_fun(lambda *operands, kernel: kernel.run(operands), multiple_results=True))
batching.primitive_batchers[kernel_p] = _batched

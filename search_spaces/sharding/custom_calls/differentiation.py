"""The backward of a kernel: a kernel too, whose rule follows from that of the forward.

A gradient has the dimensions of its operand. A factor that the forward may split and an operand lacks is summed over in
that operand's gradient, so splitting it leaves partial sums.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp

from search_spaces.sharding.custom_calls.kernel import Kernel
from search_spaces.sharding.custom_calls.notation import NamedDimensions, NamedRule


@dataclass(frozen=True)
class DifferentiableKernel:
    """A kernel that is called like its function and has a backward.

    Attributes:
      backward: a function, or a kernel with a rule and a price of its own, of operands, results and cotangents; None
        differentiates the forward's function.
    """

    kernel: Kernel
    backward: "Callable[..., Any] | DifferentiableKernel | None"

    @property
    def __name__(self) -> str:
        return self.kernel.name

    def __call__(self, *operands: Any) -> Any:
        """Calls the function and returns its results.

        Raises:
          TypeError: there are other operands than the rule has, or the backward takes other arguments than it gets.
          ValueError: the rule does not fit the shapes.
        """
        expected = len(self.kernel.rule.operands)
        if len(operands) != expected:
            raise TypeError(
                f"Kernel {self.kernel.name!r} takes {expected} operands, as its `rule` {str(self.kernel.rule)!r} has, "
                f"but got {len(operands)}."
            )
        arrays = [jnp.asarray(x) for x in operands]
        self.kernel.check(arrays)
        self._check_backward(arrays)
        results: Any = _forward(self.kernel, self.backward, *arrays)
        return results[0] if self.kernel.trace(arrays).returns_one else tuple(results)

    def _check_backward(self, operands: Sequence[Any]) -> None:
        if self.backward is None:
            return
        results = self.kernel.results(operands)
        num_cotangents = sum(map(_is_differentiable, results))
        expected = len(operands) + len(results) + num_cotangents
        parts = f"{len(operands)} operands, {len(results)} results and {num_cotangents} cotangents"
        if isinstance(self.backward, DifferentiableKernel):
            came = len(self.backward.kernel.rule.operands)
            if came != expected:
                raise TypeError(
                    f"`backward` of kernel {self.kernel.name!r} gets {expected} arrays ({parts}), but its own `rule` "
                    f"{str(self.backward.kernel.rule)!r} has {came} operands."
                )
            return
        try:
            signature = inspect.signature(self.backward)
        except (TypeError, ValueError):  # built-in functions have no signature
            return
        try:
            signature.bind(*(None,) * expected)
        except TypeError as error:
            raise TypeError(
                f"`backward` of kernel {self.kernel.name!r} gets {expected} arrays ({parts}), but it is a function of "
                f"{signature}: {error}."
            ) from None


def _is_differentiable(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _forward(kernel: Kernel, backward: Any, *operands: Any) -> list[Any]:
    del backward
    return kernel.bind(operands)


def _forward_with_residuals(kernel: Kernel, backward: Any, *operands: Any) -> tuple[list[Any], Any]:
    results: Any = _forward(kernel, backward, *operands)
    return results, (operands, results)


def _gradients(kernel: Kernel, backward: Any, residuals: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
    operands, results = residuals
    wanted = tuple(map(_is_differentiable, operands))
    given = tuple(map(_is_differentiable, results))
    arguments = [*operands, *results, *compress(cotangents, given)]
    if not any(wanted):
        return (None,) * len(operands)
    if isinstance(backward, DifferentiableKernel):
        gradients = backward(*arguments)
        gradients = list(gradients) if isinstance(gradients, tuple) else [gradients]
        _check_gradients(kernel, compress(operands, wanted), gradients)
    else:
        gradients = backward_kernel(kernel, backward, wanted, given).bind(arguments)
    remaining = iter(gradients)
    return tuple(next(remaining) if is_wanted else None for is_wanted in wanted)


_forward.defvjp(_forward_with_residuals, _gradients)


def _check_gradients(kernel: Kernel, operands: Iterable[Any], gradients: Sequence[Any]) -> None:
    expected = [f"{x.dtype}{list(x.shape)}" for x in operands]
    came = [f"{x.dtype}{list(x.shape)}" for x in gradients]
    if came != expected:
        raise ValueError(
            f"`backward` of kernel {kernel.name!r} must return one gradient for each operand of floating type, like "
            f"the operand: {', '.join(expected)}; it returns {', '.join(came)}."
        )


def backward_kernel(
    kernel: Kernel, backward: Callable[..., Any] | None, wanted: tuple[bool, ...], given: tuple[bool, ...]
) -> Kernel:
    """Returns the kernel of a backward that is a plain function, or None for the forward's derivative."""

    def make() -> Kernel:
        function = _Derivative(kernel, wanted, given) if backward is None else _Backward(kernel, backward, wanted)
        return Kernel(function, backward_rule(kernel.rule, wanted, given), None, None, f"{kernel.name}_backward")

    return kernel.derived(("backward", backward, wanted, given), make)


def backward_rule(rule: NamedRule, wanted: Sequence[bool], given: Sequence[bool]) -> NamedRule:
    """Returns the rule of a backward; what the forward keeps whole, the backward keeps whole.

    A maximum's gradient goes to the largest element only, which no part of the array can tell: its factor stays whole.
    """
    cotangents, gradients = tuple(compress(rule.results, given)), tuple(compress(rule.operands, wanted))
    of_operands, of_results = _names(rule.operands), _names(rule.results)
    summed = {factor for factor, kind in rule.reduction if kind == "sum"}
    open_factors = (
        (of_operands & (of_results | summed)) - rule.whole - {f for f, kind in rule.reduction if kind != "sum"}
    )
    partial_factors = {f for f in open_factors if any(f not in _names([gradient]) for gradient in gradients)}
    return NamedRule(
        operands=(*rule.operands, *rule.results, *cotangents),
        results=gradients,
        reduction=tuple((f, "sum") for f in sorted(partial_factors)),
        whole=frozenset((of_operands | of_results) - open_factors),
    )


def _names(arrays: Sequence[NamedDimensions]) -> set[str]:
    return {name for array in arrays for factors in array for name in factors}


@dataclass(frozen=True)
class _Derivative:
    """The derivative of a kernel's function, which runs the function again."""

    kernel: Kernel
    wanted: tuple[bool, ...]
    given: tuple[bool, ...]

    def __call__(self, *arguments: Any) -> tuple[Any, ...]:
        operands = arguments[: len(self.wanted)]
        cotangents = arguments[len(self.wanted) + len(self.given) :]

        def of_numbers(*numbers: Any) -> list[Any]:
            remaining = iter(numbers)
            results = self.kernel.fn(*(next(remaining) if w else x for x, w in zip(operands, self.wanted, strict=True)))
            results = results if isinstance(results, tuple | list) else [results]
            return list(compress(results, self.given))

        self.kernel.trace(operands)  # an error here is of the function itself
        try:
            _, pull = jax.vjp(of_numbers, *compress(operands, self.wanted))
            return pull(list(cotangents))
        except Exception as error:  # whatever JAX or a foreign primitive raises
            text = str(error).strip().split("\n")[0]
            reason = f"{type(error).__name__}{f': {text}' if text else ''}"
            raise TypeError(
                f"Kernel {self.kernel.name!r} cannot be differentiated by JAX ({reason}). Give `backward=` to "
                "`diffshard.kernel`."
            ) from error


@dataclass(frozen=True)
class _Backward:
    """A user's backward, with a check of what it returns."""

    kernel: Kernel
    backward: Callable[..., Any]
    wanted: tuple[bool, ...]

    def __call__(self, *arguments: Any) -> tuple[Any, ...]:
        gradients = self.backward(*arguments)
        gradients = tuple(gradients) if isinstance(gradients, tuple | list) else (gradients,)
        _check_gradients(self.kernel, compress(arguments, self.wanted), gradients)
        return gradients

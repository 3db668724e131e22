"""The public way to declare a kernel, and the checks of what is declared.

`diffshard.check_kernel` tries a rule out, because no shape tells one that is wrong. A rule promises that a function on
parts makes the parts of what it makes of whole arrays, or partial results of them. That is a statement about numbers,
so the function is run whole and on both halves of every factor that may be split.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from search_spaces.partition_specs import IndexedSpec
from search_spaces.sharding.base import Axes, ShardingStrategy
from search_spaces.sharding.custom_calls.differentiation import DifferentiableKernel, backward_kernel
from search_spaces.sharding.custom_calls.kernel import Kernel, Price, checked_price
from search_spaces.sharding.custom_calls.notation import parse_rule
from search_spaces.sharding.strategies import strategies_of_rule


def kernel(
    fn: Callable[..., Any],
    rule: str,
    *,
    reduction: Mapping[str, str] | None = None,
    need_replication: str | Iterable[str] = (),
    flops: Price | None = None,
    bytes: Price | None = None,  # noqa: A002
    backward: Callable[..., Any] | DifferentiableKernel | None = None,
    name: str | None = None,
) -> DifferentiableKernel:
    """Makes a function one operation of a plan, which runs on each device's own part of its operands.

    The function may be a Pallas kernel, a call of foreign code, or anything else that JAX traces. Without a plan the
    result is the function, also under `jax.jit`, `jax.grad`, `jax.vmap`, `jax.checkpoint` and `jax.lax.scan`. Make it
    once, outside of the step: layers that use the same kernel are planned alike.

    A factor of the rule that operands and results have may be split, and so may one in `reduction`. All others stay
    whole: those in `need_replication`, and those that only operands or only results have.

    Args:
      fn: takes arrays, returns an array or a tuple of arrays. It must accept any part of its operands that the rule
        allows; splits for which it raises an error while it is traced are not offered.
      rule: how dimensions relate, as `"b s h d, b t h d, b t h d -> b s h d"`: dimensions that share a name are split
        alike, `(h g)` is a dimension of several factors, and `...` any number of dimensions.
      reduction: for each factor whose parts give partial results, what combines them: "sum", "max" or "min".
      need_replication: factors that must not be split, as `"s d"` or a sequence.
      flops: arithmetic operations; a multiply-add counts as two. A number is for whole arrays and is divided among the
        devices that share the work; a function gets the operands of one device as `jax.ShapeDtypeStruct`s. By default
        a trace of `fn` is counted: `cost_estimate` of a Pallas call, or its body at each place of its grid.
      bytes: memory traffic, likewise. By default what Pallas calls estimate, but at least all operands and results.
      backward: takes the operands, the results and a cotangent of each result of floating type, and returns a gradient
        for each operand of floating type. It is a kernel itself, with a rule and a price of its own, or a plain
        function, whose rule then follows from `rule`. By default `fn` is run again and differentiated by `jax.vjp`.
      name: for plans, errors and profiles; by default that of `fn`.

    Returns:
      A function of arrays.

    Raises:
      TypeError: `fn` or `backward` is not a function that can be hashed, as a module that holds arrays cannot; `rule`
        is no string; `reduction` or `need_replication` does not hold strings; or a price is no number.
      ValueError: the rule cannot be read, it lacks a factor that is named beside it, or a price is negative or not
        finite. What a price function returns is checked likewise when a plan asks for it.
    """
    if not callable(fn):
        raise TypeError(f"`fn` must be a function of arrays, not {fn!r}.")
    if backward is not None and not callable(backward):
        raise TypeError(f"`backward` must be a function of arrays or a kernel, not {backward!r}.")
    for argument, function in (("fn", fn), ("backward", backward), ("flops", flops), ("bytes", bytes)):
        _check_hashable(argument, function)
    parsed_rule = parse_rule(rule, _checked_reduction(reduction), _factors(need_replication))
    if name is None:
        name = getattr(fn, "__name__", None) or getattr(getattr(fn, "func", None), "__name__", type(fn).__name__)
    flops, num_bytes = _price("flops", flops, name), _price("bytes", bytes, name)
    return DifferentiableKernel(Kernel(fn, parsed_rule, flops, num_bytes, str(name)), backward)


def _check_hashable(argument: str, function: Any) -> None:
    try:
        hash(function)
    except TypeError as error:
        raise TypeError(
            f"`{argument}` must be hashable, as functions are, but a {type(function).__name__} is not ({error}). Give "
            "a function, and pass its arrays as operands."
        ) from None


def _factors(need_replication: Any) -> list[str]:
    factors: Any = need_replication
    if isinstance(need_replication, str):
        factors = need_replication.split()
    elif isinstance(need_replication, Iterable):
        factors = list(need_replication)
    if not isinstance(factors, list) or not all(isinstance(factor, str) for factor in factors):
        raise TypeError(f"`need_replication` must be names of factors, as 's d' or ('s', 'd'), not {factors!r}.")
    return factors


def _checked_reduction(reduction: Any) -> Mapping[str, str] | None:
    is_mapping = reduction is None or isinstance(reduction, Mapping)
    if not is_mapping or not all(isinstance(x, str) for pair in (reduction or {}).items() for x in pair):
        raise TypeError(
            "`reduction` must be a dictionary from factors to what combines their parts, as {'k': 'sum'}, not "
            f"{reduction!r}."
        )
    return reduction


def _price(argument: str, price: Price | None, name: Any) -> Price | None:
    """Returns a price that is given as a float, a function or None."""
    if price is None or callable(price):
        return price
    return checked_price(price, f"`{argument}` of kernel {name!r}", "a number or a function of one device's operands")


_HALVES = Axes((2,), (0,))
_COMBINE = {"sum": np.add, "max": np.maximum, "min": np.minimum}


def check_kernel(kernel: DifferentiableKernel, *operands: Any, tolerance: float = 1e-2) -> tuple[str, ...]:
    """Runs a kernel whole and on both halves of each factor that may be split, and compares the results.

    Call it in a test of the kernel, on one device, with small operands whose dimensions are even and whose numbers
    differ. A `backward` that was given is tried as well.

    Args:
      kernel: made by `diffshard.kernel`.
      *operands: arrays, or `jax.ShapeDtypeStruct`s that stand for random numbers (for 0 and 1 in integers).
      tolerance: the largest difference of a result, relative to its largest number.

    Returns:
      The factors that were tried. Factors that have odd sizes, or on whose parts the function raises an error, are not
      split by a plan either.

    Raises:
      TypeError: `kernel` is not made by `diffshard.kernel`.
      ValueError: the rule does not fit the shapes, or results on parts are others than the rule says; names the factor.
    """
    if not isinstance(kernel, DifferentiableKernel):
        raise TypeError(f"`kernel` must be made by `diffshard.kernel`, not {kernel!r}.")
    arrays = [_array(x, number) for number, x in enumerate(operands)]
    jax.eval_shape(kernel, *arrays)  # holds the rule and the backward's arguments against the shapes
    tried = _check(kernel.kernel, arrays, tolerance)
    if kernel.backward is not None:
        results = kernel.kernel.run(arrays)
        wanted, given = (tuple(jnp.issubdtype(x.dtype, jnp.inexact) for x in some) for some in (arrays, results))
        cotangents = [_array(x, -1 - i) for i, x in enumerate(map(_type, results)) if given[i]]
        own = kernel.backward
        is_own = isinstance(own, DifferentiableKernel)
        backward = own.kernel if is_own else backward_kernel(kernel.kernel, own, wanted, given)
        _check(backward, [*arrays, *results, *cotangents], tolerance)
    return tried


def _type(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))


def _array(x: Any, number: int) -> Any:
    if not isinstance(x, jax.ShapeDtypeStruct):
        return jnp.asarray(x)
    rng = np.random.default_rng(abs(number) + (1000 if number < 0 else 0))
    numbers = rng.normal(size=x.shape) if jnp.issubdtype(x.dtype, jnp.inexact) else rng.integers(0, 2, x.shape)
    return jnp.asarray(numbers, x.dtype)


def _check(kernel: Kernel, operands: Sequence[Any], tolerance: float) -> tuple[str, ...]:
    whole = kernel.run(operands)
    shapes = [tuple(x.shape) for x in operands]
    strategies = strategies_of_rule(kernel.rule.rule(shapes, [tuple(x.shape) for x in whole]), _HALVES)
    tried: list[str] = []
    for strategy in {(s.operands, s.unreduced): s for s in strategies if s.parts > 1}.values():
        factor = kernel.rule.name_of_dimension(shapes, strategy.operands)
        halves = [_half(operands, strategy.operands, number) for number in range(2)]
        if None in halves or factor in tried or not _accepts(kernel, halves[0]):
            continue
        tried.append(factor)
        parts = [kernel.run(half) for half in halves if half is not None]
        joined = [
            _joined(pair, spec, kernel.rule.combine) for *pair, spec in zip(*parts, strategy.unreduced, strict=True)
        ]
        for number, (result, expected) in enumerate(zip(joined, whole, strict=True)):
            _compare(kernel, factor, strategy, number, result, np.asarray(expected), tolerance)
    return tuple(tried)


def _half(arrays: Sequence[Any], specs: Sequence[IndexedSpec], number: int) -> list[Any] | None:
    """Returns one half of the arrays along the dimensions that are split; None where they are odd."""
    halves = []
    for array, spec in zip(arrays, specs, strict=True):
        half = array
        for d in (d for d, axes in enumerate(spec) if axes):
            if array.shape[d] % 2:
                return None
            half = jnp.split(half, 2, d)[number]
        halves.append(half)
    return halves


def _accepts(kernel: Kernel, operands: Any) -> bool:
    try:
        kernel.results(operands)
    except Exception:  # whatever a foreign function raises for shapes that it does not take
        return False
    return True


def _joined(halves: Sequence[Any], spec: IndexedSpec, combine: str) -> np.ndarray:
    first, second = map(np.asarray, halves)
    split = [d for d, axes in enumerate(spec) if axes]
    return np.concatenate([first, second], split[0]) if split else _COMBINE[combine](first, second)


def _compare(
    kernel: Kernel, factor: str, strategy: ShardingStrategy, number: int, joined: Any, whole: Any, tolerance: float
) -> None:
    is_partial = not any(strategy.unreduced[number])
    if joined.shape != whole.shape:
        problem = f"of shape {list(joined.shape)}, not {list(whole.shape)}"
    else:
        a, b = (np.asarray(x, np.complex128 if np.iscomplexobj(x) else np.float64) for x in (joined, whole))
        difference = float(np.max(np.abs(a - b), initial=0.0)) / (float(np.max(np.abs(b), initial=0.0)) or 1.0)
        if difference <= tolerance:
            return
        problem = f"off by {difference:.2g} of the largest number"
    how = f"combined by {kernel.rule.combine!r}" if is_partial else "put together"
    raise ValueError(
        f"The rule {str(kernel.rule)!r} of kernel {kernel.name!r} is wrong about {factor!r}: result {number} of its "
        f"halves, {how}, is {problem}. Name {factor!r} in `need_replication`"
        + (", or correct `reduction`." if is_partial else ".")
    )

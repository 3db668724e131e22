"""The public way to declare a kernel, and the checks of what is declared."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from search_spaces.sharding.opaque.differentiation import DifferentiableKernel
from search_spaces.sharding.opaque.kernel import Kernel, Price, checked_price
from search_spaces.sharding.opaque.notation import parse_rule


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

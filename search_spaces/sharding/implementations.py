"""Operations of other libraries as what they compute: primitives whose implementation is written in JAX.

A library may wrap a computation in a primitive of its own to give it a derivative or a batching rule, as Equinox and
Lineax do. Once a function is traced, such a primitive only calls its implementation. The graph has the operations of
this implementation instead, each of which has a rule, a price and a form on one device's part.

The same is done for a `while_loop` under `vmap` whose condition depends on the example. JAX traces it as a loop with a
condition for each example, which is no loop that JAX's own functions can make again.
"""

import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from search_spaces.replay import bind, context_of, while_operands
from search_spaces.sharding.opaque.operations import OPAQUE
from search_spaces.sharding.shardy import PLATFORMS, abstract_argument, signature_of

_KERNEL = re.compile(r"stablehlo\.custom_call @([\w.$]+)")


class Implementations:
    """The implementations of the primitives in one traced function; equal equations are looked at once."""

    def __init__(self) -> None:
        self._of_signature: dict[Hashable, core.ClosedJaxpr | None] = {}

    def __call__(self, equation: core.JaxprEqn) -> core.ClosedJaxpr | None:
        """Traces what a primitive of another library computes.

        Returns:
          The implementation as a function of the equation's operands. None for primitives of JAX (other than a loop
          with a condition for each example), for opaque operations, and for primitives whose implementation is not
          written in JAX or is not what runs: some are lowered to kernels, and their implementation only says what
          these compute.
        """
        if equation.primitive.name == "while" and equation.params["cond_jaxpr"].out_avals[0].shape:
            with context_of(equation):
                return _with_one_condition(equation)
        if equation.primitive.name in OPAQUE or _is_of_jax(equation.primitive):
            return None
        key = equation.primitive, signature_of(equation)
        if key not in self._of_signature:
            with context_of(equation):
                self._of_signature[key] = _traced(equation)
        return self._of_signature[key]


def _is_of_jax(primitive: core.Primitive) -> bool:
    """Tells whether a primitive is implemented in JAX's own modules, or nowhere."""
    implementation = getattr(primitive.impl, "func", primitive.impl)
    return (getattr(implementation, "__module__", None) or "jax").split(".")[0] in ("jax", "jaxlib")


def _traced(equation: core.JaxprEqn) -> core.ClosedJaxpr | None:
    primitive, arguments = equation.primitive, [abstract_argument(v.aval) for v in equation.invars]

    def implementation(*operands: Any) -> Sequence[Any]:
        results = primitive.impl(*operands, **primitive.get_bind_params(equation.params))
        return results if primitive.multiple_results else [results]

    try:
        jaxpr = jax.make_jaxpr(implementation)(*arguments)
    except Exception:  # whatever an implementation raises that cannot be traced
        return None
    kernels = [_kernels(lambda *operands: bind(equation, operands), arguments, platform) for platform in PLATFORMS]
    is_what_runs = kernels == [_kernels(core.jaxpr_as_fun(jaxpr), arguments, platform) for platform in PLATFORMS]
    return jaxpr if is_what_runs and any(names is not None for names in kernels) else None


def _with_one_condition(equation: core.JaxprEqn) -> core.ClosedJaxpr:
    """Returns a loop that goes on while an example does; the carries of examples that do not stay as they are."""
    condition, body = (core.jaxpr_as_fun(equation.params[name]) for name in ("cond_jaxpr", "body_jaxpr"))

    def loop(*operands: Any) -> Any:
        of_condition, of_body, init = while_operands(equation, operands)

        def step(carries: list[Any]) -> list[Any]:
            (goes_on,) = condition(*of_condition, *carries)
            results = body(*of_body, *carries)
            return [
                jnp.where(lax.expand_dims(goes_on, range(goes_on.ndim, new.ndim)), new, old)
                for new, old in zip(results, carries, strict=True)
            ]

        return lax.while_loop(lambda carries: jnp.any(condition(*of_condition, *carries)[0]), step, list(init))

    return jax.make_jaxpr(loop)(*(abstract_argument(v.aval) for v in equation.invars))


def _kernels(function: Callable[..., Any], arguments: Sequence[Any], platform: str) -> set[str] | None:
    """Returns the targets of the custom calls of a function, or None if it cannot be lowered for a platform."""
    try:
        lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,))
    except Exception:  # whatever the lowering of a foreign primitive raises
        return None
    return set(_KERNEL.findall(lowered.as_text()))

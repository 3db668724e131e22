"""cuDNN's attention, as `jax.nn.dot_product_attention(implementation="cudnn")` calls it: planned without cuDNN.

JAX refuses to trace it where no cuDNN is installed, because it asks for the version. Only that question is answered
here; the operations, their shapes and their checks are JAX's own, and lowering is left to JAX too.

This touches internals of JAX: while a function is traced for a plan, two private functions of the module that
`jax.nn.dot_product_attention` calls are replaced, for all threads. A test fails where another JAX has them elsewhere.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from threading import Lock
from typing import Any

import jax
from jax.extend import core

from cost.base import AttentionWork
from search_spaces.replay import bind
from search_spaces.sharding.base import Rule
from search_spaces.sharding.opaque.kernel import Kernel
from search_spaces.sharding.opaque.notation import NamedDimensions, NamedRule, Shape
from search_spaces.sharding.opaque.work import arrays_bytes, dtype_of_work

FORWARD, BACKWARD = "dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper"
_ASSUMED_VERSION = 91000  # the first that supports all head sizes on Hopper, which JAX asks for
_ASSUMED_CAPABILITY = 9.0  # of H100
_HEADS = ("kv_head", "group")
_WHOLE = frozenset({"query", "key", "width", "value_width"})
_BIAS, _QUERY_LENGTHS, _QUERY_OFFSETS = 3, 4, 6


@contextmanager
def planned_without_cudnn() -> Iterator[None]:
    """Lets JAX trace cuDNN's attention on a machine without cuDNN, as for an H100 with a recent one."""
    _answers.enter()
    try:
        yield
    finally:
        _answers.leave()


class _Answers:
    """What JAX's questions about cuDNN are answered while any thread plans; the last one puts JAX's functions back."""

    def __init__(self) -> None:
        self._lock = Lock()  # held while functions are replaced or put back, not while a thread plans
        self._num_users = 0
        self._replaced: dict[str, Any] = {}

    def enter(self) -> None:
        """Replaces JAX's functions, unless another thread has done so or cuDNN is installed."""
        with self._lock:
            if self._num_users == 0:
                self._replace()
            self._num_users += 1

    def leave(self) -> None:
        """Puts JAX's functions back if no other thread plans."""
        with self._lock:
            self._num_users -= 1
            if self._num_users == 0:
                _names_of_jax().update(self._replaced)
                self._replaced = {}

    def _replace(self) -> None:
        names = _names_of_jax()
        try:
            names["check_cudnn_version"]()
        except KeyError:  # another version of JAX asks in another way, and says so itself
            return
        except RuntimeError:
            answers = {
                "check_cudnn_version": lambda: _ASSUMED_VERSION,
                "check_compute_capability": lambda capability: float(capability) <= _ASSUMED_CAPABILITY,
            }
            self._replaced = {name: names[name] for name in answers if name in names}
            names.update({name: answers[name] for name in self._replaced})


_answers = _Answers()


def _names_of_jax() -> dict[str, Any]:
    """Returns the names of the module in which JAX asks about cuDNN; an empty dictionary where it has moved."""
    cudnn_attention = getattr(jax.nn.dot_product_attention, "__globals__", {}).get("cudnn_dot_product_attention")
    return getattr(cudnn_attention, "__globals__", {})


def rule_of_attention(equation: core.JaxprEqn) -> Rule:
    """Returns the rule of cuDNN's attention: batch and heads may be split.

    Of packed sequences and of keys in pages the batch stays whole, and where there is dropout, everything does: each
    device would draw the same numbers.
    """
    return named_rule(equation).rule(shapes_of(equation.invars), shapes_of(equation.outvars))


def bind_attention(equation: core.JaxprEqn, operands: Sequence[Any], **parameters: Any) -> list[Any]:
    """Runs cuDNN's attention on some operands, with some of its parameters changed.

    It is bound as a kernel: JAX would ask for devices, also where it lowers for absent ones.
    """
    has_statistics = equation.primitive.name == FORWARD and parameters.get("is_training")
    rule = named_rule(equation, 2 if has_statistics else len(equation.outvars))
    bound = _Bound(equation, tuple(parameters.items()))
    return Kernel(bound, rule, None, None, equation.primitive.name).bind(operands)


@dataclass(frozen=True)
class _Bound:
    """An equation with other parameters as a function of its operands."""

    equation: core.JaxprEqn
    parameters: tuple[tuple[str, Any], ...]

    def __call__(self, *operands: Any) -> list[Any]:
        return list(bind(self.equation, operands, **dict(self.parameters)))


def work_of_attention(equation: core.JaxprEqn, operands: Sequence[jax.ShapeDtypeStruct], share: float) -> AttentionWork:
    """Returns what one device does: two products forward, five backward, of the pairs that the mask lets through."""
    del share
    (batch, length, heads, width), (key_length, value_width) = _sizes(equation, operands)
    pairs = float(batch * heads * length * key_length)
    window = equation.params.get("sliding_window_length")
    if "CAUSAL" in str(equation.params["mask_type"]):
        pairs *= 0.5 if length == key_length else 1.0
    if window:
        pairs = min(pairs, float(batch * heads * length * window))
    is_forward = equation.primitive.name == FORWARD
    products = width + value_width if is_forward else 3 * width + 2 * value_width
    results = [v.aval for v in equation.outvars]
    parts = prod(operands[0].shape) / max(1, prod(equation.invars[0].aval.shape))  # pyright: ignore[reportAttributeAccessIssue]
    num_bytes = arrays_bytes(operands) + parts * arrays_bytes(results)
    queries = float(batch * heads * length)
    return AttentionWork(2.0 * pairs * products, num_bytes, dtype_of_work(operands), queries, is_forward)


def _sizes(equation: core.JaxprEqn, operands: Sequence[Any]) -> tuple[tuple[int, int, int, int], tuple[int, int]]:
    """Returns batch, length, heads and width of the queries, then the length of the keys and the width of values."""
    query, key, value = (operands[i].shape for i in range(3))
    b, t, n, h = (query[i] for i in ((0, 2, 1, 3) if equation.params["layout"] else (0, 1, 2, 3)))
    return (b, t, n, h), (key[2 if equation.params["layout"] else 1], value[3])


def named_rule(equation: core.JaxprEqn, num_results: int | None = None) -> NamedRule:
    """Returns the rule of cuDNN's attention by names; of the backward with the sums that partial gradients need.

    Args:
      num_results: of the forward, if it is not as many as the equation has.
    """
    num_results = len(equation.outvars) if num_results is None else num_results
    operands = shapes_of(equation.invars)
    is_forward = equation.primitive.name == FORWARD
    is_plain = operands[_QUERY_OFFSETS] == (0,) and all(shape == (0,) for shape in operands[8:10])

    def array(length: str, heads: tuple[str, ...], width: str) -> NamedDimensions:
        if equation.params["layout"]:
            return (("batch",), heads, (length,), (width,))
        return (("batch",), (length,), heads, (width,))

    query, out = array("query", _HEADS, "width"), array("query", _HEADS, "value_width")
    key, value = array("key", ("kv_head",), "width"), array("key", ("kv_head",), "value_width")
    if not is_plain:
        key, value = (tuple(("pages",) if d == ("batch",) else d for d in dims) for dims in (key, value))
    bias = _bias(operands)
    statistics: NamedDimensions = ((("batch",) if is_plain else ("segments",)), _HEADS, ("query",))
    others = [
        _lengths(f"operand_{i}", operands[i], operands[0][0] if is_plain else -1)
        for i in range(_QUERY_LENGTHS, 10)
    ]  # fmt: skip
    named_operands = (query, key, value, bias, *others)
    if is_forward:
        named_results = (out, statistics)[:num_results]
        reduction = ()
    else:
        named_operands = (*named_operands, statistics, out, out)
        named_results = (query, key, value, bias)[: len(equation.outvars)]
        lacking = {"group", *(["batch", *_HEADS] if len(equation.outvars) > 3 else [])}
        lacking -= {name for names in bias for name in names} - {"group"}
        reduction = tuple((name, "sum") for name in sorted(lacking))
    names = {name for dims in (*named_operands, *named_results) for factors in dims for name in factors}
    whole = names - {"batch", *_HEADS}
    if not is_plain:
        whole |= {"batch"}
    if equation.params["dropout_rate"]:
        whole = names
    return NamedRule(named_operands, named_results, tuple(r for r in reduction if r[0] not in whole), frozenset(whole))


def _bias(operands: Sequence[Shape]) -> NamedDimensions:
    """Names the dimensions of a bias, of which batch and heads may be broadcast; other placeholders are empty."""
    shape, query, key = operands[_BIAS], operands[0], operands[1]
    if len(shape) != 4:
        return tuple((f"bias_{d}",) for d in range(len(shape)))
    batch = ("batch",) if shape[0] == query[0] > 1 else ("bias_batch",)
    heads = ("bias_heads",) if shape[1] == 1 else _HEADS
    del key
    return (batch, heads, ("bias_query",), ("bias_key",))


def _lengths(name: str, shape: Shape, batch: int) -> NamedDimensions:
    return tuple(("batch",) if d == 0 and size == batch else (f"{name}_{d}",) for d, size in enumerate(shape))


def shapes_of(variables: Sequence[Any]) -> list[Shape]:
    """Returns the shapes of variables."""
    return [tuple(v.aval.shape) for v in variables]

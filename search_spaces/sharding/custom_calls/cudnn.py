"""cuDNN's attention, as `jax.nn.dot_product_attention(implementation="cudnn")` calls it: planned without cuDNN.

JAX refuses to trace it where no cuDNN is installed, because it asks for the version. Only that question is answered
here; the operations, their shapes and their checks are JAX's own, and lowering is left to JAX too. On other devices the
same attention runs in `jax.numpy`, so that a model that is planned for GPUs can be run on the devices of any host.

This touches internals of JAX: while a function is traced for a plan, two private functions of the module that
`jax.nn.dot_product_attention` calls are replaced, for all threads. A test fails where another JAX has them elsewhere.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from threading import Lock
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from cost.base import AttentionWork
from search_spaces.replay import bind
from search_spaces.sharding.base import Rule
from search_spaces.sharding.custom_calls.kernel import Kernel, arrays_bytes, dtype_of_work
from search_spaces.sharding.custom_calls.notation import NamedDimensions, NamedRule, Shape
from search_spaces.sharding.rules import shapes_of

FORWARD, BACKWARD = "dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper"
_ASSUMED_VERSION = 91000  # the first that supports all head sizes on Hopper, which JAX asks for
_ASSUMED_CAPABILITY = 9.0  # of H100
_HEADS = ("kv_head", "group")
CUDNN_TARGETS = tuple(
    f"__cudnn$fmha{bias}Softmax{dropout}{backward}"
    for bias in ("", "ScaleBias")
    for dropout in ("", "Dropout")
    for backward in ("", "Backward")
)
"""The custom calls that cuDNN's attention lowers to."""
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
    """Answers to JAX's questions about cuDNN while any thread plans; the last one puts JAX's functions back."""

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


def work_of_attention(equation: core.JaxprEqn, operands: Sequence[jax.ShapeDtypeStruct]) -> AttentionWork:
    """Returns the work of one device: two products forward, five backward, of the pairs that the mask lets through."""
    (batch, length, heads, width), (key_length, value_width) = _sizes(equation, operands)
    pairs = float(batch * heads * length * key_length)
    if is_causal(equation) and length == key_length:
        pairs *= 0.5
    if window := equation.params.get("sliding_window_length"):
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
    shape, query = operands[_BIAS], operands[0]
    if len(shape) != 4:
        return tuple((f"bias_{d}",) for d in range(len(shape)))
    batch = ("batch",) if shape[0] == query[0] > 1 else ("bias_batch",)
    heads = ("bias_heads",) if shape[1] == 1 else _HEADS
    return (batch, heads, ("bias_query",), ("bias_key",))


def _lengths(name: str, shape: Shape, batch: int) -> NamedDimensions:
    return tuple(("batch",) if d == 0 and size == batch else (f"{name}_{d}",) for d, size in enumerate(shape))


_LARGE = -1e30
"""Stands for minus infinity among scores, so that a row without any key has no undefined numbers."""


def sequence_dimension(equation: core.JaxprEqn) -> int:
    """Returns which dimension of queries and keys is their sequence."""
    return 2 if equation.params["layout"] else 1


def is_causal(equation: core.JaxprEqn) -> bool:
    """Returns whether queries attend to no key after them."""
    return "CAUSAL" in str(equation.params["mask_type"])


def attend(equation: core.JaxprEqn, operands: Sequence[Any], **parameters: Any) -> list[Any]:
    """Returns the results of cuDNN's forward or backward for some operands, with some of its parameters changed.

    Dropout, packed sequences and keys in pages exist on NVIDIA GPUs alone.

    Args:
      equation: of the forward or of the backward.
      operands: as the equation has them: queries, keys, values, bias, six arrays of lengths and places; of the backward
        also the forward's statistics and output, and the output's gradient.
    """
    params = {**equation.params, **parameters}
    is_special = params["dropout_rate"] or any(operands[i].shape != (0,) for i in range(6, 10))
    if is_special or "ALIBI" in str(params["mask_type"]):
        return bind_attention(equation, operands, **parameters)
    reference = _forward if equation.primitive.name == FORWARD else _backward
    return list(
        jax.lax.platform_dependent(
            *operands,
            cuda=lambda *arrays: tuple(bind_attention(equation, arrays, **parameters)),
            default=partial(reference, params),
        )
    )


def _forward(params: dict[str, Any], *operands: Any) -> tuple[Any, ...]:
    """Returns the output, and in training the logarithm of each query's sum of exponentials."""
    query, key, value = (_heads_first(params, x) for x in operands[:3])
    scores, is_query = _scores(params, query, key, *operands[3:6])
    statistics = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.exp(scores - statistics[..., None]) * is_query
    out = jnp.einsum("bngts,bnsh->bngth", weights, _grouped(value, key.shape[1])[:, :, 0])
    out = _as_given(params, _joined(out)).astype(operands[0].dtype)
    return (out, _joined(statistics)) if params["is_training"] else (out,)


def _backward(params: dict[str, Any], *operands: Any) -> tuple[Any, ...]:
    """Returns the gradients, from the statistics of all keys, of which these may be a part.

    Source: Dao et al., "FlashAttention" (2022), algorithm 4.
    """
    query, key, value = (_heads_first(params, x) for x in operands[:3])
    statistics, out, cotangent = operands[10:13]
    num_heads = key.shape[1]
    scores, is_query = _scores(params, query, key, *operands[3:6])
    weights = jnp.exp(scores - _grouped(statistics[..., None], num_heads)) * is_query
    out, cotangent = (_grouped(_heads_first(params, x), num_heads) for x in (out, cotangent))
    query, key, value = _grouped(query, num_heads), key.astype(jnp.float32), value.astype(jnp.float32)
    of_weights = jnp.einsum("bngth,bnsh->bngts", cotangent, value) - (out * cotangent).sum(-1, keepdims=True)
    of_scores = weights * of_weights
    gradients = [
        _joined(params["scale"] * jnp.einsum("bngts,bnsh->bngth", of_scores, key)),
        params["scale"] * jnp.einsum("bngts,bngth->bnsh", of_scores, query),
        jnp.einsum("bngts,bngth->bnsh", weights, cotangent),
    ]
    results = [_as_given(params, x).astype(o.dtype) for x, o in zip(gradients, operands, strict=False)]
    if params["variadic_args"][1]:
        bias, of_scores = operands[3], _joined(of_scores)
        dims = [d for d, (n, m) in enumerate(zip(bias.shape, of_scores.shape, strict=True)) if n < m]
        results.append(of_scores.sum(dims, keepdims=True).astype(bias.dtype))
    return tuple(results)


def _scores(
    params: dict[str, Any], query: Any, key: Any, bias: Any, query_lengths: Any, key_lengths: Any
) -> tuple[Any, Any]:
    """Returns the scores `[batch, heads of keys, group, queries, keys]` and which queries there are."""
    length, num_keys = query.shape[2], key.shape[2]
    scores = params["scale"] * jnp.einsum("bngth,bnsh->bngts", _grouped(query, key.shape[1]), key.astype(jnp.float32))
    if bias.ndim == 4:
        whole = (bias.shape[0], query.shape[1], *bias.shape[2:])
        scores = scores + _grouped(jnp.broadcast_to(bias, whole), key.shape[1])
    place, place_of_key = jnp.arange(length)[:, None], jnp.arange(num_keys)
    is_seen, is_query = jnp.ones((length, num_keys), bool), jnp.ones((length, 1), bool)
    if "CAUSAL" in str(params["mask_type"]):
        is_seen &= place >= place_of_key
    if params.get("sliding_window_length"):
        is_seen &= place_of_key > place - params["sliding_window_length"]
    if "PADDING" in str(params["mask_type"]):
        is_seen = is_seen & (place_of_key < key_lengths[:, None, None, None, None])
        is_query = is_query & (place < query_lengths[:, None, None, None, None])
    return jnp.where(is_seen, scores, _LARGE), is_query


def _heads_first(params: dict[str, Any], array: Any) -> Any:
    return array if params["layout"] else array.swapaxes(1, 2)


_as_given = _heads_first  # the same two dimensions change places


def _grouped(array: Any, num_heads: int) -> Any:
    """Takes the dimension of heads apart into heads of keys and a group for each; returns float32."""
    batch, heads, *rest = array.shape
    return array.reshape(batch, num_heads, heads // num_heads, *rest).astype(jnp.float32)


def _joined(array: Any) -> Any:
    batch, heads, group, *rest = array.shape
    return array.reshape(batch, heads * group, *rest)

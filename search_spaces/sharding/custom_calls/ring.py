"""cuDNN's attention on parts of a sequence: by which rules it is split, what that costs, what a device sends.

Beside batch and heads, queries can be split over their sequence. Keys are then split alike and go round, or each device
has all of them, gathered by the plan; their gradients are then sums that the plan reduces. Either way each device
attends to what its queries see, and nothing is approximated. To split heads instead, a plan needs no rule of its own:
it moves arrays from parts of the sequence to parts of the heads, and back, by all-to-alls (Ulysses).

In a ring each device has a part of the sequence. In the first round its queries attend to its own keys; before each
further round every device hands its keys and values on to the next, while it still computes with them. The outputs of
the rounds are merged by the logarithms of their sums of exponentials. In the backward the gradients of keys and values
go round with them, in float32, and arrive at home after the last round.

Under a causal mask the first device would see one part of the keys and the last one all. So the sequence is cut into 2n
chunks for n devices, and device i computes with chunks i and 2n - 1 - i: every round then has the same arithmetic on
each device. The layout of a plan stays as it is: chunks change places on the way into the operation and out of it.
Where each device has all keys, none go round, and a causal mask needs the same chunks of queries.

Source: Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context" (2023); the idea
of a balanced order is that of Brandon et al., "Striped Attention" (2023); with chunks it is known as zigzag. Jacobs et
al., "DeepSpeed Ulysses" (2023); Grattafiori et al., "The Llama 3 Herd of Models" (2024), section 3.3.2, for whole keys.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from cost.base import AttentionWork
from search_spaces.sharding.base import Rule
from search_spaces.sharding.custom_calls.cudnn import (
    FORWARD,
    attend,
    is_causal,
    named_rule,
    sequence_dimension,
    work_of_attention,
)
from search_spaces.sharding.custom_calls.kernel import Parts
from search_spaces.sharding.custom_calls.notation import NamedDimensions, NamedRule
from search_spaces.sharding.own_collectives import OwnCollective
from search_spaces.sharding.rules import shapes_of
from search_spaces.sharding.spec import parts_of

_SEQUENCE = "sequence"
_SUM_BYTES = 4  # of an element of the float32 sums in which gradients go round


def sequence_rules(equation: core.JaxprEqn) -> tuple[Rule, ...]:
    """Returns the rules by which queries are split over their sequence: with keys alike, and with keys whole.

    None of them where a ring cannot run. It takes plain attention of as many queries as keys: without bias, dropout,
    lengths or a window, causal or not.
    """
    params, operands, results = equation.params, shapes_of(equation.invars), shapes_of(equation.outvars)
    dim = sequence_dimension(equation)
    is_plain = all(shape == (0,) for shape in operands[3:10]) and not params["sliding_window_length"]
    is_masked_simply = str(params["mask_type"]).rsplit(".", 1)[-1] in ("NO_MASK", "CAUSAL")
    has_one_length = operands[0][dim] == operands[1][dim]
    if not (is_plain and is_masked_simply and has_one_length) or params["dropout_rate"]:
        return ()
    rule = named_rule(equation)

    def renamed(dimensions: NamedDimensions) -> NamedDimensions:
        return tuple((_SEQUENCE,) if names in (("query",), ("key",)) else names for names in dimensions)

    ring = NamedRule(
        tuple(map(renamed, rule.operands)),
        tuple(map(renamed, rule.results)),
        rule.reduction,
        rule.whole - {"query", "key"},
    )
    of_keys = () if equation.primitive.name == FORWARD else (("query", "sum"),)
    whole_keys = replace(rule, reduction=(*rule.reduction, *of_keys), whole=rule.whole - {"query"})
    return ring.rule(operands, results), whole_keys.rule(operands, results)


def sequence_axis(equation: core.JaxprEqn, parts: Parts) -> int | None:
    """Returns the mesh axis that splits the sequence of queries; None where none does."""
    axes = parts.operands[0][sequence_dimension(equation)]
    if len(axes) > 1:
        raise ValueError("a sequence that is split over several mesh axes: a ring goes along one")
    return axes[0] if axes else None


def has_whole_keys(equation: core.JaxprEqn, parts: Parts) -> bool:
    """Returns whether each device has all keys, so that none go round."""
    return not parts.operands[1][sequence_dimension(equation)]


def work_of_parts(equation: core.JaxprEqn, operands: Sequence[jax.ShapeDtypeStruct], share: float) -> AttentionWork:
    """Returns the work of one device: its share of the products; in a ring all parts are read in each round."""
    dim = sequence_dimension(equation)
    whole: list[Any] = [v.aval for v in equation.invars]
    rounds = whole[1].shape[dim] // operands[1].shape[dim]
    own = work_of_attention(equation, operands)
    return own._replace(flops=share * work_of_attention(equation, whole).flops, num_bytes=rounds * own.num_bytes)


def ring_collectives(equation: core.JaxprEqn, parts: Parts) -> list[OwnCollective]:
    """Returns the collectives of a ring: keys and values beside each round but the last, and their gradients.

    Of a causal mask also what changes places before the first round and after the last one.
    """
    axis = sequence_axis(equation, parts)
    if axis is None:
        return []
    num_devices = parts.axis_sizes[axis]

    def sizes(variables: Sequence[Any], specs: Sequence[Any]) -> list[tuple[float, int]]:
        pairs = [(v.aval, parts_of(spec, parts.axis_sizes)) for v, spec in zip(variables, specs, strict=True)]
        return [(prod(x.shape) / prod(split), x.dtype.itemsize) for x, split in pairs]

    operands, results = sizes(equation.invars, parts.operands), sizes(equation.outvars, parts.results)

    def permute(num_bytes: float, count: int, *, is_overlapped: bool) -> OwnCollective:
        return OwnCollective("collective_permute", axis, num_bytes, count, is_overlapped)

    moved: list[OwnCollective] = []
    exchanged = [operands[0], *operands[10:], *(results if equation.primitive.name == FORWARD else results[:1])]
    if not has_whole_keys(equation, parts):
        moved = [permute(n * itemsize, num_devices - 1, is_overlapped=True) for n, itemsize in operands[1:3]]
        exchanged += operands[1:3]
        if equation.primitive.name != FORWARD:
            exchanged += results[1:3]
            for n, _ in results[1:3]:
                moved.append(permute(n * _SUM_BYTES, num_devices - 1, is_overlapped=True))
                moved.append(permute(n * _SUM_BYTES, 1, is_overlapped=False))
    if is_causal(equation):
        moved += [permute(n * itemsize / 2, 2, is_overlapped=False) for n, itemsize in exchanged]
    return moved


def run_attention(equation: core.JaxprEqn, operands: Sequence[Any], parts: Parts) -> list[Any]:
    """Runs attention on one device's parts, as a ring where queries and keys are split over their sequence."""
    axis = sequence_axis(equation, parts)
    whole_keys = has_whole_keys(equation, parts)
    if axis is None or (whole_keys and not is_causal(equation)):
        return attend(equation, operands)
    ring = Ring(equation, parts.axis_names[axis], parts.axis_sizes[axis], whole_keys)
    if is_causal(equation) and operands[0].shape[ring.dim] % 2:
        raise ValueError("parts of an odd length, which do not divide into the two chunks of a causal ring")
    run = run_forward if equation.primitive.name == FORWARD else run_backward
    return run(ring, operands)


class Ring(NamedTuple):
    """A device's place among those along which keys go round.

    Attributes:
      has_whole_keys: whether no keys go round, as each device has all of them.
    """

    equation: core.JaxprEqn
    name: str
    size: int
    has_whole_keys: bool

    @property
    def dim(self) -> int:
        """The dimension of the sequence in queries, keys and values."""
        return sequence_dimension(self.equation)

    def next(self, arrays: Sequence[Any]) -> list[Any]:
        """Hands arrays on to the next device."""
        pairs = [(i, (i + 1) % self.size) for i in range(self.size)]
        return [lax.ppermute(x, self.name, pairs) for x in arrays]

    def chunks_of(self, arrays: Sequence[Any], number: int) -> list[Any]:
        """Returns the keys or values that a device has in a round of a causal ring, from whole arrays."""
        return [
            jnp.concatenate(
                [lax.dynamic_slice_in_dim(x, p, self._chunk(x), self.dim) for p in self._places(x, number)], self.dim
            )
            for x in arrays
        ]

    def add_chunks(self, sums: Sequence[Any], added: Sequence[Any], number: int) -> list[Any]:
        """Adds what a round gives to arrays of whole keys or values."""
        results = []
        for total, of_round in zip(sums, added, strict=True):
            for place, part in zip(self._places(total, number), jnp.split(of_round, 2, self.dim), strict=True):
                before = lax.dynamic_slice_in_dim(total, place, self._chunk(total), self.dim)
                total = lax.dynamic_update_slice_in_dim(total, before + part, place, self.dim)
            results.append(total)
        return results

    def _chunk(self, whole: Any) -> int:
        return whole.shape[self.dim] // (2 * self.size)

    def _places(self, whole: Any, number: int) -> tuple[Any, Any]:
        """Returns where the two chunks of a round start."""
        holder = (lax.axis_index(self.name) - number) % self.size
        return holder * self._chunk(whole), (2 * self.size - 1 - holder) * self._chunk(whole)

    def end_round(self, computed: Any, arrived: Any) -> Any:
        """Returns both arrays and lists of a round once all of it has ended.

        Without it XLA would send all parts of the keys before it computes with the first, and keep them in memory.
        """
        return lax.optimization_barrier((computed, arrived))

    def has_earlier_keys(self, number: int) -> Any:
        """Returns whether the keys of a round come from an earlier place than the device's own."""
        return lax.axis_index(self.name) >= number

    def into_chunks(self, array: Any, dim: int) -> Any:
        """Gives device i, which has chunks 2i and 2i + 1, chunks i and 2n - 1 - i."""
        even, odd = jnp.split(array, 2, dim)
        even = lax.ppermute(even, self.name, [(i, self._holder(2 * i)) for i in range(self.size)])
        odd = lax.ppermute(odd, self.name, [(i, self._holder(2 * i + 1)) for i in range(self.size)])
        is_even = lax.axis_index(self.name) % 2 == 0
        return jnp.concatenate([jnp.where(is_even, even, odd), jnp.where(is_even, odd, even)], dim)

    def out_of_chunks(self, array: Any, dim: int) -> Any:
        """Undoes `into_chunks`."""
        low, high = jnp.split(array, 2, dim)
        is_even = lax.axis_index(self.name) % 2 == 0
        even, odd = jnp.where(is_even, low, high), jnp.where(is_even, high, low)
        even = lax.ppermute(even, self.name, [(self._holder(2 * i), i) for i in range(self.size)])
        odd = lax.ppermute(odd, self.name, [(self._holder(2 * i + 1), i) for i in range(self.size)])
        return jnp.concatenate([even, odd], dim)

    def _holder(self, chunk: int) -> int:
        """Returns the device that computes with a chunk."""
        return min(chunk, 2 * self.size - 1 - chunk)

    def attend(self, operands: Sequence[Any], mask: str) -> list[Any]:
        """Runs the forward or backward on some parts with a mask of its own."""
        first, rest = list(operands[:3]), list(operands[3:])
        placeholders: list[Any] = [v.aval for v in self.equation.invars[3:10]]
        empty = [jnp.zeros(x.shape, x.dtype) for x in placeholders]
        masks: Any = type(self.equation.params["mask_type"])
        parameters: dict[str, Any] = {"mask_type": masks[mask]}
        if self.equation.primitive.name == FORWARD:
            parameters["is_training"] = True  # for the statistics
        return attend(self.equation, [*first, *empty, *rest], **parameters)


def run_forward(ring: Ring, operands: Sequence[Any]) -> list[Any]:
    """Returns the output of one device's queries, and their statistics where the equation has them."""
    query, *moved = operands[:3]
    if is_causal(ring.equation):
        query, moved = ring.into_chunks(query, ring.dim), _first_keys(ring, moved)
        parts = list(_Partial(*ring.attend([query, *moved], "CAUSAL")).chunks(ring.dim))
    else:
        parts = [_Partial(*ring.attend([query, *moved], "NO_MASK"))]
    for number in range(1, ring.size):
        parts, moved = ring.end_round(parts, _next_keys(ring, moved, operands[1:3], number))
        if is_causal(ring.equation):
            parts = _with_pairs(ring, parts, query, moved, ring.has_earlier_keys(number))
        else:
            parts = [parts[0].merge(*ring.attend([query, *moved], "NO_MASK"), ring.dim)]
    out = jnp.concatenate([part.out for part in parts], ring.dim).astype(query.dtype)
    results = [(out, ring.dim), (jnp.concatenate([part.statistics for part in parts], 2), 2)]
    results = results[: len(ring.equation.outvars)]
    return [ring.out_of_chunks(x, d) if is_causal(ring.equation) else x for x, d in results]


def _first_keys(ring: Ring, keys: Sequence[Any]) -> list[Any]:
    """Returns keys and values of the first round of a causal ring."""
    return ring.chunks_of(keys, 0) if ring.has_whole_keys else [ring.into_chunks(x, ring.dim) for x in keys]


def _next_keys(ring: Ring, moved: Sequence[Any], given: Sequence[Any], number: int) -> list[Any]:
    """Returns keys and values of a round: those of the round before from the next device, or what is there."""
    return ring.chunks_of(given, number) if ring.has_whole_keys else ring.next(moved)


def _with_pairs(
    ring: Ring, parts: "Sequence[_Partial]", query: Any, moved: Sequence[Any], is_earlier: Any
) -> "list[_Partial]":
    """Merges a round of a causal ring into the outputs of the low and the high chunk of queries."""
    outs = ring.attend(_pairs_of_chunks(ring, [query], moved, is_earlier), "NO_MASK")
    (out, statistics), (other_out, other_statistics) = zip(*(jnp.split(x, 2) for x in outs), strict=True)
    unseen = jnp.full_like(other_statistics, -jnp.inf)
    low, high = parts
    low = low.merge(other_out, jnp.where(is_earlier, other_statistics, unseen), ring.dim)
    high = high.merge(out, statistics, ring.dim)
    return [low, high.merge(other_out, jnp.where(is_earlier, unseen, other_statistics), ring.dim)]


class _Partial(NamedTuple):
    """Attention to some of the keys.

    Attributes:
      out: the output, in float32 once it is merged.
      statistics: the logarithm of each query's sum of exponentials, `[batch, heads, queries]`.
    """

    out: Any
    statistics: Any

    def merge(self, out: Any, statistics: Any, dim: int) -> "_Partial":
        """Returns attention to these keys and to others; `dim` is the dimension of queries in outputs."""
        both = jnp.logaddexp(self.statistics, statistics)
        shares = [jnp.exp(x - both)[..., None] for x in (self.statistics, statistics)]
        if dim == 1:
            shares = [x.swapaxes(1, 2) for x in shares]
        merged = shares[0] * self.out.astype(jnp.float32) + shares[1] * out.astype(jnp.float32)
        return _Partial(merged, both)

    def chunks(self, dim: int) -> "tuple[_Partial, _Partial]":
        """Returns attention of the first and of the second half of the queries."""
        outs, statistics = jnp.split(self.out, 2, dim), jnp.split(self.statistics, 2, 2)
        return _Partial(outs[0], statistics[0]), _Partial(outs[1], statistics[1])


def _pairs_of_chunks(ring: Ring, of_queries: Sequence[Any], moved: Sequence[Any], is_earlier: Any) -> list[Any]:
    """Returns queries and keys of two pairs of chunks that attend without a mask, one after the other in the batch.

    The second chunk of the queries is after the first one of all keys. Earlier keys have a first chunk that the first
    chunk of the queries sees as well; of later keys the second chunk is before that of the queries.
    """
    low_queries, high_queries = zip(*(jnp.split(x, 2, d) for x, d in _with_dims(ring, of_queries)), strict=True)
    low_keys, high_keys = zip(*(jnp.split(x, 2, ring.dim) for x in moved), strict=True)
    queries = [
        jnp.concatenate([high, jnp.where(is_earlier, low, high)])
        for low, high in zip(low_queries, high_queries, strict=True)
    ]
    keys = [
        jnp.concatenate([low, jnp.where(is_earlier, low, high)]) for low, high in zip(low_keys, high_keys, strict=True)
    ]
    return [queries[0], *keys, *queries[1:]]


def _with_dims(ring: Ring, of_queries: Sequence[Any]) -> list[tuple[Any, int]]:
    """Returns arrays with the dimension of their queries: statistics have three dimensions, all others four."""
    return [(x, 2 if x.ndim == 3 else ring.dim) for x in of_queries]


def run_backward(ring: Ring, operands: Sequence[Any]) -> list[Any]:
    """Returns the gradients of one device's queries, keys and values, of whole keys its part of the sums."""
    of_queries, moved = [operands[0], *operands[10:13]], list(operands[1:3])
    if is_causal(ring.equation):
        of_queries = [ring.into_chunks(x, d) for x, d in _with_dims(ring, of_queries)]
        moved = _first_keys(ring, moved)
    mask = "CAUSAL" if is_causal(ring.equation) else "NO_MASK"
    of_query, *of_keys = _gradients(ring, of_queries, moved, mask)
    if ring.has_whole_keys:
        of_keys = ring.add_chunks([jnp.zeros(x.shape, jnp.float32) for x in operands[1:3]], of_keys, 0)
    for number in range(1, ring.size):
        following = _next_keys(ring, moved, operands[1:3], number)
        (of_query, of_keys), moved = ring.end_round((of_query, of_keys), following)
        of_keys = of_keys if ring.has_whole_keys else ring.next(of_keys)
        if mask == "CAUSAL":
            added = _causal_gradients(ring, of_queries, moved, ring.has_earlier_keys(number))
        else:
            added = _gradients(ring, of_queries, moved, mask)
        of_query += added[0]
        if ring.has_whole_keys:
            of_keys = ring.add_chunks(of_keys, added[1:], number)
        else:
            of_keys = [x + y for x, y in zip(of_keys, added[1:], strict=True)]
    results = [of_query, *(of_keys if ring.has_whole_keys else ring.next(of_keys))]
    results = [x.astype(operand.dtype) for x, operand in zip(results, operands, strict=False)]
    num_in_chunks = 0 if mask != "CAUSAL" else 1 if ring.has_whole_keys else 3
    return [*(ring.out_of_chunks(x, ring.dim) for x in results[:num_in_chunks]), *results[num_in_chunks:]]


def _gradients(ring: Ring, of_queries: Sequence[Any], moved: Sequence[Any], mask: str) -> list[Any]:
    """Returns the gradients of queries, keys and values of a round in float32."""
    gradients = ring.attend([of_queries[0], *moved, *of_queries[1:]], mask)
    return [x.astype(jnp.float32) for x in gradients]


def _causal_gradients(ring: Ring, of_queries: Sequence[Any], moved: Sequence[Any], is_earlier: Any) -> list[Any]:
    """Returns the gradients of queries, keys and values in a round, of which each pair of chunks gives a part."""
    gradients = ring.attend(_pairs_of_chunks(ring, of_queries, moved, is_earlier), "NO_MASK")
    (query, other_query), *keys = (jnp.split(x.astype(jnp.float32), 2) for x in gradients)
    zero = jnp.zeros_like(other_query)
    low_and_high = [jnp.where(is_earlier, other_query, zero), query + jnp.where(is_earlier, zero, other_query)]
    added = [jnp.concatenate(low_and_high, ring.dim)]
    for key, other_key in keys:
        zero = jnp.zeros_like(other_key)
        low_and_high = [key + jnp.where(is_earlier, other_key, zero), jnp.where(is_earlier, zero, other_key)]
        added.append(jnp.concatenate(low_and_high, ring.dim))
    return added

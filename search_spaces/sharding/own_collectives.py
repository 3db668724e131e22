"""Collectives that a custom call runs itself, between its own rounds of arithmetic.

A plan lists them as it lists all others. Those that run beside a round are waited for only as far as they take longer
than its arithmetic.
"""

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from cost.base import CollectiveKind
from cost.collectives import collective_sent_bytes


class OwnCollective(NamedTuple):
    """A collective inside a custom call.

    Attributes:
      axis: the mesh axis along which it goes.
      num_bytes: the full size along the axis in one group of devices (see `cost.collectives`).
      count: executions in one run of the operation.
      is_overlapped: whether each of them runs beside a round of arithmetic.
    """

    kind: CollectiveKind
    axis: int
    num_bytes: float
    count: int  # pyright: ignore[reportIncompatibleMethodOverride]
    is_overlapped: bool


class PricedCollective(NamedTuple):
    """A collective inside a custom call with the seconds of all its executions in one run of the operation.

    Attributes:
      link_s: seconds that the link is busy.
      exposed_s: seconds that the device waits.
    """

    collective: OwnCollective
    link_s: float
    exposed_s: float


def priced(
    collectives: Sequence[OwnCollective], arithmetic_s: float, seconds_of: Callable[[OwnCollective], float]
) -> list[PricedCollective]:
    """Returns collectives with their seconds.

    The arithmetic is that of equally long rounds, one more than collectives run beside them: a round and what runs
    beside it take as long as the longer of both. The time that is waited is divided among the collectives by their own.

    Args:
      arithmetic_s: seconds of all rounds without any collective.
      seconds_of: seconds of one execution of a collective alone.
    """
    num_overlapped = max((c.count for c in collectives if c.is_overlapped), default=0)
    round_s = arithmetic_s / (num_overlapped + 1)
    overlapped_s = sum(c.count * seconds_of(c) for c in collectives if c.is_overlapped)
    exposed_share = max(0.0, 1 - num_overlapped * round_s / overlapped_s) if overlapped_s else 0.0
    entries = []
    for collective in collectives:
        link_s = collective.count * seconds_of(collective)
        entries.append(
            PricedCollective(collective, link_s, link_s * (exposed_share if collective.is_overlapped else 1.0))
        )
    return entries


_KINDS: dict[str, CollectiveKind] = {
    "psum": "all_reduce",
    "psum_invariant": "all_reduce",
    "pmax": "all_reduce",
    "pmin": "all_reduce",
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "all_gather_reduced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "ragged_all_to_all": "all_to_all",
    "ppermute": "collective_permute",
    "pbroadcast": "collective_permute",
}
"""The kind of each of JAX's collective primitives. A ragged all-to-all counts as if its operand travelled whole."""


class MappedCollectives:
    """Reads collectives from the bodies of `shard_map`s.

    Args:
      permute_s: seconds in which one device sends bytes to another one along an axis `(axis, bytes)`. A permute over
        several axes counts on the slowest of those that its pairs of devices cross.
    """

    def __init__(self, axis_names: Sequence[str], axis_sizes: Sequence[int], permute_s: Callable[[int, float], float]):
        self._number, self._sizes = {name: i for i, name in enumerate(axis_names)}, tuple(axis_sizes)
        self._permute_s = permute_s

    def of(self, equation: core.JaxprEqn) -> tuple[OwnCollective, ...]:
        """Returns the collectives of one run of a `shard_map`, equal ones together; an empty tuple for all else."""
        if equation.primitive.name != "shard_map":
            return ()
        counts: dict[OwnCollective, int] = {}
        for collective in self._inside(equation.params["jaxpr"], 1):
            kind = collective._replace(count=1)
            counts[kind] = counts.get(kind, 0) + collective.count
        return tuple(collective._replace(count=count) for collective, count in counts.items())

    def _inside(self, jaxpr: Any, count: int) -> Iterator[OwnCollective]:
        for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            name = equation.primitive.name
            if name in _KINDS:
                yield from self._of_collective(equation, _KINDS[name], count)
            elif name == "cond":
                branches = [list(self._inside(branch, count)) for branch in equation.params["branches"]]
                yield from max(branches, key=self._sent_bytes)
            else:
                trips = equation.params["length"] if name == "scan" else 1
                for inner in core.jaxprs_in_params(equation.params):
                    yield from self._inside(inner, count * trips)

    def _sent_bytes(self, collectives: Sequence[OwnCollective]) -> float:
        sent = (c.count * collective_sent_bytes(c.kind, c.num_bytes, self._sizes[c.axis]) for c in collectives)
        return float(sum(sent))

    def _of_collective(self, equation: core.JaxprEqn, kind: CollectiveKind, count: int) -> Iterator[OwnCollective]:
        params = equation.params
        names = params.get("axis_name", params.get("axes", ()))
        # Other names are those of `vmap`, and numbers are dimensions of a block.
        axes = [self._number[n] for n in (names if isinstance(names, tuple) else (names,)) if n in self._number]
        axes = [axis for axis in axes if self._sizes[axis] > 1]
        # Dimensions of a block are summed before an all-reduce sends anything; others send their first operand.
        arrays = equation.outvars if kind == "all_reduce" else equation.invars[:1]
        num_bytes = float(sum(_num_bytes(array.aval) for array in arrays))
        if not axes or not num_bytes:
            return
        if kind == "collective_permute":
            crossed = self._crossed(axes, params["perm"]) if "perm" in params else axes
            if crossed:
                axis = max(crossed, key=lambda axis: self._permute_s(axis, num_bytes))
                yield OwnCollective(kind, axis, num_bytes, count, False)
            return
        groups = params.get("axis_index_groups")
        for axis in reversed(axes) if kind == "all_gather" else axes:
            size = self._sizes[axis]
            members = max(map(len, groups)) if groups is not None and len(axes) == 1 else size
            full_bytes = num_bytes * members if kind in ("all_gather", "all_to_all") else num_bytes
            sent_bytes = float(collective_sent_bytes(kind, full_bytes, members))
            if sent_bytes:
                as_large = full_bytes if members == size else sent_bytes / float(collective_sent_bytes(kind, 1.0, size))
                yield OwnCollective(kind, axis, as_large, count, False)
            if kind == "all_gather":
                num_bytes *= members
            elif kind == "reduce_scatter":
                num_bytes /= members

    def _crossed(self, axes: Sequence[int], pairs: Sequence[tuple[int, int]]) -> list[int]:
        """Returns the axes along which a device of a permute sends to another one."""
        sizes = [self._sizes[axis] for axis in axes]
        if not pairs:
            return []
        places = np.array(np.unravel_index(np.array(pairs), sizes))  # [axes, pairs, 2]
        return [axis for axis, place in zip(axes, places, strict=True) if (place[:, 0] != place[:, 1]).any()]


def _num_bytes(aval: Any) -> float:
    return float(prod(aval.shape)) * aval.dtype.itemsize


stated_seconds_p = core.Primitive("stated_seconds")


def stating_seconds(results: Any, forward_s: float, backward_s: float = 0.0) -> Any:
    """Marks the results of a `shard_map`'s body with its seconds, for a plan that the mapping is part of.

    Args:
      results: a pytree of arrays, which share the seconds equally.
      forward_s: until all are there, on the slowest device, with what is sent.
      backward_s: from their gradients on, until the gradients of the mapping's operands are there.
    """
    share = 1 / max(len(jax.tree.leaves(results)), 1)
    return jax.tree.map(lambda array: _marked(array, share * forward_s, share * backward_s), results)


def stated_seconds(equation: core.JaxprEqn) -> float | None:
    """Returns the seconds of one execution that a `shard_map` states; None where it states nothing."""
    if equation.primitive.name != "shard_map":
        return None
    seconds = [e.params["forward_s"] for e in equation.params["jaxpr"].eqns if e.primitive is stated_seconds_p]
    return sum(seconds) if seconds else None


def _transposed(gradient: Any, array: Any, *, forward_s: float, backward_s: float) -> tuple[Any]:
    del array
    if isinstance(gradient, ad.Zero):
        return (gradient,)
    return (_marked(gradient, backward_s, forward_s),)


def _marked(array: jax.Array, forward_s: float, backward_s: float) -> jax.Array:
    return stated_seconds_p.bind(array, forward_s=float(forward_s), backward_s=float(backward_s))


def _as_it_is(array: jax.Array, **seconds: float) -> jax.Array:
    del seconds
    return array


stated_seconds_p.def_impl(_as_it_is)
stated_seconds_p.def_abstract_eval(_as_it_is)
mlir.register_lowering(stated_seconds_p, lambda context, array, **seconds: [array])
ad.deflinear2(stated_seconds_p, _transposed)
batching.defvectorized(stated_seconds_p)

"""The collectives that a `shard_map`'s body writes itself, so that a plan lists and prices them as all others.

The shapes in a body are those of one device's blocks, so its equations say what each device sends. A loop of known
length sends as often as it runs, a `while` is taken to run once, and of branches the one counts that sends the most.
Backward passes need no rule of their own: they are `shard_map`s as well, with the transposed collectives in them.

Collectives over several axes go along one axis after the other. Those of groups that are smaller than their axis stand
as ones along the whole axis of which each device sends as many bytes.
"""

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import numpy as np
from jax.extend import core

from cost.base import CollectiveKind
from cost.collectives import collective_sent_bytes
from search_spaces.sharding.opaque.own_collectives import OwnCollective

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

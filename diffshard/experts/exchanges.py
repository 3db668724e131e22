"""What the devices of an expert layer send each other: tokens inside of groups, gradients between groups.

Groups lie along one mesh axis. Inside of groups of one size tokens travel by one all-to-all, with its device groups.
XLA has no all-to-all of groups of unequal size, so there they travel by permutes: in round s each device sends to the
s-th next one of its group, if there is one, and only the buffers of experts that there are. Nothing is sent to other
groups.

Copies of an expert in several groups add their gradients in a ring of groups. A device sends the gradient of each of
its experts to the device that holds the expert in the next group, by `ExpertMoves`; as in any ring all-reduce, each
expert's numbers are cut into as many chunks as there are groups, so that 2 (G - 1) / G of its bytes are sent.

Letters for sizes: H devices along the axis, G groups, N devices of the largest group, S slots of a device.
"""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from diffshard.experts.expert_moves import ExpertMoves, Place


def exchange(
    parts: jax.Array, axis: str, groups: Sequence[Sequence[int]], held: Sequence[int], *, to_holders: bool
) -> jax.Array:
    """Sends part j of `[N, S, ...]` to the j-th device of one's group, and returns what the devices sent, alike.

    Args:
      parts: N is the size of the largest group; in smaller ones the last parts go nowhere, and are zeros afterwards.
      groups: devices along the axis, each in one group.
      held: how many of its S slots each device needs, `[H]`; permutes send no others.
      to_holders: whether slots are those of the device that receives, or of the one that sends.
    """
    sizes = {len(group) for group in groups}
    if sizes == {1}:
        return parts
    if len(sizes) == 1:
        return lax.all_to_all(
            parts, axis, 0, 0, axis_index_groups=None if len(groups) == 1 else list(map(list, groups)), tiled=True
        )
    member, size = member_table(groups)
    device = lax.axis_index(axis)
    own, own_size = jnp.asarray(member)[device], jnp.asarray(size)[device]
    received = jnp.zeros_like(parts).at[own].set(parts[own])
    ends = [0, *sorted(set(held) - {0})]
    for step in range(1, len(parts)):
        sent = parts[(own + step) % own_size]
        sender = jnp.where(step < own_size, (own - step) % own_size, len(parts))  # past the end: nowhere
        pairs = [(group[i], group[(i + step) % len(group)]) for group in groups if len(group) > step
                 for i in range(len(group))]  # fmt: skip
        for start, end in pairwise(ends):
            with_slots = [pair for pair in pairs if held[pair[int(to_holders)]] >= end]
            if with_slots:
                arrived = lax.ppermute(sent[start:end], axis, with_slots)
                received = received.at[sender, start:end].set(arrived, mode="drop")
    return received


def member_table(groups: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Returns for each device its number in its group and the size of this group, `[H]` each."""
    num_devices = sum(map(len, groups))
    member, size = np.empty(num_devices, np.int32), np.empty(num_devices, np.int32)
    for group in groups:
        member[list(group)], size[list(group)] = np.arange(len(group)), len(group)
    return member, size


def group_table(groups: Sequence[Sequence[int]]) -> np.ndarray:
    """Returns the group of each device, `[H]`."""
    owner = np.empty(sum(map(len, groups)), np.int32)
    for index, group in enumerate(groups):
        owner[list(group)] = index
    return owner


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def with_summed_gradients(ring: "GroupRing", axis: str, arrays: Any) -> Any:
    """Returns the arrays `[S, ...]`, whose gradients are the sums over all copies of an expert."""
    del ring, axis
    return arrays


def _forward(ring: "GroupRing", axis: str, arrays: Any) -> tuple[Any, None]:
    del ring, axis
    return arrays, None


def _backward(ring: "GroupRing", axis: str, residuals: None, gradients: Any) -> tuple[Any]:
    del residuals
    return (jax.tree.map(lambda gradient: ring.summed(gradient, axis), gradients),)


with_summed_gradients.defvjp(_forward, _backward)


class GroupRing:
    """Sums over the copies of each expert in all groups, by a ring of groups.

    Args:
      groups: devices along the axis, each in one group.
      places: where each group holds each expert, `[G]` tuples `[X]`.
      num_slots: S.
    """

    def __init__(self, groups: Sequence[Sequence[int]], places: Sequence[Sequence[Place]], num_slots: int):
        self._num_groups, self._owner = len(groups), group_table(groups)
        moves = [
            move
            for g in range(len(groups))
            for move in zip(places[g], places[(g + 1) % len(groups)], strict=True)
        ]  # fmt: skip
        self._to_next_group = ExpertMoves(len(self._owner), moves, num_slots)

    def summed(self, array: jax.Array, axis: str) -> jax.Array:
        """Returns a device's sums `[S, ...]`; all copies get the same bits."""
        num_slots, num_groups = len(array), self._num_groups
        numbers = array.reshape(num_slots, -1)
        missing = -numbers.shape[1] % num_groups
        chunks = jnp.pad(numbers, ((0, 0), (0, missing))).reshape(num_slots, num_groups, -1)
        group = jnp.asarray(self._owner)[lax.axis_index(axis)]

        def send(chunks: jax.Array, number: jax.Array) -> jax.Array:
            return self._to_next_group(lax.dynamic_index_in_dim(chunks, number % num_groups, 1, keepdims=False), axis)

        def add(step: jax.Array, chunks: jax.Array) -> jax.Array:
            arrived = send(chunks, group - step)
            return chunks.at[:, (group - step - 1) % num_groups].add(arrived)

        def pass_on(step: jax.Array, chunks: jax.Array) -> jax.Array:
            arrived = send(chunks, group + 1 - step)
            return chunks.at[:, (group - step) % num_groups].set(arrived)

        chunks = lax.fori_loop(0, num_groups - 1, add, chunks)
        chunks = lax.fori_loop(0, num_groups - 1, pass_on, chunks)
        return chunks.reshape(num_slots, -1)[:, : numbers.shape[1]].reshape(array.shape)

"""Loads of experts from the routing of a training, and the moves of experts that follow from them.

Experts travel between devices in rounds, in each of which a device sends at most one and receives at most one. Moves
are edges of a bipartite graph, from devices that send to devices that receive. By König's theorem they can be coloured
with as many colours as the busiest device has moves, such that moves of one colour share no device: each colour is one
`lax.ppermute` of one expert. So nothing is sent but the experts that move.

Letters for sizes: X experts, H devices along the axis, S slots of a device.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_LEAST_SHARE = 0.01
"""The least load of an expert as a share of the mean load: an expert that hardly any token chooses must have some work.

Chosen by hand."""


class ExpertLoads(NamedTuple):
    """An exponential average of how many tokens choose each expert; a part of a training's state.

    >>> loads = ExpertLoads.init(2).update(jnp.array([30, 10]), decay=0.5).update(jnp.array([10, 10]), decay=0.5)
    >>> loads.work().round(3)
    array([1.25, 0.75])

    Attributes:
      average: of tokens, `[X]`, not yet divided by `weight`.
      weight: of all updates together, less than 1.
    """

    average: jax.Array
    weight: jax.Array

    @classmethod
    def init(cls, num_experts: int) -> "ExpertLoads":
        """Returns loads before the first step."""
        return cls(jnp.zeros(num_experts), jnp.zeros(()))

    def update(self, num_chosen: jax.Array, *, decay: float = 0.9) -> "ExpertLoads":
        """Returns the loads after a step; runs inside `jax.jit` as well.

        Args:
          num_chosen: tokens that chose each expert, `[X]`, as `RoutedTokens` has them.
          decay: how much earlier steps count, from 0 to less than 1.

        Raises:
          ValueError: the shape is another, or `decay` breaks its rule.
        """
        if jnp.shape(num_chosen) != self.average.shape:
            raise ValueError(f"`num_chosen` must be {list(self.average.shape)}, got {list(jnp.shape(num_chosen))}.")
        if not 0 <= decay < 1:
            raise ValueError(f"`decay` must be from 0 to less than 1, not {decay!r}.")
        return ExpertLoads(
            decay * self.average + (1 - decay) * num_chosen, decay * self.weight + (1 - decay)
        )  # fmt: skip

    def work(self) -> np.ndarray:
        """Returns the load of each expert relative to the mean one, `[X]`, for `assign_experts`; all are positive.

        Before the first step all are 1.
        """
        average = np.asarray(self.average, float)
        if not average.sum() > 0:
            return np.ones(len(average))
        return np.maximum(average / average.mean(), _LEAST_SHARE)


class Place(NamedTuple):
    """Where an expert is."""

    device: int
    slot: int


class ExpertMoves:
    """A program for each device that moves slots of arrays `[S, ...]` over a mesh axis.

    Args:
      num_devices: H.
      moves: from where to where; no two of them end in the same place.
      num_slots: S of the devices afterwards.
    """

    def __init__(self, num_devices: int, moves: Iterable[tuple[Place, Place]], num_slots: int):
        self._num_slots = num_slots
        moves = list(moves)
        self._staying = [(source, target) for source, target in moves if source.device == target.device]
        travelling = [(source, target) for source, target in moves if source.device != target.device]
        colours = edge_colours([(source.device, target.device) for source, target in travelling], num_devices)
        self.rounds: list[list[tuple[Place, Place]]] = [[] for _ in range(max(colours, default=-1) + 1)]
        for move, colour in zip(travelling, colours, strict=True):
            self.rounds[colour].append(move)
        self._num_devices = num_devices

    def __call__(self, array: jax.Array, axis: str) -> jax.Array:
        """Returns a device's slots `[num_slots, ...]` after the moves; slots that nothing moves to are zeros."""
        device = lax.axis_index(axis)
        moved = jnp.zeros((self._num_slots, *array.shape[1:]), array.dtype)
        if self._staying:
            source = np.zeros((self._num_devices, self._num_slots), np.int32)
            stays = np.zeros((self._num_devices, self._num_slots), bool)
            for (own, slot), target in self._staying:
                source[own, target.slot], stays[own, target.slot] = slot, True
            mask = jnp.asarray(stays)[device].reshape(-1, *[1] * (array.ndim - 1))
            moved = jnp.where(mask, array[jnp.asarray(source)[device]], moved)
        for one_round in self.rounds:
            send = np.zeros(self._num_devices, np.int32)
            receive = np.full(self._num_devices, self._num_slots, np.int32)  # nowhere
            for source, target in one_round:
                send[source.device], receive[target.device] = source.slot, target.slot
            pairs = [(source.device, target.device) for source, target in one_round]
            sent = lax.dynamic_index_in_dim(array, jnp.asarray(send)[device], keepdims=False)
            moved = moved.at[jnp.asarray(receive)[device]].set(lax.ppermute(sent, axis, pairs), mode="drop")
        return moved


def edge_colours(edges: Sequence[tuple[int, int]], num_devices: int) -> list[int]:
    """Returns a colour for each edge of a bipartite graph, as few as the largest degree; edges at a device differ."""
    colours: list[int] = []
    # By side, device and colour, the edge that has it.
    edge_at: list[list[dict[int, int]]] = [[{} for _ in range(num_devices)] for _ in range(2)]
    for index, ends in enumerate(edges):
        free = [next(c for c in range(index + 1) if c not in edge_at[side][ends[side]]) for side in range(2)]
        if free[0] in edge_at[1][ends[1]]:
            _swap_path(edges, colours, edge_at, ends[1], free)
        colours.append(free[0])
        for side in range(2):
            edge_at[side][ends[side]][free[0]] = index
    return colours


def _swap_path(
    edges: Sequence[tuple[int, int]],
    colours: list[int],
    edge_at: list[list[dict[int, int]]],
    receiver: int,
    pair: Sequence[int],
) -> None:
    """Swaps two colours on the path of these from a receiver, after which the first one is free there."""
    path, side, device, colour = [], 1, receiver, pair[0]
    while colour in edge_at[side][device]:
        index = edge_at[side][device][colour]
        path.append(index)
        side = 1 - side
        device = edges[index][side]
        colour = pair[1] if colour == pair[0] else pair[0]
    for index in path:
        for side in range(2):
            edge_at[side][edges[index][side]].pop(colours[index], None)
    for index in path:
        colours[index] = pair[1] if colours[index] == pair[0] else pair[0]
        for side in range(2):
            edge_at[side][edges[index][side]][colours[index]] = index

"""The program of a layer of experts that all devices run.

A token goes into the buffer of its expert, the buffers travel to the experts' devices in the same group, and the
results come back. A device computes only the experts that it holds: it takes the branch for its number of experts, so
that a slow device with few experts is done early.

Letters for sizes: S slots of a device, X experts, T tokens of a device, M numbers of a token, K experts that a token
goes to, C tokens in a buffer, G groups, N devices of the largest group.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh

from diffshard.experts.exchanges import GroupRing, exchange, group_table, member_table, with_summed_gradients
from diffshard.experts.expert_moves import Place
from diffshard.experts.layout_checks import check_expert
from search_spaces.communication.layers.expert import best_experts, buffer_positions

Expert = Callable[[Any, jax.Array], jax.Array]
"""One expert's function of its parameters and tokens `[n, M]`."""


class RoutedTokens(NamedTuple):
    """What a layer of experts returns.

    Attributes:
      results: of each token's experts, weighted by their gates, `[T, M]`.
      num_chosen: how many tokens chose each expert, `[X]` int32, with those for which there was no room.
      num_dropped: how many choices found no room, int32.
    """

    results: jax.Array
    num_chosen: jax.Array
    num_dropped: jax.Array


class Layout(Protocol):
    """What a program asks of an `ExpertLayout`."""

    @property
    def mesh(self) -> Mesh | AbstractMesh: ...  # noqa: D102
    @property
    def axis(self) -> str: ...  # noqa: D102
    @property
    def groups(self) -> tuple[tuple[int, ...], ...]: ...  # noqa: D102
    @property
    def experts(self) -> tuple[tuple[int, ...], ...]: ...  # noqa: D102
    @property
    def places(self) -> tuple[tuple[Place, ...], ...]: ...  # noqa: D102
    @property
    def num_slots(self) -> int: ...  # noqa: D102
    @property
    def num_experts(self) -> int: ...  # noqa: D102


class LayerProgram:
    """A layer of experts for `shard_map`."""

    def __init__(self, layout: Layout, expert: Expert, capacity: int, num_chosen: int):
        self._layout, self._expert, self._capacity, self._num_chosen = layout, expert, capacity, num_chosen
        self._most_members = max(map(len, layout.groups))
        self._held = [len(own) for own in layout.experts]

    def __call__(self, arrays: Any, tokens: jax.Array, logits: jax.Array) -> RoutedTokens:
        """Runs the layer for one device's tokens `[T, M]`; its arrays are `[S, ...]`."""
        layout, capacity = self._layout, self._capacity
        if len(layout.groups) > 1:
            ring = GroupRing(layout.groups, layout.places, layout.num_slots)
            arrays = with_summed_gradients(ring, layout.axis, arrays)
        gates, chosen_experts = best_experts(logits, self._num_chosen)
        positions = buffer_positions(chosen_experts, layout.num_experts)
        has_room = positions < capacity
        num_rows = self._most_members * layout.num_slots * capacity
        own_group = jnp.asarray(group_table(layout.groups))[lax.axis_index(layout.axis)]
        buffer = jnp.asarray(self._buffer_table)[own_group][chosen_experts]
        rows = jnp.where(has_room, buffer * capacity + positions, num_rows)
        with jax.named_scope("dispatch"):
            buffers = jnp.zeros((num_rows, tokens.shape[1]), tokens.dtype).at[rows].add(tokens[:, None], mode="drop")
            arrived = self._exchange(buffers.reshape(self._most_members, layout.num_slots, capacity, -1), True)
        results = self._compute(arrays, self._by_slot(arrived))
        with jax.named_scope("combine"):
            to_senders = results.reshape(layout.num_slots, self._most_members, capacity, -1).swapaxes(0, 1)
            returned = self._exchange(to_senders, False).reshape(num_rows, -1)
        chosen_rows = returned.at[rows].get(mode="fill", fill_value=0)
        counts = jnp.zeros(layout.num_experts + 1, jnp.int32).at[chosen_experts].add(1)
        counts = counts.at[-1].set((~has_room).sum(dtype=jnp.int32))
        counts = lax.psum(counts, tuple(layout.mesh.axis_names))  # one message for both
        return RoutedTokens(
            jnp.einsum("tk,tkm->tm", gates.astype(chosen_rows.dtype), chosen_rows), counts[:-1], counts[-1]
        )

    @cached_property
    def _buffer_table(self) -> np.ndarray:
        """The buffer of each expert in each group, `[G, X]`: by its device's number in the group, then by slot."""
        member, _ = member_table(self._layout.groups)
        num_slots = self._layout.num_slots
        return np.array([[member[p.device] * num_slots + p.slot for p in row] for row in self._layout.places], np.int32)

    def _exchange(self, parts: jax.Array, to_holders: bool) -> jax.Array:
        return exchange(parts, self._layout.axis, self._layout.groups, self._held, to_holders=to_holders)

    def _by_slot(self, arrived: jax.Array) -> jax.Array:
        """Returns buffers `[N, S, C, M]` as `[S, N·C, M]`."""
        return arrived.swapaxes(0, 1).reshape(self._layout.num_slots, self._most_members * self._capacity, -1)

    def _compute(self, arrays: Any, tokens: jax.Array) -> jax.Array:
        """Applies a device's own experts, those of its first slots; `tokens` is `[S, N·C, M]`, and so are results."""
        num_slots, held = self._layout.num_slots, self._held
        result = jax.eval_shape(self._expert, jax.tree.map(lambda x: x[0], arrays), tokens[0])
        check_expert(result, tokens.shape[1])
        counts = sorted(set(held))

        def first(count: int, arrays: Any, tokens: jax.Array) -> jax.Array:
            if not count:
                return jnp.zeros((num_slots, *result.shape), result.dtype)
            results = jax.vmap(self._expert)(jax.tree.map(lambda x: x[:count], arrays), tokens[:count])
            return jnp.pad(results, ((0, num_slots - count), *[(0, 0)] * len(result.shape)))

        if len(counts) == 1:
            return first(counts[0], arrays, tokens)
        branch = jnp.asarray([counts.index(count) for count in held])[lax.axis_index(self._layout.axis)]
        branches = [lambda arrays, tokens, count=count: first(count, arrays, tokens) for count in counts]
        return lax.switch(branch, branches, arrays, tokens)

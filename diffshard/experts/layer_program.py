"""The program of a layer of experts that all devices run.

A token goes into the buffer of its expert, the buffers travel to the experts' devices in the same group, and the
results come back. A device computes only the experts that it holds: it takes the branch for its number of experts, so
that a slow device with few experts is done early.

Letters for sizes: S slots of a device, X experts, T tokens of a device, M numbers of a token, K experts that a token
goes to, C tokens in a buffer, G groups, N devices of the largest group.

Groups lie along one mesh axis. Inside of groups of one size tokens travel by one all-to-all, with its device groups.
XLA has no all-to-all of groups of unequal size, so there they travel by permutes: in round s each device sends to the
s-th next one of its group, if there is one, and only the buffers of experts that there are. Nothing is sent to other
groups.

Copies of an expert in several groups add their gradients in a ring of groups. A device sends the gradient of each of
its experts to the device that holds the expert in the next group, by `ExpertMoves`; as in any ring all-reduce, each
expert's numbers are cut into as many chunks as there are groups, so that 2 (G - 1) / G of its bytes are sent.

Letters for sizes: H devices along the axis, G groups, N devices of the largest group, S slots of a device.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh

from cost.real_numbers import PositiveAmount, checked_number, whole_number
from diffshard.experts.expert_moves import ExpertMoves, Place
from search_spaces.communication.two_layers import best_experts, buffer_positions


def check_layout(
    axis_sizes: Mapping[str, int], axis: str, groups: Sequence[Sequence[int]], experts: Sequence[Sequence[int]]
) -> None:
    """Raises `ValueError` unless groups divide the devices along an axis, and each holds each expert once."""
    if axis not in axis_sizes:
        raise ValueError(f"`mesh` has no axis {axis!r}; its axes are {tuple(axis_sizes)}.")
    num_devices = axis_sizes[axis]
    if len(experts) != num_devices:
        raise ValueError(
            f"`experts` must have an entry for each of the {num_devices} devices of {axis!r}, not {len(experts)}."
        )
    if sorted(device for group in groups for device in group) != list(range(num_devices)) or not all(groups):
        raise ValueError(f"`groups` must have each of the {num_devices} devices of {axis!r} once, got {groups}.")
    below = sorted({x for own in experts for x in own if x < 0})
    if below:
        raise ValueError(f"`experts` must be numbered from 0, got {below[0]}.")
    num_experts = max((x for own in experts for x in own), default=-1) + 1
    if not num_experts:
        raise ValueError("`experts` must have at least one expert.")
    for group in groups:
        held = [x for device in group for x in experts[device]]
        missing = sorted(set(range(num_experts)).difference(held))
        twice = sorted({x for x in held if held.count(x) > 1})
        if missing or twice:
            raise ValueError(
                f"`experts` must give the group {tuple(group)} each of the {num_experts} experts once; missing are "
                f"{missing}, several times there are {twice}."
            )


def checked_experts(experts: Any) -> tuple[tuple[int, ...], ...]:
    """Returns the experts of each device as whole numbers; raises `ValueError` where they are something else."""
    try:
        numbers = [[whole_number(x) for x in own] for own in experts]
    except TypeError:
        numbers = [[None]]
    if any(x is None for own in numbers for x in own):
        raise ValueError(f"`experts` must be a list of whole numbers for each device, not {experts!r}.")
    return tuple(tuple(int(x) for x in own if x is not None) for own in numbers)


def check_movable(arrays: Any, num_rows: int, what: str) -> None:
    """Raises `ValueError` unless each array of a tree begins with `num_rows`; `what` these are, for the message."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(arrays):
        if jnp.shape(leaf)[:1] != (num_rows,):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise ValueError(
                f"The array{f' {name!r}' if name else ''} must begin with the {num_rows} {what}; its shape is "
                f"{jnp.shape(leaf)}."
            )


def check_layer(
    num_experts: int, num_devices: int, tokens: jax.Array, logits: jax.Array, num_chosen: Any, capacity_factor: Any
) -> None:
    """Raises `ValueError` where the arguments of a layer do not fit."""
    if tokens.ndim != 2 or logits.shape != (len(tokens), num_experts):
        raise ValueError(
            f"`tokens` must be [T, M] and `logits` [T, {num_experts}], got {tokens.shape} and {logits.shape}."
        )
    for name, array in (("tokens", tokens), ("logits", logits)):
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"`{name}` must be floating point numbers, not {array.dtype}.")
    if not len(tokens) or len(tokens) % num_devices:
        raise ValueError(
            f"`tokens` must be a multiple of the {num_devices} devices of the mesh, got {len(tokens)}. Pad them."
        )
    chosen = whole_number(num_chosen)
    if chosen is None or not 1 <= chosen <= num_experts:
        raise ValueError(f"`num_chosen` must be from 1 to the {num_experts} experts, not {num_chosen!r}.")
    checked_number("capacity_factor", capacity_factor, PositiveAmount)


def check_expert(result: Any, num_tokens: int) -> None:
    """Raises `ValueError` unless one expert returns a row for each of its tokens; `result` has shape and dtype."""
    shape = getattr(result, "shape", None)
    if shape is None or len(shape) != 2 or shape[0] != num_tokens:
        raise ValueError(
            f"`expert` must return one row for each of the {num_tokens} tokens that it gets, [{num_tokens}, M], got "
            f"{f'a {type(result).__name__}' if shape is None else shape}."
        )
    if not jnp.issubdtype(result.dtype, jnp.floating):
        raise ValueError(f"`expert` must return floating point numbers, not {result.dtype}.")


def checked_names(names: Sequence[str] | None, state: Any, num_rows: int) -> frozenset[str] | None:
    """Returns the names of the arrays of experts in a state; None for all arrays."""
    if isinstance(names, str):
        raise ValueError(f"`names` must be a list of names, not the text {names!r}.")
    chosen = None if names is None else frozenset(names)
    found = set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        keys = _keys(path)
        if chosen is None or chosen & keys:
            found |= keys
            check_movable(
                {jax.tree_util.keystr(path, simple=True, separator="/"): leaf}, num_rows, "slots of all devices"
            )
    if chosen is not None and chosen - found:
        raise ValueError(f"`names` has {sorted(chosen - found)}, and no array of `state` has such a name.")
    return chosen


def map_named(function: Callable[[Any], Any], state: Any, names: frozenset[str] | None) -> Any:
    """Applies a function to the list of a state's leaves that have one of the names; all others stay."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(state)
    chosen = [index for index, (path, _) in enumerate(leaves) if names is None or names & _keys(path)]
    results = [leaf for _, leaf in leaves]
    for index, result in zip(chosen, function([results[index] for index in chosen]), strict=True):
        results[index] = result
    return jax.tree.unflatten(structure, results)


def _keys(path: Sequence[Any]) -> frozenset[str]:
    return frozenset(jax.tree_util.keystr((key,), simple=True) for key in path)


Expert = Callable[[Any, jax.Array], jax.Array]
"""One expert's function of its parameters and tokens `[n, M]`."""


class RoutedTokens(NamedTuple):
    """The results of a layer of experts.

    Attributes:
      results: of each token's experts, weighted by their gates, `[T, M]`.
      num_chosen: how many tokens chose each expert, `[X]` int32, with those for which there was no room.
      num_dropped: how many choices found no room, int32.
    """

    results: jax.Array
    num_chosen: jax.Array
    num_dropped: jax.Array


class Layout(Protocol):
    """The part of an `ExpertLayout` that a program reads."""

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

"""`ExpertLayout`: where experts lie on a mesh; it runs layers of experts there, and moves experts.

Each device has as many slots for experts as the fullest one, because parts of a JAX array are equally large.

Letters for sizes: D devices of the mesh, H devices along the axis of experts, S slots of a device, X experts, T tokens,
M numbers of a token, C tokens in a buffer.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from diffshard.base import PlanError
from diffshard.experts.expert_moves import ExpertMoves, Place
from diffshard.experts.layer_program import (
    Expert,
    LayerProgram,
    RoutedTokens,
    check_layer,
    check_layout,
    check_movable,
    checked_experts,
    checked_names,
    map_named,
)
from search_spaces.communication.two_layers import buffer_tokens


@dataclass(frozen=True)
class ExpertLayout:
    """Where experts lie on a mesh. Made by `GroupPlan.layout` and `ExpertAssignment.layout`.

    Arrays of experts `[X, ...]` are held as `[H·S, ...]`, split over the axis: each device has S slots, and those that
    it does not need are zeros. Where several groups lie along the axis, each has a copy of all experts; the layer's
    backward pass adds the gradients of all copies, so that an optimiser that works number by number keeps them equal.

    Attributes:
      mesh: the devices; tokens are split over all of its axes.
      axis: the mesh axis along which experts lie; over other axes they are copied.
      groups: the devices along the axis that hold all experts together, each in one group.
      experts: those of each device along the axis, `[H]` tuples.

    Raises:
      ValueError: the groups do not divide the axis, or one of them does not hold each expert once.
    """

    mesh: Mesh | AbstractMesh
    axis: str
    groups: tuple[tuple[int, ...], ...]
    experts: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        check_layout(dict(self.mesh.shape), self.axis, self.groups, self.experts)

    @property
    def num_experts(self) -> int:
        """X."""
        return sum(len(self.experts[device]) for device in self.groups[0])

    @property
    def num_slots(self) -> int:
        """S, the experts of the fullest device."""
        return max(map(len, self.experts))

    @property
    def spec(self) -> PartitionSpec:
        """The sharding of experts' arrays, `[H·S, ...]`."""
        return PartitionSpec(self.axis)

    @property
    def token_spec(self) -> PartitionSpec:
        """The sharding of tokens, `[T, M]`: over all axes of the mesh."""
        return PartitionSpec(tuple(self.mesh.axis_names))

    @property
    def places(self) -> tuple[tuple[Place, ...], ...]:
        """Where each group holds each expert, `[G]` tuples `[X]`."""
        return tuple(self._places(group) for group in self.groups)

    def _places(self, group: Sequence[int]) -> tuple[Place, ...]:
        places = {x: Place(device, slot) for device in group for slot, x in enumerate(self.experts[device])}
        return tuple(places[x] for x in range(self.num_experts))

    def hold(self, params: Any) -> Any:
        """Returns arrays of all experts as they are held, `[X, ...]` to `[H·S, ...]`; runs inside `jax.jit` as well.

        Raises:
          ValueError: an array does not begin with the X experts.
        """
        check_movable(params, self.num_experts, "experts")
        rows = np.full((len(self.experts), self.num_slots), self.num_experts)  # past the end: zeros
        for device, own in enumerate(self.experts):
            rows[device, : len(own)] = own
        return jax.tree.map(lambda x: jnp.asarray(x).at[rows.ravel()].get(mode="fill", fill_value=0), params)

    def shard(self, params: Any) -> Any:
        """Returns arrays of all experts on the devices that hold them, `[X, ...]` to `[H·S, ...]`.

        Raises:
          ValueError: as `hold`.
          PlanError: the layout's devices are not here.
        """
        if not isinstance(self.mesh, Mesh):
            raise PlanError("The layout has no devices to put experts on: its mesh is abstract. Make it of a `Mesh`.")
        return jax.jit(self.hold, out_shardings=NamedSharding(self.mesh, self.spec))(params)

    def unshard(self, arrays: Any) -> Any:
        """Returns the arrays of all experts of the first group, `[H·S, ...]` to `[X, ...]`; runs inside `jax.jit`.

        Raises:
          ValueError: an array does not begin with the H·S slots.
        """
        check_movable(arrays, self._num_rows, "slots of all devices")
        rows = np.array([place.device * self.num_slots + place.slot for place in self.places[0]])
        return jax.tree.map(lambda x: jnp.asarray(x)[rows], arrays)

    def apply(
        self,
        expert: Expert,
        arrays: Any,
        tokens: jax.Array,
        logits: jax.Array,
        *,
        num_chosen: int = 2,
        capacity_factor: float = 2.0,
    ) -> RoutedTokens:
        """Applies to each token its best experts, weighted by their gates; runs inside of `jax.jit` and `jax.grad`.

        >>> routed = layout.apply(lambda w, x: jax.nn.gelu(x @ w["up"]) @ w["down"], arrays, x, x @ gate)

        Each device gives each expert a buffer of C of its T / D tokens, where C = capacity factor · tokens · chosen /
        experts, rounded up, and at most all tokens. First choices are placed before second ones, and early tokens
        before late ones; a token that finds a buffer full gets zeros from this expert. The gates of several chosen
        experts sum to one; the gate of a single one is its probability.

        Args:
          expert: one expert's function of its parameters and any number n of tokens `[n, M]`; returns `[n, M]`, each
            row a function of its token alone.
          arrays: of the experts, as they are held, `[H·S, ...]`.
          tokens: `[T, M]`; D divides T.
          logits: of the gates, `[T, X]`.
          num_chosen: experts for each token.
          capacity_factor: C for each token that an expert gets if all get equally many.

        Returns:
          The results, how many tokens chose each expert, and how many choices were dropped.

        Raises:
          ValueError: shapes do not fit, D does not divide T, a number breaks its rule, or the expert is no function or
            returns something else.
        """
        tokens, logits = jnp.asarray(tokens), jnp.asarray(logits)
        check_movable(arrays, self._num_rows, "slots of all devices")
        if not callable(expert):
            raise ValueError(f"`expert` must be a function of an expert's parameters and its tokens, not {expert!r}.")
        check_layer(self.num_experts, self.mesh.size, tokens, logits, num_chosen, capacity_factor)
        capacity = buffer_tokens(capacity_factor, len(tokens) // self.mesh.size, num_chosen, self.num_experts)

        def program(arrays: Any, tokens: jax.Array, logits: jax.Array) -> RoutedTokens:
            return LayerProgram(self, expert, capacity, num_chosen)(arrays, tokens, logits)

        return jax.shard_map(
            program,
            mesh=self.mesh,
            in_specs=(self.spec, self.token_spec, self.token_spec),
            out_specs=RoutedTokens(self.token_spec, PartitionSpec(), PartitionSpec()),  # pyright: ignore[reportArgumentType]
            check_vma=False,
        )(arrays, tokens, logits)

    def move(self, state: Any, target: "ExpertLayout", *, names: Sequence[str] | None = None) -> Any:
        """Moves experts to where another layout has them; sends only those that change their device.

        The state may be parameters, or an optimiser's state with arrays of the same names: `names` says which keys of
        dictionaries, attributes and so on lead to arrays of experts. All else is returned as it is.

        Args:
          state: arrays on the mesh, those of experts `[H·S, ...]`.
          target: a layout on the same mesh and axis, with the same groups.
          names: of the arrays of experts; None means all arrays.

        Returns:
          The state, with the arrays of experts `[H·S', ...]` for the target's slots.

        Raises:
          ValueError: the layouts do not fit each other, no array has a name, or an array does not begin with the slots.
        """
        if not isinstance(target, ExpertLayout):
            raise ValueError(f"`target` must be an ExpertLayout, not {target!r}.")
        for field in ("mesh", "axis", "groups", "num_experts"):
            if getattr(self, field) != getattr(target, field):
                raise ValueError(
                    f"`target` has another `{field}`: {getattr(target, field)}, not {getattr(self, field)}. Move by "
                    "`target.shard(layout.unshard(...))`."
                )
        chosen_names = checked_names(names, state, self._num_rows)
        moves = [
            move for old, new in zip(self.places, target.places, strict=True) for move in zip(old, new, strict=True)
        ]  # fmt: skip
        program = ExpertMoves(len(self.experts), moves, target.num_slots)

        def moved(array: jax.Array) -> jax.Array:
            return program(array, self.axis)

        run = jax.jit(
            lambda arrays: jax.tree.map(
                jax.shard_map(moved, mesh=self.mesh, in_specs=self.spec, out_specs=self.spec, check_vma=False), arrays
            )
        )
        return map_named(run, state, chosen_names)

    def with_experts(self, experts: Sequence[Sequence[int]]) -> "ExpertLayout":
        """Returns a layout with the same experts on other devices of the axis, `[H]` sequences.

        Raises:
          ValueError: there are more or fewer experts than before, or a group does not hold each of them once.
        """
        target = dataclasses.replace(self, experts=checked_experts(experts))
        if target.num_experts != self.num_experts:
            raise ValueError(
                f"`experts` must be the {self.num_experts} experts of this layout, not {target.num_experts}. "
                "Make an `ExpertLayout` for others."
            )
        return target

    @property
    def _num_rows(self) -> int:
        return len(self.experts) * self.num_slots

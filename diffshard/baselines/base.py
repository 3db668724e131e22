"""The vocabulary of experts: what they know about arguments and mesh, what they give, and why they may not apply."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jax.sharding import PartitionSpec

from diffshard.plans.base import LogicalAxisRules


class DoesNotApplyError(ValueError):
    """An expert's rules do not fit a function or mesh; the message is a sentence that says why."""


class Argument(NamedTuple):
    """One array among the arguments of a function.

    Attributes:
      path: its place, for messages.
      names: the keys on the way to it, outermost first.
      shape: of the whole array.
      is_state: whether it belongs to what the function updates; all other arguments are batch.
      is_key: whether it is a random key or a part of one.
      logical_axes: the logical axis of each dimension, where flax's metadata name them; else None.
    """

    path: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    is_state: bool
    is_key: bool = False
    logical_axes: tuple[str | None, ...] | None = None


class BaselineMesh(NamedTuple):
    """A mesh as experts see it.

    Attributes:
      sizes: devices along each axis, in order.
      inner: the axis with the fastest links, along which devices are neighbours.
    """

    sizes: Mapping[str, int]
    inner: str

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes."""
        return tuple(self.sizes)

    @property
    def outer(self) -> tuple[str, ...]:
        """The other axes, along which copies of a model are."""
        return tuple(axis for axis in self.sizes if axis != self.inner)

    def num_parts(self, axes: Sequence[str]) -> int:
        """Returns into how many parts an array is split by axes."""
        return math.prod(self.sizes[axis] for axis in axes)


class BaselineShardings(NamedTuple):
    """What an expert gives.

    Attributes:
      specs: for each argument how it is split.
      rules: by which mesh axes activations are split, by their logical axes.
    """

    specs: tuple[PartitionSpec, ...]
    rules: LogicalAxisRules

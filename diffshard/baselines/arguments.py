"""What experts can see of a function's arguments: names, shapes, flax's metadata, and which arrays are random keys."""

from collections.abc import Sequence

from diffshard.baselines.base import Argument
from diffshard.plans.base import LogicalAxes
from diffshard.sharding_search.call import Call, is_random_key


def describe_arguments(call: Call, is_state: Sequence[bool]) -> list[Argument]:
    """Returns what experts know about each array of the arguments of a call.

    Args:
      call: the arguments.
      is_state: for each array whether it is state.
    """
    return [
        Argument(name, keys, array.shape, state, is_random_key(array), _single_names(axes))
        for name, keys, array, state, axes in zip(
            call.paths, call.keys, call.arrays, is_state, call.logical_axes, strict=True
        )
    ]


def _single_names(axes: LogicalAxes | None) -> tuple[str | None, ...] | None:
    """Returns a name for each dimension; several mesh axes are none."""
    return None if axes is None else tuple(name if isinstance(name, str) else None for name in axes)

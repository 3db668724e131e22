"""What experts can see of a function's arguments: names, shapes, flax's metadata, and which arrays are random keys."""

from collections.abc import Sequence

from diffshard.experts.base import Argument
from diffshard.sharding_search.call import Call, is_random_key


def describe_arguments(call: Call, is_state: Sequence[bool]) -> list[Argument]:
    """Returns what experts know about each array of the arguments of a call.

    Args:
      call: the arguments.
      is_state: for each array whether it is state.
    """
    return [
        Argument(name, keys, array.shape, state, is_random_key(array), axes and tuple(map(_single_name, axes)))
        for name, keys, array, state, axes in zip(
            call.paths, call.keys, call.arrays, is_state, call.logical_axes, strict=True
        )
    ]


def _single_name(axes: str | tuple[str, ...] | None) -> str | None:
    """Returns the name of a dimension; several mesh axes are none."""
    return axes if isinstance(axes, str) else None

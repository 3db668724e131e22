"""Users' own mappings and callbacks on one device: what is called once for a function must not be called by all."""

from collections.abc import Sequence
from typing import Any, NoReturn

from jax import lax
from jax.extend import core

from search_spaces.replay import bind
from search_spaces.sharding.local_blocks import Blocks


def users_shard_map(equation: core.JaxprEqn, operands: Sequence[Any], source: str) -> list[Any]:
    """Runs the body of a user's own `shard_map`, which is written for blocks and names the mesh's axes.

    Args:
      equation: the mapping.
      operands: blocks.
      source: line of the user's code.

    Raises:
      ValueError: the `shard_map` tracks which values vary over which axes, as blocks in a device's program do not.
    """
    if equation.params.get("check_vma"):
        raise ValueError(
            f'`executor` "program" cannot run a `jax.shard_map` with `check_vma=True` ({source}). '
            'Give it `check_vma=False`, or take `executor="constraints"`.'
        )
    return list(core.jaxpr_as_fun(core.ClosedJaxpr(equation.params["jaxpr"], ()))(*operands))


def on_first_device(equation: core.JaxprEqn, operands: Sequence[Any], blocks: Blocks) -> list[Any]:
    """Runs a callback that has no results, such as `jax.debug.print`, on the first device of the mesh only."""
    is_first = blocks.index(range(len(blocks.axis_sizes))) == 0
    lax.cond(is_first, lambda *arrays: (bind(equation, arrays), None)[1], lambda *arrays: None, *operands)
    return []


def refused_callback(source: str) -> NoReturn:
    """Raises `ValueError` for a callback with effects and results, which every device would call."""
    raise ValueError(
        f'`executor` "program" cannot run a `jax.experimental.io_callback` ({source}), which every device would call. '
        'Take `executor="constraints"`.'
    )

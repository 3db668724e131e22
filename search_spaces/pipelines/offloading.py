"""Residuals that wait in the memory of the host.

What the backward program of a micro-batch reads that its forward program made is on the devices for every micro-batch
in flight. An offloaded residual leaves the forward program in pinned memory of the host and is read back from there by
the backward program, so that devices have it only while one of the two runs.
"""

from collections.abc import Iterable
from dataclasses import replace

import jax
import jax.numpy as jnp

from search_spaces.pipelines.stage_keys import Key, Label
from search_spaces.pipelines.stage_programs import StagedStep


def residuals_of(staged: StagedStep, stage: int) -> list[Key]:
    """Returns the keys of what the backward program of a micro-batch reads that its forward program made, in order."""
    forward, backward = (staged.programs.get(Label(kind, stage)) for kind in ("forward", "backward"))
    if forward is None or backward is None:
        return []
    made = {*forward.makes}
    return [key for key in backward.reads if key in made]


def can_be_offloaded(staged: StagedStep, key: Key) -> bool:
    """Tells whether an array may wait in the memory of the host: numbers of at least one dimension, no random keys."""
    aval = staged.avals[key]
    return bool(aval.shape) and not jnp.issubdtype(aval.dtype, jax.dtypes.extended)


def with_offloaded(staged: StagedStep, keys: Iterable[Key]) -> StagedStep:
    """Returns a step whose residuals with these keys are offloaded, and no others.

    Raises:
      ValueError: a key is no residual of any stage, or a single number or a random key.
    """
    offloaded = frozenset(keys)
    residuals = {key for stage in range(staged.num_stages) for key in residuals_of(staged, stage)}
    for key in offloaded:
        if key not in residuals:
            raise ValueError(f"`keys` has {key}, which no backward program reads from its forward program.")
        if not can_be_offloaded(staged, key):
            raise ValueError(f"`keys` has {key}, but {staged.avals[key]} cannot be offloaded: it has no dimension.")
    return replace(staged, offloaded=offloaded)

"""What one device does in a training step: what it has not sent, and selections that do not fit."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from search_spaces.communication.device_step import choice_as_indices, combine, partition_selection
from search_spaces.communication.strategies import EveryK, Exact
from tests.search_spaces.communication.small_communication import BATCH, KEY, PARAMS, SPACE, small_space


def test_what_the_cast_to_a_narrow_type_loses_is_kept_for_the_next_step():
    """In step 0 of every two nothing is sent, so that all of the gradients and of what was left before is left."""
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    space = small_space(params=params, strategies={"gradient": (Exact(), EveryK(2))})
    run = jax.jit(lambda s: space.loss_and_gradients(params, BATCH, (0, 0, 1, 1), s, KEY, 0)[1:])
    _, gradients = run(space.init_residuals(params))
    before = jax.tree.map(lambda x: x / 3, gradients)  # of more digits than bfloat16 has
    sent, residuals = run(before)
    assert not any(x.any() for x in jax.tree.leaves(sent))
    for name, kept in residuals.items():
        np.testing.assert_allclose(kept, gradients[name] + before[name], rtol=1e-6, atol=0)


def test_known_entries_of_a_selection_are_apart_from_traced_ones():
    weights = jnp.array([0.25, 0.75])
    selection = [0, jnp.int32(1), 2, weights[jnp.array([0, 0, 1, 1])]]
    static, dynamic = partition_selection(SPACE.groups, selection)
    assert static == [0, None, 2, None]
    assert [d is None for d in dynamic] == [True, False, True, False]
    for entry, given in zip(combine(static, dynamic), selection, strict=True):
        np.testing.assert_array_equal(entry, given)
    of_numpy: list[Any] = [np.int64(1), 0, 3, 2]
    assert choice_as_indices(SPACE.groups, of_numpy) == (1, 0, 3, 2)
    with pytest.raises(ValueError, match="must be a strategy's index, an int"):
        choice_as_indices(SPACE.groups, selection)

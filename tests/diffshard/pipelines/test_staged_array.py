"""A staged array behaves as the whole array where its parts need not be together."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffshard.staged_array import StagedArray

WHOLE = jnp.arange(30.0).reshape(5, 3, 2)
STAGED = StagedArray([WHOLE[:, :1], WHOLE[:, 1:]], 1)


def test_it_has_the_shape_and_the_elements_of_the_whole_array():
    assert (STAGED.shape, STAGED.dtype, STAGED.ndim) == (WHOLE.shape, WHOLE.dtype, WHOLE.ndim)
    assert (STAGED.size, STAGED.nbytes, len(STAGED), STAGED.sizes) == (30, 120, 5, (1, 2))
    np.testing.assert_array_equal(np.asarray(STAGED), WHOLE)
    assert np.asarray(STAGED, np.float16).dtype == np.float16
    np.testing.assert_array_equal(jnp.asarray(STAGED), WHOLE)
    with pytest.raises(ValueError, match="`copy` cannot be False"):
        np.array(STAGED, copy=False)


def test_it_is_one_leaf_of_a_pytree():
    tree = {"weights": STAGED, "step": jnp.int32(1)}
    assert jax.tree.leaves(tree)[1] is STAGED
    assert jax.block_until_ready(tree)["weights"] is STAGED
    np.testing.assert_array_equal(jax.device_get(tree)["weights"], WHOLE)

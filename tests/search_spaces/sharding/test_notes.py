"""What a plan's notes say of operations that are split less than their rules allow."""

import jax
import jax.numpy as jnp

import diffshard
from tests.search_spaces.sharding.small_spaces import array, space_of

doubled = diffshard.kernel(lambda x: 2 * x, "m n -> m n", name="doubled")


def in_tiles_of_4(x):
    if x.shape[0] % 4:
        raise ValueError("rows come in tiles of 4")
    return 2 * x


def test_parts_that_a_function_refuses_are_noted_with_the_axis_and_the_reason():
    tiled = diffshard.kernel(in_tiles_of_4, "m n -> m n", name="tiled")
    (note,) = space_of(tiled, array(8, 16), sizes=(2, 4)).notes
    assert note.startswith("kernel 'tiled' does not run on some parts over mesh axis 'y'")
    assert "rows come in tiles of 4" in note


def test_uneven_parts_are_not_noted():
    """Of 63 rows the rule allows padded parts, which a kernel never gets; its caller can change nothing of that."""
    assert space_of(doubled, array(6, 63), sizes=(2, 4)).notes == ()
    assert space_of(doubled, array(8, 64), sizes=(2, 4)).notes == ()


def test_what_has_no_rule_runs_whole_and_is_noted():
    def fn(x):
        return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((8,), jnp.float32), x)

    (note,) = space_of(fn, array(8)).notes
    assert note.startswith("pure_callback has no sharding rule and runs whole on every device (1x, ")

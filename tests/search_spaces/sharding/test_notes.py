"""What a plan's notes say of operations that are split less than their rules allow."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import diffshard
from tests.search_spaces.sharding.small_spaces import array, space_of

doubled = diffshard.kernel(lambda x: 2 * x, "m n -> m n", name="doubled")


def in_a_while_loop(fn):
    return lambda x: jax.lax.while_loop(lambda x: x.sum() < 0, fn, x)


def in_a_branch(fn):
    return lambda x: jax.lax.cond(x.sum() < 0, fn, lambda x: x, x)


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


@pytest.mark.parametrize(
    "flow", [jax.jit, jax.checkpoint, in_a_while_loop, in_a_branch], ids=lambda flow: flow.__name__
)
def test_what_runs_whole_within_control_flow_is_noted(flow):
    notes = [note for note in space_of(flow(lambda x: jnp.sort(x)), array(2**18)).notes if "whole" in note]
    assert [note.split(" (")[0] for note in notes] == ["sort runs whole on every device"]


def test_what_runs_whole_in_many_trips_is_noted_however_small():
    def notes_for(num_trips):
        return space_of(lambda x: jax.lax.fori_loop(0, num_trips, lambda i, x: jnp.sort(x), x), array(2**10)).notes

    assert notes_for(10) == ()
    (note,) = notes_for(1000)
    assert note.startswith("sort runs whole on every device (1x, ")


def test_what_a_program_has_no_form_for_is_noted_from_1024_elements_on():
    """A product of all numbers could be split, but the parts would have to be multiplied."""

    def notes_for(size, as_program):
        return dataclasses.replace(space_of(jnp.prod, array(size)), as_program=as_program).notes

    (note,) = notes_for(1024, True)
    assert note.startswith("reduce_prod runs whole on every device (1x, ")
    assert 'has no form on one device\'s part. `executor="constraints"` can split it.' in note
    assert notes_for(1024, False) == notes_for(1020, True) == ()

"""Donated and static arguments: searches for shardings and for pipelines take the same ones, those of `jax.jit`."""

import jax
import jax.numpy as jnp
import pytest

import diffshard


def step(state, batch, *, scale=1.0, is_exact=True):
    return state, batch.sum() * scale


def step_of_rest(state, *batches):
    return state


def searched(fn, **options):
    return diffshard.search(fn, jax.make_mesh((1,), ("data",)), hardware="h100", **options).options


def pipelined(fn, **options):
    cluster = diffshard.Cluster.from_devices(jax.devices()[:1], hardware="h100")
    return diffshard.search(fn, cluster, pipeline=diffshard.Pipeline(), **options).options


def jitted(fn, **options):
    return jax.jit(fn, **options).lower(jnp.ones(4), jnp.ones(4))


@pytest.mark.parametrize("front_end", [jitted, searched, pipelined])
@pytest.mark.parametrize(
    ("fn", "options"),
    [
        (step, {"donate_argnums": 5}),
        (step, {"donate_argnums": 2}),  # `scale` has no position
        (step, {"static_argnums": (3,)}),
        (step, {"donate_argnames": ("scale", "size")}),
        (step, {"donate_argnums": 0, "static_argnames": "state"}),
        (step, {"donate_argnames": "scale", "static_argnames": "scale"}),
        (step_of_rest, {"donate_argnames": "batches"}),
    ],
)
def test_what_jit_refuses_is_refused_before_a_call(front_end, fn, options):
    with pytest.raises(ValueError, match=r"_argn(um|ame)s"):
        front_end(fn, **options)


@pytest.mark.parametrize("front_end", [searched, pipelined])
def test_each_argument_counts_once_however_it_is_named(front_end):
    options = front_end(step, donate_argnums=(0, 0), donate_argnames=("state", "scale", "scale"))
    assert options.donate_argnums == (0,)
    assert sorted({*options.donate_argnames} - {"state"}) == ["scale"]


@pytest.mark.parametrize("front_end", [searched, pipelined])
def test_further_arguments_have_positions_and_no_name(front_end):
    assert front_end(step_of_rest, donate_argnums=7).donate_argnums == (7,)
    with pytest.raises(
        ValueError, match="`donate_argnames` has 'batches', which is all further arguments of step_of_rest"
    ):
        front_end(step_of_rest, donate_argnames="batches")

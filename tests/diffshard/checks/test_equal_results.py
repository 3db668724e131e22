"""Results in parallel beside results on one device."""

import jax
import jax.numpy as jnp
import pytest

from tests.diffshard.checks.megatron_block import SHAPES, block, block_mesh, parallel_block
from tests.equal_results import assert_equal_results


def _arguments():
    keys = jax.random.split(jax.random.key(0), 3)
    return tuple(jax.random.normal(key, shape) for key, shape in zip(keys, SHAPES, strict=True))


def test_equal_results_pass_with_their_difference():
    parallel = parallel_block(block_mesh())
    assert assert_equal_results(block, parallel, _arguments(), tolerance=1e-5) <= 1e-5


def test_donated_arguments_and_random_keys_are_copied():
    def step(state, key):
        return {"x": state["x"] + jax.random.normal(key, (4,)), "key": jax.random.fold_in(key, 1)}

    state = {"x": jnp.ones(4), "key": jax.random.key(1)}
    donating = jax.jit(step, donate_argnums=(0,))
    assert assert_equal_results(step, donating, (state, jax.random.key(2))) == 0.0
    assert float(state["x"].sum()) == 4.0


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda x: {"a": x, "b": x * 1.001}, r"\['b'\]"),
        (lambda x: {"a": x, "b": x.at[1].set(jnp.nan)}, r"\['b'\]"),
        (lambda x: {"a": x.astype(jnp.bfloat16), "b": x}, "type"),
        (lambda x: {"a": x}, "structure"),
    ],
)
def test_results_that_differ_are_refused(other, message):
    with pytest.raises(AssertionError, match=message):
        assert_equal_results(lambda x: {"a": x, "b": x}, jax.jit(other), (jnp.arange(4.0),))


def test_integers_must_be_equal():
    with pytest.raises(AssertionError, match="inf"):
        assert_equal_results(lambda x: x, lambda x: x + 1, (jnp.arange(4) + 10**6,), tolerance=0.5)

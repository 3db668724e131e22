"""Codes: error bounds, unbiased rounding, bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from search_spaces.communication.base import BFLOAT16, FLOAT8, FLOAT32, INT4, INT8, PRECISIONS
from search_spaces.communication.collectives import decode, encode, encoded_bytes

SIZE = 297
SIZE_OF_BLOCK = 100  # three of them, of an even size, and none longer than 128
SCALED = np.random.default_rng(0).normal(size=(2, SIZE)).astype(np.float32) * [[1.0], [1e-4]]
NUMBERS = jnp.asarray(SCALED, jnp.float32)


def _spacing(precision) -> np.ndarray:
    """The largest distance between neighbouring codes at each number."""
    x = np.abs(np.asarray(NUMBERS, np.float64))
    if precision in (FLOAT32, BFLOAT16):
        return 2.0 ** (np.floor(np.log2(x)) - precision.mantissa_bits)
    blocks = np.pad(x, [(0, 0), (0, 3)]).reshape(2, 3, SIZE_OF_BLOCK)
    scale = np.repeat(blocks.max(axis=2) / precision.largest, SIZE_OF_BLOCK, axis=1)[:, :SIZE]
    if precision is FLOAT8:
        return scale * 2.0 ** (np.maximum(np.floor(np.log2(x / scale)), -6) - 3)
    return scale


@pytest.mark.parametrize("precision", PRECISIONS, ids=lambda p: p.name)
def test_errors_are_within_half_a_step(precision):
    error = np.abs(decode(encode(NUMBERS, precision), precision, SIZE) - NUMBERS)
    assert (error <= 0.5001 * _spacing(precision)).all()
    assert (error.max() > 0) == (precision is not FLOAT32)


@pytest.mark.parametrize("precision", [BFLOAT16, FLOAT8, INT8, INT4], ids=lambda p: p.name)
def test_stochastic_rounding_is_unbiased_and_within_a_step(precision):
    random = precision.stochastic
    keys = jax.random.split(jax.random.key(0), 1000)
    decoded = jax.jit(jax.vmap(lambda key: decode(encode(NUMBERS, random, key), random, SIZE)))(keys)
    error = np.asarray(decoded, np.float64) - np.asarray(NUMBERS)
    step = _spacing(precision) * 1.0001
    assert (np.abs(error) <= step).all()
    assert (np.abs(error.mean(axis=0)) <= 5 * step / 2 / np.sqrt(len(keys)) + 1e-6 * np.abs(NUMBERS)).all()
    nearest = np.asarray(decode(encode(NUMBERS, precision), precision, SIZE)) - np.asarray(NUMBERS)
    assert np.abs(error.mean(axis=0)).mean() < 0.2 * np.abs(nearest).mean()


def test_codes_hold_what_is_a_code():
    whole = jnp.arange(-7, 8, dtype=jnp.float32) * 0.5
    np.testing.assert_array_equal(decode(encode(whole, INT4), INT4, 15), whole)
    assert encode(whole, INT4).nbytes == 8 + 4
    zero = jnp.zeros(5)
    np.testing.assert_array_equal(decode(encode(zero, INT8), INT8, 5), zero)


@pytest.mark.parametrize("precision", PRECISIONS, ids=lambda p: p.name)
def test_bytes_are_those_of_the_codes(precision):
    encoded = encode(NUMBERS[0], precision)
    assert encoded_bytes(precision, SIZE) == encoded.nbytes


def test_bytes_by_hand():
    assert encoded_bytes(INT4, 200) == 2 * (50 + 4)
    assert encoded_bytes(INT8, 33) == 34 + 4
    assert encoded_bytes(BFLOAT16, 200) == 400


def test_stochastic_rounding_needs_a_key():
    with pytest.raises(ValueError, match="`key` is None, but 'int8 stochastic' rounds stochastically"):
        encode(NUMBERS, INT8.stochastic)

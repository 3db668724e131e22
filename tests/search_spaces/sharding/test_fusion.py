"""Which operations share a kernel, worked by hand: arrays of 8 x 16 numbers of 4 bytes have 512 bytes, N."""

import jax
import jax.numpy as jnp
import pytest

from tests.search_spaces.sharding.small_spaces import array
from tests.search_spaces.sharding.test_kernels import COLUMNS, ROWS, N, X, moved

W = array(16, 16)
PRODUCT = N + 2 * N + N
"""Bytes of `x @ w`: both operands and the result."""


def test_products_read_from_memory_what_is_not_merely_a_view():
    assert moved(lambda x, w: (2 * x) @ w, X, W) == (2 * N + PRODUCT, 0, 2)
    assert moved(lambda x, w: jnp.exp(x).T @ w, array(16, 8), W) == (2 * N + PRODUCT, 0, 2)  # behind a view as well
    assert moved(lambda x, w: x.T @ w, array(16, 8), W) == (PRODUCT, 0, 1)


@pytest.mark.parametrize("update", [
    lambda table, row: jax.lax.dynamic_update_slice(table, row, (3, 0)),
    lambda table, row: table.at[3].set(row[0]),
])  # fmt: skip
def test_an_update_reads_the_buffer_that_it_writes_from_memory(update):
    row = array(1, 16)
    # The buffer is made by a kernel of its own, what is written into it by the kernel that writes it.
    num_bytes, _, num_kernels = moved(lambda table, row: update(table * 2, row * 2), X, row)
    assert num_kernels == 2
    assert num_bytes == pytest.approx(2 * N + 2 * N / 8, abs=8)  # and a place


def test_no_kernel_reaches_into_a_loop():
    def fn(a, b):
        doubled = 2 * a
        return jax.lax.scan(lambda c, _: (jnp.tanh(c + doubled), None), b, length=3)[0]

    assert moved(fn, X, X) == (2 * N + 3 * 3 * N, 0, 2)


def test_three_operands_are_read_again_by_a_second_kernel():
    def fn(least, x, most):
        y = jax.lax.clamp(least, x, most)
        return y.sum(0), y.sum(1)

    # Two kernels that read three arrays move 6 N. To write y and to read it twice moves 3 N after 3 N were read.
    assert moved(fn, X, X, X) == (6 * N + COLUMNS + ROWS, 0, 2)


def test_what_is_broadcast_is_read_as_the_elements_that_it_repeats():
    def fn(x, a, b):
        y = x + a + b
        return y.sum(0), y.sum(1), y.sum(), 2 * y

    # Of the rows a and b each of three kernels reads 64 bytes. The product is made by the kernel of a sum, which runs
    # over the same elements.
    row = array(16)
    assert moved(fn, X, row, row) == (3 * (N + 2 * COLUMNS) + COLUMNS + ROWS + 4 + N, 0, 3)
    # A slice of what is broadcast still reads all of a row.
    assert moved(lambda a: jnp.broadcast_to(a, (8, 16))[:2] * 2, row) == (COLUMNS + 2 * COLUMNS, 0, 1)


def test_a_transposed_array_is_written_for_a_second_kernel():
    def fn(x):
        y = x.T
        return y.sum(0), y.sum(1)

    assert moved(fn, X) == (2 * N + ROWS + N + COLUMNS, 0, 2)


def test_what_is_expensive_is_computed_once_for_kernels_that_are_merged():
    def fn(x):
        y = jnp.tanh(x)
        return y.sum(1), (y * y).sum(1)

    assert moved(fn, X) == (N + 2 * ROWS, 0, 1)


def test_kernels_between_which_another_one_stands_are_not_merged():
    def fn(x, w):
        y = jnp.exp(x)
        return y, x + y @ w

    # The sum reads x as the exponential does, but waits for the product, which waits for the exponential.
    assert moved(fn, X, W) == (2 * N + PRODUCT + 3 * N, 0, 3)


def test_kernels_over_different_elements_are_not_merged():
    assert moved(lambda x: (x[:2] * 2, jnp.exp(x)), X) == (2 * N / 4 + 2 * N, 0, 2)


def test_a_reshape_of_a_product_is_another_name_for_it():
    assert moved(lambda x, w: (x @ w).reshape(4, 32), X, W) == (PRODUCT, 0, 1)


def test_two_parts_of_a_fused_array_are_all_that_is_read_of_it():
    def fn(x):
        y = 2 * x
        return y[:4] + y[4:]

    assert moved(fn, X) == (N + N / 2, 0, 1)


def test_every_result_of_a_kernel_that_transposes_is_copied_to_its_place():
    def update(weights, mean, gradient):
        return weights - gradient.T, mean + weights

    arrays = X, X, array(16, 8)
    assert moved(update, *arrays) == (3 * N + 2 * N, 0, 1)
    assert moved(update, *arrays, donated=(0, 1)) == (3 * N + 2 * 3 * N, 0, 1)


def copied(fn, *args):
    return moved(fn, *args)[1]


def attention_scores(equation, shape, then=lambda y: y):
    """Scores of a query and a key, both products of 8 x 16 numbers that are seen in another shape."""

    def scores(x, query, key):
        query, key = (then(x @ w).reshape(shape) for w in (query, key))
        return jnp.einsum(equation, query, key)

    return copied(scores, X, W, W)


def test_a_product_copies_operands_in_which_it_does_not_find_matrices():
    assert attention_scores("lhd,shd->hls", (4, 2, 16)) == 2 * 2 * N  # the batch dimension lies between
    assert attention_scores("lhd,shd->hls", (8, 1, 16)) == 0  # one head: nothing is out of order
    assert attention_scores("blhd,bshd->bhls", (2, 2, 2, 16)) == 2 * 2 * N
    # What an elementwise kernel makes is written in the order in which it is wanted.
    assert attention_scores("lhd,shd->hls", (4, 2, 16), then=jnp.tanh) == 0


def test_a_product_reads_a_transposed_array_that_is_written_as_it_is():
    def fn(x, w, by_heads):
        y = (x @ w).reshape(4, 2, 16).transpose(1, 0, 2)
        return y if by_heads else None, jnp.einsum("hld,hsd->hls", y, y)

    assert copied(lambda x, w: fn(x, w, True), X, W) == 0
    assert copied(lambda x, w: fn(x, w, False), X, W) == 2 * 2 * N


@pytest.mark.parametrize(
    ("kernel", "options", "times"),
    [
        (2, {"padding": "SAME"}, 2),  # 0 before and 1 after
        (3, {"padding": "SAME"}, 0),  # 1 on both sides
        (2, {"padding": "VALID"}, 0),
        (2, {"padding": ((0, 1), (0, 1)), "lhs_dilation": (2, 2)}, 0),  # the gradient of a strided convolution
    ],
)
def test_a_convolution_with_unequal_padding_copies_its_input(kernel, options, times):
    def fn(x, w):
        return jax.lax.conv_general_dilated(x, w, (1, 1), dimension_numbers=("NHWC", "HWIO", "NHWC"), **options)

    image = array(2, 4, 4, 4)
    assert copied(fn, image, array(kernel, kernel, 4, 8)) == times * 2 * 4 * 4 * 4 * 4


def test_the_gradient_of_a_pooling_writes_and_reads_the_place_of_each_maximum():
    def pooled(x):
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")

    # For each of 2 x 2 x 2 x 4 maxima four indices and a value are written and read, and its gradient is read again.
    gradient = 2 * 2 * 2 * 4 * 4
    assert copied(jax.grad(lambda x: (pooled(x) * 3).sum()), array(2, 4, 4, 4)) == (2 * 5 + 1) * gradient

"""What kernels move, worked by hand: arrays of 8 x 16 numbers of 4 bytes have 512 bytes, their sums 32 or 64."""

import jax
import jax.numpy as jnp
import pytest

from search_spaces.sharding.graph import Value
from search_spaces.sharding.node_costs import touched_bytes
from search_spaces.sharding.strategies import replicated_strategy
from tests.search_spaces.sharding.small_spaces import array, space_of

X = array(8, 16)
N, ROWS, COLUMNS = 512, 32, 64


def moved(fn, *args, donated=()):
    """Bytes that one device moves, those of copies, and the number of kernels, in one run of a function."""
    space = space_of(fn, *args, sizes=(1,), donated=donated)
    kernels, num_bytes, copied_bytes = space.kernels, 0.0, 0.0
    for vertex in space.graph.operations():
        ranks = [[len(getattr(a, "shape", ())) for a in arrays] for arrays in (vertex.operands, vertex.results)]
        num_bytes += vertex.weight * touched_bytes(vertex, replicated_strategy(*ranks), kernels, (1,))
        copies = zip(kernels.copies[vertex.index], vertex.operands, strict=True)
        copied_bytes += vertex.weight * sum(n * o.num_bytes for n, o in copies if isinstance(o, Value))
    return num_bytes, copied_bytes, kernels.launches.sum()


def test_a_chain_of_elementwise_operations_is_one_kernel():
    assert moved(lambda x: jnp.tanh(jnp.exp(x) * 2 + 1), X) == (2 * N, 0, 1)


def test_a_softmax_starts_from_its_scores_three_times():
    largest, total, result = N + ROWS, N + ROWS + ROWS, N + ROWS + ROWS + N
    assert moved(lambda x: jax.nn.softmax(x, axis=-1), X) == (largest + total + result, 0, 3)


def test_both_moments_of_a_norm_are_one_kernel():
    def norm(x):
        mean, square = x.mean(-1, keepdims=True), (x * x).mean(-1, keepdims=True)
        return (x - mean) * jax.lax.rsqrt(square - mean**2)

    sums = N + 2 * ROWS
    result = N + 2 * ROWS + N
    assert moved(norm, X) == (sums + result, 0, 2)


def test_an_adam_update_reads_four_arrays_and_writes_three():
    def update(state, gradient):
        weights, mean, square = state
        mean, square = 0.9 * mean + 0.1 * gradient, 0.99 * square + 0.01 * gradient**2
        return weights - mean / (jnp.sqrt(square) + 1e-8), mean, square

    assert moved(update, (X, X, X), X, donated=(0, 1, 2)) == (7 * N, 0, 1)


@pytest.mark.parametrize(("fn", "middle"), [(jnp.exp, N + ROWS + N + COLUMNS), (jnp.tanh, 2 * N + ROWS + N + COLUMNS)])
def test_only_what_is_cheap_is_computed_again(fn, middle):
    # Sums over different dimensions are different kernels. A tanh is written by the kernel of the first of them.
    assert moved(lambda x: _sums(fn(x)), X) == (middle, 0, 2)


def _sums(y):
    return y.sum(1), y.sum(0)


def test_what_has_more_operands_than_readers_is_written():
    # Three kernels would read four arrays each, 12 in all; written, it takes 5 and three reads.
    def fn(a, b, c, d):
        y = a + b + c + d
        return y.sum(0), y.sum(1), jnp.sort(y)

    assert moved(fn, X, X, X, X)[0] == 4 * N + N + COLUMNS + N + ROWS + 2 * N


def test_a_slice_reads_what_it_returns_and_what_is_fused_into_it_likewise():
    assert moved(lambda x: jnp.exp(x)[:2], X) == (2 * N / 4, 0, 1)
    assert moved(lambda x: jnp.split(x * 2, 2), X)[0] == 2 * N
    assert moved(lambda x: jnp.split(x * 2, 2)[0] + 1, X)[0] == N


def test_a_transposition_in_an_update_in_place_costs_copies_of_the_results():
    def update(weights, x, gradient):
        return weights - (gradient.T @ x).T

    x, gradient, weights = array(32, 8), array(32, 16), array(8, 16)
    product = 32 * 8 * 4 + 32 * 16 * 4 + N
    assert moved(update, weights, x, gradient)[0] == product + 3 * N
    assert moved(update, weights, x, gradient, donated=(0,))[0] == product + 5 * N


def test_a_product_copies_a_loops_slice_and_heads_that_it_finds_apart():
    weights, x = array(3, 16, 16), array(8, 16)
    _, copied_bytes, _ = moved(lambda w, x: jax.lax.scan(lambda c, v: (c @ v, None), x, w)[0], weights, x)
    assert copied_bytes == 3 * 2 * 16 * 16 * 4

    def scores(x, query, key):
        query, key = ((x @ w).reshape(4, 2, 4, 4) for w in (query, key))
        return jnp.einsum("blhd,bshd->bhls", query, key)

    assert moved(scores, X, array(16, 16), array(16, 16))[1] == 2 * 2 * N
    # With the heads first, each is a matrix that lies in memory as one.
    assert moved(lambda a, b: jnp.einsum("hld,hsd->hls", a @ b, a @ b), array(2, 8, 16), array(16, 16))[1] == 0


def test_what_is_rematerialised_reads_from_memory():
    def fn(x, is_remat):
        y = jnp.exp(x) * 2
        body = lambda y: jnp.sin(jnp.sin(y)).sum()  # noqa: E731
        return jax.grad(lambda y: (jax.checkpoint(body) if is_remat else body)(y))(y)

    assert moved(lambda x: fn(x, False), X)[0] == 2 * N
    assert moved(lambda x: fn(x, True), X)[0] == 4 * N
